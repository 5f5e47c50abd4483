"""The random numbers that elements are multiplied by, one for each 32-bit word and each chunk.

The bytes of a tensor's row (its last dimension, as little-endian machines store it) are read as
words of 32 bits, and 1024 words are a chunk. In each of two sums, the word ``j`` of a row has the
key ``column_keys[j % 1024] * chunk_key[row * chunks + j // 1024]``, modulo 2**64.

Source of the numbers: SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, 2014), whose nth number takes no more time than its first.
"""

from __future__ import annotations

import functools

import torch

WORD = 4  # bytes
CHUNK = 1024  # words
CHUNK_BYTES = CHUNK * WORD

# The first digits of pi, as Blowfish takes them: numbers that nobody chose.
COLUMN_SEEDS = 0x243F6A8885A308D3, 0x13198A2E03707344
CHUNK_SEEDS = 0xA4093822299F31D0, 0x082EFA98EC4E6C89

STEP = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(number: int) -> int:
    """Return the number that int64 holds in place of an integer modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63


def odd_numbers(seed: int, places: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a SplitMix64 sequence at ``places`` (int64, from 0), made odd.

    An odd number has an inverse modulo 2**64: multiplying by it loses nothing.
    """
    x = (places + 1) * signed(STEP) + signed(seed)
    x = (x ^ _shifted(x, 30)) * signed(MULTIPLIERS[0])
    x = (x ^ _shifted(x, 27)) * signed(MULTIPLIERS[1])
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right and bring in zeros, as for unsigned integers."""
    return (x >> by) & (2 ** (64 - by) - 1)


def chunk_keys(numbers: torch.Tensor) -> torch.Tensor:
    """Return the keys of the chunks with these numbers, ``[2, *numbers]``."""
    return torch.stack([odd_numbers(seed, numbers) for seed in CHUNK_SEEDS])


@functools.cache
def column_keys(device: torch.device) -> torch.Tensor:
    """Return the keys of the words of a chunk, int64 ``[2, CHUNK]``."""
    with torch.inference_mode(False), torch.device("cpu"):
        places = torch.arange(CHUNK)
        keys = torch.stack([odd_numbers(seed, places) for seed in COLUMN_SEEDS])
    return keys.to(device)
