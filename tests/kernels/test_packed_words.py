"""Codes that share words: every packing, unpacked beside a loop over bits."""

from __future__ import annotations

import pytest
import torch

from vllm_module.kernels.matmul import packed_words
from vllm_module.kernels.matmul.packed_words import Packing, dequantize_packed, pack, unpack

AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
PACKINGS = [
    *[(Packing(bits, along), torch.int32) for bits in (2, 3, 4, 8) for along in (0, 1)],
    (Packing(4, 0, AWQ), torch.int32),
    (Packing(4, 1, (1, 0)), torch.uint8),
    (Packing(4), torch.uint8),
]


@pytest.mark.parametrize(("packing", "dtype"), PACKINGS, ids=str)
def test_codes_are_where_the_packing_says(packing: Packing, dtype: torch.dtype) -> None:
    """Each code is the bits at its place in the stream of its row, by Python's integers."""
    torch.manual_seed(0)
    codes = torch.randint(0, 1 << packing.bits, (64, 96), dtype=torch.uint8)
    words = pack(codes, packing, dtype)
    assert words.dtype == dtype
    assert packing.codes(words.shape, dtype.itemsize * 8) == codes.shape
    assert torch.equal(unpack(words, packing), codes)
    width, row = dtype.itemsize * 8, 5
    line = (words.T if packing.along == 0 else words)[row].tolist()
    stream = sum((word % (1 << width)) << (width * i) for i, word in enumerate(line))
    expected = (codes.T if packing.along == 0 else codes)[row].tolist()
    for i, code in enumerate(expected):
        place = i
        if packing.order is not None:
            count = len(packing.order)
            place = i // count * count + packing.order[i % count]
        assert stream >> (place * packing.bits) & ((1 << packing.bits) - 1) == code


def test_codes_that_fill_no_word_are_refused() -> None:
    """Half a word cannot be written."""
    with pytest.raises(ValueError, match="12 codes of 4 bits do not fill whole words of 32 bits"):
        pack(torch.zeros(2, 12, dtype=torch.uint8), Packing(4))


def test_an_element_is_its_code_without_zero_times_its_scale() -> None:
    """Zeros, groups in another order, a smaller last group and a codebook, element by element."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (4, 24), dtype=torch.uint8)
    words, packing = pack(codes, Packing(4)), Packing(4)
    scales, zeros = torch.rand(4, 2).half(), torch.randint(0, 16, (4, 2), dtype=torch.uint8)
    group_of = torch.randint(0, 2, (24,), dtype=torch.int32)
    codebook = torch.randn(16)
    for given in (None, group_of):
        mixed = dequantize_packed(words, scales, packing, 16, torch.float16, zeros, given)
        symmetric = dequantize_packed(words, scales, packing, 16, torch.float16, None, given)
        by_codebook = dequantize_packed(
            words, scales, packing, 16, torch.float16, None, given, codebook
        )
        for row in range(4):
            for column in range(24):
                group = int(given[column]) if given is not None else column // 16
                code, scale = float(codes[row, column]), scales[row, group].float()
                zero = float(zeros[row, group])
                assert mixed[row, column] == ((code - zero) * scale).half()
                assert symmetric[row, column] == ((code - 8) * scale).half()
                assert by_codebook[row, column] == (codebook[int(code)] * scale).half()


@pytest.mark.parametrize("rows", [0, 8, 40])
@pytest.mark.parametrize(("packing", "dtype"), PACKINGS, ids=str)
def test_few_words(packing: Packing, dtype: torch.dtype, rows: int) -> None:
    """No row of words, one or a few are unpacked and dequantized, however they lie in memory."""
    torch.manual_seed(0)
    unit = 32 if packing.bits == 3 else dtype.itemsize * 8 // packing.bits
    rows = rows if packing.along == 1 else rows // 8 * unit
    codes = torch.randint(0, 1 << packing.bits, (rows, 2 * unit), dtype=torch.uint8)
    words, scales = pack(codes, packing, dtype), torch.rand(rows, 2)
    middle = 1 << (packing.bits - 1)
    expected = (codes.float() - middle) * scales.repeat_interleave(unit, 1)
    wide = torch.zeros(words.shape[0], 2 * words.shape[1], dtype=dtype)
    wide[:, ::2] = words
    for held in (words, words.T.contiguous().T, wide[:, ::2]):
        assert torch.equal(unpack(held, packing), codes)
        weight = dequantize_packed(held, scales, packing, unit, torch.float32)
        assert torch.equal(weight, expected)


def test_the_last_rows_of_a_weight_may_be_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 40 rows, 32 of which are dequantized at once, leaves one word in a column."""
    torch.manual_seed(0)
    monkeypatch.setattr(packed_words, "_CHUNK", 1)
    codes = torch.randint(0, 16, (40, 64), dtype=torch.uint8)
    words = pack(codes, Packing(4, 0, AWQ))
    weight = dequantize_packed(words, torch.ones(40, 1), Packing(4, 0, AWQ), 64, torch.float32)
    assert torch.equal(weight, codes.float() - 8)
