"""Sixteen numbers at once in compiled loops, beside numpy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_module.kernels.rows.compiled_vectors import (
    as_ones,
    as_sixteenths,
    bytes_of,
    codes,
    floats,
    lane,
    signed,
    spread,
    tell_numba_of_vectors,
    total,
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


def test_a_total_has_all_sixteen() -> None:
    """It is the sum of distinct powers of two, of which none is missing and none is there twice."""
    powers = 2.0 ** np.arange(16, dtype=np.float32)
    assert numba.njit(lambda given: total(floats(given, 0)))(powers) == 2**16 - 1
