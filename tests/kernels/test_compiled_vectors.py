"""Sixteen numbers at once in compiled loops, beside numpy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_module.kernels.rows.compiled_vectors import (
    added,
    as_ones,
    as_sixteenths,
    bytes_of,
    codes,
    floats,
    has_bfloat16,
    lane,
    prefetch,
    signed,
    spread,
    tell_numba_of_vectors,
    total,
    write_totals,
)

numba = pytest.importorskip("numba")

BYTES = np.random.default_rng(0).integers(0, 256, (3, 5, 7), dtype=np.uint8)
FLOATS = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
FLAT, REAL = BYTES.ravel().astype(np.int64), FLOATS.ravel()
WORDS = BYTES.ravel()[:16].view(np.uint64)
HIGHEST = np.full(16, 255, np.uint8)  # of a code shifted up by 15 bits, the next one is 2^23

GIVEN = FLOATS, BYTES, WORDS, HIGHEST
CASES: dict[str, tuple[Callable[..., Any], Any]] = {
    "floats": (lambda r, b, w, h: floats(r, 19), REAL[19:]),
    "spread": (lambda r, b, w, h: spread(np.float32(0.1)), np.full(16, np.float32(0.1))),
    "lane": (lambda r, b, w, h: lane(floats(r, 3), 15), np.full(16, REAL[18])),
    "signed": (lambda r, b, w, h: signed(b, 89), BYTES.ravel()[89:].view(np.int8)),
    "codes": (lambda r, b, w, h: as_ones(codes(b, 3)), 2**23 + FLAT[3:19]),
    "bytes of two integers": (lambda r, b, w, h: as_ones(bytes_of(w[0], w[1])), 2**23 + FLAT[:16]),
    "sixteenths": (lambda r, b, w, h: as_sixteenths(codes(b, 0)), 2**19 + FLAT[:16] / 16),
    "and, or": (
        lambda r, b, w, h: as_ones(codes(b, 0) & 15 | codes(b, 16) & 0xC0),
        2**23 + (FLAT[:16] & 15 | FLAT[16:32] & 0xC0),
    ),
    "shifts": (
        lambda r, b, w, h: as_ones(codes(b, 0) >> 3 | codes(b, 16) << 7),
        2**23 + (FLAT[:16] >> 3 | FLAT[16:32] << 7),
    ),
    "the largest": (lambda r, b, w, h: as_ones(codes(h, 0) << 15), 2**23 + np.full(16, 255 << 15)),
    "the largest of sixteenths": (
        lambda r, b, w, h: as_sixteenths(codes(h, 0) << 15),
        2**19 + np.full(16, 255 << 15) / 16,
    ),
    "sums": (lambda r, b, w, h: floats(r, 0) + floats(r, 16), REAL[:16] + REAL[16:32]),
    "differences": (lambda r, b, w, h: floats(r, 0) - floats(r, 16), REAL[:16] - REAL[16:32]),
    "products": (lambda r, b, w, h: floats(r, 0) * floats(r, 16), REAL[:16] * REAL[16:32]),
}


@pytest.fixture(scope="module", autouse=True)
def _numba_knows() -> None:
    tell_numba_of_vectors()


@pytest.mark.parametrize("case", CASES)
def test_each_number_is_that_of_numpy(case: str) -> None:
    """All sixteen have the bits that numpy computes from the same memory."""
    function, expected = CASES[case]
    compute = numba.njit(function)

    @numba.njit
    def written(given: Any, only: Any, out: Any) -> None:
        for number in range(16):
            # Of sixteen times one of them, one is multiplied by 1, and the others by 0.
            out[number] = total(lane(compute(*given), number) * floats(only, 0))

    only, out = np.eye(16, dtype=np.float32)[5], np.empty(16, np.float32)
    written(GIVEN, only, out)
    assert out.tolist() == expected.astype(np.float32).tolist()


def test_four_totals_are_written_side_by_side() -> None:
    """Each is the sum of its own sixteen, and what is beside them stays."""

    @numba.njit
    def written(given: Any, out: Any) -> None:
        own = floats(given, 0), floats(given, 16), floats(given, 32), floats(given, 48)
        write_totals(out, 2, own[0], own[1], own[2], own[3])

    given, out = 2.0 ** (np.arange(64, dtype=np.float32) % 16), np.full(7, 5, np.float32)
    given[16:32] *= 2
    given[32:48] *= 4
    given[48:] *= 8
    written(given, out)
    assert out.tolist() == [5, 5, 65535, 2 * 65535, 4 * 65535, 8 * 65535, 5]


def test_memory_that_is_not_there_may_be_prefetched() -> None:
    """Behind the last row there may be none."""

    @numba.njit
    def begun(address: Any) -> None:
        prefetch(address)

    begun(0)
    begun((1 << 62) + 7)


@pytest.mark.skipif(not has_bfloat16(), reason="needs AVX512-BF16")
def test_thirty_two_bfloat16_are_added_two_by_two() -> None:
    """Each of sixteen sums gets the products of two numbers side by side."""

    @numba.njit
    def computed(a: Any, b: Any, only: Any, out: Any) -> None:
        for number in range(16):
            sums = added(spread(np.float32(number)), floats(a, 1), floats(b, 0))
            out[number] = total(lane(sums, number) * floats(only, 0))

    # The upper halves of small integers, and of powers of two.
    of_a, of_b = np.arange(33, dtype=np.float32), 2.0 ** np.arange(32, dtype=np.float32)
    a, b = ((of.view(np.uint32) >> 16).astype(np.uint16) for of in (of_a, of_b))
    only, out = np.eye(16, dtype=np.float32)[0], np.empty(16, np.float32)
    computed(a, b, only, out)
    expected = (of_a[1:] * of_b).reshape(16, 2).sum(-1) + np.arange(16)
    assert out.tolist() == expected.astype(np.float32).tolist()


def test_a_total_has_all_sixteen() -> None:
    """It is the sum of distinct powers of two, of which none is missing and none is there twice."""
    powers = 2.0 ** np.arange(16, dtype=np.float32)
    assert numba.njit(lambda given: total(floats(given, 0)))(powers) == 2**16 - 1
