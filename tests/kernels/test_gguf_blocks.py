"""Blocks of GGUF files beside gguf-py, which llama.cpp's converters are written with."""

from __future__ import annotations

import gguf
import pytest
import torch

from vllm_module.kernels.matmul import gguf_blocks, gguf_codebooks
from vllm_module.kernels.matmul.gguf_blocks import block_scales, blocks_matmul, dequantize_blocks
from vllm_module.kernels.matmul.gguf_codebooks import CODEBOOKS, codebook
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES, TYPE_NAMES

# Where the exponents of a block's scales are: byte 1 for the others.
PLACES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (1, 3)),
    "Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,), "TQ1_0": (53,), "TQ2_0": (65,),
    "IQ1_M": (55,), "MXFP4": (0,),
}  # fmt: skip


def blocks_of(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random blocks; every byte is drawn, but scales are finite."""
    block = BLOCK_TYPES[kind]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, block.nbytes), generator=generator, dtype=torch.uint8)
    for place in PLACES.get(kind, (1,)):
        blocks[..., place] &= 0b10111011  # the exponent of a float16 is then not the largest
    return blocks


def by_the_library(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    rows = blocks.flatten(-2).numpy()
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))


def test_sizes_and_numbers_of_types_are_the_librarys() -> None:
    """A type's number, values and bytes are those of gguf-py."""
    newest = {41: "Q1_0"}  # gguf-py before 0.19 lacks it
    assert {each.value: each.name for each in gguf.GGMLQuantizationType} | newest == TYPE_NAMES
    for name, block in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == block


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebooks_are_the_librarys(name: str) -> None:
    """Each vector of a codebook is gguf-py's, in its place."""
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    expected = torch.from_numpy(theirs.grid).view(theirs.grid_shape)
    assert torch.equal(codebook(name, torch.device("cpu")), expected)


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_TYPES if kind != "MXFP4"])
def test_scales_that_are_no_numbers_are_found(kind: str) -> None:
    """Just the blocks that gguf-py has a NaN or an infinity in have a scale that is not finite.

    For it, 255 of MXFP4 is a number. The standard of that type says that it is NaN.
    """
    block = BLOCK_TYPES[kind]
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (4096, block.nbytes), generator=generator, dtype=torch.uint8)
    for place in PLACES.get(kind, (1,)):
        blocks[:2048, place] |= 0x7C  # the exponent of infinity and NaN
    finite = by_the_library(blocks[:, None], kind).isfinite().all(-1)
    assert torch.equal(block_scales(blocks, kind).isfinite().all(-1), finite)
    assert not finite.all()
    assert finite.any()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_are_the_librarys_bit_for_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any bytes stand for the numbers that gguf-py computes, however they are cut."""
    blocks = blocks_of(kind, 7, 3)
    expected = by_the_library(blocks, kind)
    assert torch.equal(dequantize_blocks(blocks, kind), expected)
    monkeypatch.setattr(gguf_blocks, "_CHUNK", 1024)
    assert torch.equal(dequantize_blocks(blocks, kind), expected)
    assert torch.equal(dequantize_blocks(blocks, kind, torch.bfloat16), expected.bfloat16())
    for row in range(7):  # blocks at any place in memory
        assert torch.equal(dequantize_blocks(blocks[row, 1:2], kind), expected[row].chunk(3)[1])
    strided = blocks.repeat_interleave(2, 0)[::2]
    assert torch.equal(dequantize_blocks(strided, kind), expected)
    assert dequantize_blocks(blocks[:0], kind).shape == (0, expected.shape[1])


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
)
def test_numbers_that_the_library_quantizes_come_back(kind: str) -> None:
    """What gguf-py quantizes is near to what it was, so values are in their places."""
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    if kind.startswith("TQ"):
        weight = weight.round().clamp(-1, 1)  # what three values are made for
    packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    blocks = torch.from_numpy(packed).view(4, -1, BLOCK_TYPES[kind].nbytes)
    assert (dequantize_blocks(blocks, kind) - weight).abs().max() < 1


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_product_is_that_of_the_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is torch's with the dequantized weight, whatever is dequantized at a time."""
    monkeypatch.setattr(gguf_blocks, "_CHUNK", 1024)
    blocks = blocks_of(kind, 10, 2) & 0x9F
    weight = by_the_library(blocks, kind).double()
    x, bias = torch.randn(2, 3, weight.shape[1]), torch.randn(10)
    expected = torch.nn.functional.linear(x.double(), weight, bias.double()).float()
    within = {"rtol": 1e-5, "atol": 1e-5 * weight.abs().max().item()}
    torch.testing.assert_close(blocks_matmul(x, blocks, kind, bias), expected, **within)
    assert blocks_matmul(x[:0], blocks, kind).shape == (0, 3, 10)


@pytest.mark.parametrize("kind", ["IQ3_S", "IQ4_XS"])
def test_values_of_codes_are_constants_of_a_compiled_function(kind: str) -> None:
    """A type with a codebook is compiled in one graph, also where it is the first use of it."""
    gguf_codebooks._unpacked.cache_clear()
    gguf_blocks._kept.cache_clear()
    blocks = blocks_of(kind, 2, 1)
    compiled = torch.compile(
        lambda each: dequantize_blocks(each, kind), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(blocks), by_the_library(blocks, kind))
    assert torch.equal(dequantize_blocks(blocks, kind), by_the_library(blocks, kind))


def test_blocks_that_do_not_fit_are_refused() -> None:
    """A type without a formula, another size of a block and another width are refused."""
    blocks = blocks_of("Q8_0", 4, 2)
    with pytest.raises(ValueError, match="'NVFP4': expected one of Q4_0"):
        dequantize_blocks(blocks, "NVFP4")
    with pytest.raises(ValueError, match=r"uint8 \[\.\.\., count, 18\], got torch.uint8"):
        dequantize_blocks(blocks, "Q4_0")
    with pytest.raises(ValueError, match="x must have 64 features"):
        blocks_matmul(torch.ones(1, 32), blocks, "Q8_0")
