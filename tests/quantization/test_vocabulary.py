"""Embeddings, and heads that are tied to them, quantized: rows and logits of the layers."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module import vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.errors import DuplicateWeightError, UnsupportedModelError, WeightReadError
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.layers import ParallelLMHead, VocabParallelEmbedding
from vllm_module.quantization import EightBitMethod, Rules, quantize
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.scheme import MXFP8, ONLINE

HERE = Path(__file__).parent
written = SimpleNamespace(**runpy.run_path(str(HERE.parent / "weights" / "gguf_models.py")))
of = SimpleNamespace(**runpy.run_path(str(HERE / "vocabularies.py")))
Vocabulary, asking, table, int8 = of.Vocabulary, of.asking, of.table, of.int8
FORMULAS, IDS, TOKENS, FEATURES = of.FORMULAS, of.IDS, of.TOKENS, of.FEATURES
CHANNEL, INT4 = of.CHANNEL, of.INT4


@pytest.mark.parametrize("scheme", FORMULAS)
@pytest.mark.parametrize("named", ["embed_tokens", "lm_head"])
def test_a_tied_vocabulary_is_quantized_by_either_name(scheme: str, named: str) -> None:
    """Rows and logits are those of the scheme's formula, and both layers hold one tensor."""
    stored, ids = table(), torch.tensor([[0, 149, 7], [64, 63, 0]])
    expected = FORMULAS[scheme](stored)
    model = Vocabulary()
    quantize(model, asking(**{named: scheme}))
    model.load_weights({"embed_tokens.weight": stored})
    rows, logits = model(ids)
    torch.testing.assert_close(rows, expected[ids], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, F.linear(expected[ids], expected), rtol=1e-4, atol=1e-3)
    embedding, head = model.embed_tokens, model.lm_head
    assert embedding.weight is head.weight
    assert all(
        head.get_parameter(name) is embedding.get_parameter(name)
        for name in embedding.parameter_names
    )
    held = sum(each.numel() * each.itemsize for each in model.parameters())
    padded = 192 * FEATURES  # rows are padded to a multiple of 64
    assert held <= padded * (1.02 if scheme != INT4 else 0.5 + 4 / 32)


@pytest.mark.parametrize("scheme", [CHANNEL, INT4, "fp8_per_channel"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_look_up_their_rows(scheme: str, size: int) -> None:
    """Rows of all ranks, padded ones too, sum up to the formula's, and ids outside are refused."""
    stored, ids = table(), torch.tensor([0, 149, 7, 64, 63, 128])
    expected = FORMULAS[scheme](stored)

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = Vocabulary()
        quantize(model, asking(embed_tokens=scheme))
        model.load_weights(iter([("lm_head.weight", stored)]))
        for outside in (-1, TOKENS, 10**6):
            with pytest.raises(IndexError):
                model(torch.tensor([0, outside]))
        result: tuple[torch.Tensor, torch.Tensor] = model(ids)
        return result

    for rows, logits in run_ranks(size, work):
        torch.testing.assert_close(rows, expected[ids], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(logits, F.linear(expected[ids], expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", FORMULAS)
@pytest.mark.parametrize("form", [dict, iter], ids=["indexed", "streamed"])
@pytest.mark.parametrize("off", [None, (0, 0), (149, 255)])
def test_two_names_of_a_quantized_table_are_compared(
    scheme: str, form: Any, off: tuple[int, int] | None
) -> None:
    """A checkpoint may have both names, as some of tied models do, and their values must agree."""
    stored = table()
    other = stored.clone()
    if off is not None:
        other[off] += 30
    model = Vocabulary()
    quantize(model, asking(embed_tokens=scheme))
    pairs = [("lm_head.weight", other), ("embed_tokens.weight", stored)]
    given = dict(pairs) if form is dict else iter(pairs)
    if off is None:
        model.load_weights(given)
        torch.testing.assert_close(model(IDS)[0], FORMULAS[scheme](stored)[IDS])
        return
    with pytest.raises(DuplicateWeightError, match="but their values differ"):
        model.load_weights(given)


@pytest.mark.parametrize("scheme", FORMULAS)
@pytest.mark.parametrize("form", [dict, iter], ids=["indexed", "streamed"])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(149, 150)], ids=str)
def test_two_names_whose_codes_agree_are_told_apart_by_their_scales(
    scheme: str, form: Any, rows: slice
) -> None:
    """Rows of twice the size have the same codes, and are other values all the same."""
    stored, other = table(), table()
    other[rows] *= 2
    model = Vocabulary()
    quantize(model, asking(embed_tokens=scheme))
    with pytest.raises(DuplicateWeightError, match="but their values differ"):
        model.load_weights(form({"lm_head.weight": other, "embed_tokens.weight": stored}.items()))


@pytest.mark.parametrize("form", [dict, iter], ids=["indexed", "streamed"])
def test_two_names_are_compared_where_a_rank_holds_padding_alone(form: Any) -> None:
    """Of 150 rows, the last of six ranks has none: it has nothing to compare, and no complaint."""

    def work(rank: int) -> None:
        model = Vocabulary()
        quantize(model, asking(embed_tokens=CHANNEL))
        pairs = [("lm_head.weight", table()), ("embed_tokens.weight", table())]
        model.load_weights(dict(pairs) if form is dict else iter(pairs))
        torch.testing.assert_close(model(IDS)[0], int8(table())[IDS])

    run_ranks(6, work)


def test_ids_outside_are_refused_at_size_1() -> None:
    """Rows of padding are no tokens, in any scheme."""
    for scheme in FORMULAS:
        model = Vocabulary()
        quantize(model, asking(embed_tokens=scheme))
        model.load_weights({"embed_tokens.weight": table()})
        for outside in (-1, TOKENS, 191, 192, 10**6):
            with pytest.raises(IndexError):
                model.embed_tokens(torch.tensor([outside]))


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES.keys() - {"IQ1_M"}))  # gguf-py writes none
def test_rows_in_blocks_are_gguf_pys(kind: str) -> None:
    """An embedding of each type has the values of gguf-py's own dequantization, on each rank."""
    packed, values = written.stored(table(), kind, 0)
    blocks = torch.from_numpy(packed).view(TOKENS, -1, BLOCK_TYPES[kind].nbytes)
    assert values.shape == (TOKENS, FEATURES)
    ids = torch.tensor([0, 149, 7, 64, 63, 128])
    name = f"weight_{kind.lower()}"

    def work(rank: int) -> None:
        model = Vocabulary()
        model.embed_tokens.quantize(GGUFMethod(((None, kind),)))
        model.lm_head.share_weight(model.embed_tokens)
        model.load_weights({f"lm_head.{name}": blocks})
        rows, logits = model(ids)
        torch.testing.assert_close(rows, values[ids], rtol=1e-6, atol=1e-6)
        expected = F.linear(values[ids], values)
        largest = float(expected.abs().max())
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * largest)
        assert model.lm_head.get_parameter(name) is model.embed_tokens.get_parameter(name)

    for size in (1, 3):
        run_ranks(size, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_in_blocks_have_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    """They are gguf-py's values, rounded as torch rounds them."""
    packed, values = written.stored(table(), "Q8_0", 0)
    blocks = torch.from_numpy(packed).view(TOKENS, -1, BLOCK_TYPES["Q8_0"].nbytes)
    ids = torch.tensor([0, 149, 7])
    layer = VocabParallelEmbedding(TOKENS, FEATURES, params_dtype=dtype)
    layer.quantize(GGUFMethod(((None, "Q8_0"),)))
    layer.load_weights({"weight_q8_0": blocks})
    torch.testing.assert_close(layer(ids), values[ids].to(dtype), rtol=0, atol=0)


def test_blocks_of_a_table_are_updated_in_place() -> None:
    """New blocks are written where the old ones are, and a scale that is NaN is refused."""
    model = Vocabulary()
    model.embed_tokens.quantize(GGUFMethod(((None, "Q8_0"),)))
    model.lm_head.share_weight(model.embed_tokens)
    packed, _ = written.stored(table(), "Q8_0", 0)
    blocks = torch.from_numpy(packed).view(TOKENS, -1, 34)
    model.load_weights({"embed_tokens.weight_q8_0": blocks})
    held = model.embed_tokens.weight_q8_0
    address, before = held.data_ptr(), model(IDS)
    model.update_weights({"lm_head.weight_q8_0": blocks.flip(0)})
    assert held.data_ptr() == address
    assert torch.equal(model(TOKENS - 1 - IDS)[0], before[0])
    broken = blocks.clone()
    broken[3, 2, :2] = 0xFF
    with pytest.raises(WeightReadError, match="all scales of blocks must be finite"):
        model.update_weights({"embed_tokens.weight_q8_0": broken})


def test_updates_requantize_a_table_in_place() -> None:
    """Full precision by either name is quantized where the old values are."""
    model = Vocabulary()
    quantize(model, asking(embed_tokens=CHANNEL))
    model.load_weights({"embed_tokens.weight": table()})
    held = {name: each.data_ptr() for name, each in model.named_parameters()}
    for seed, name in enumerate(("lm_head.weight", "embed_tokens.weight"), start=1):
        model.update_weights({name: table(seed)})
        rows, logits = model(IDS)
        expected = int8(table(seed))
        torch.testing.assert_close(rows, expected[IDS])
        torch.testing.assert_close(logits, F.linear(rows, expected), rtol=1e-4, atol=1e-3)
    assert held == {name: each.data_ptr() for name, each in model.named_parameters()}


def test_a_tied_head_keeps_a_bias_of_its_own() -> None:
    """What is shared is the weight; a bias is the head's and in full precision."""
    model, bias = Vocabulary(tied=False), torch.randn(TOKENS)
    model.lm_head = ParallelLMHead(TOKENS, FEATURES, bias=True)
    model.lm_head.tie_weights(model.embed_tokens)
    quantize(model, asking(embed_tokens=CHANNEL))
    model.load_weights({"embed_tokens.weight": table(), "lm_head.bias": bias})
    rows, logits = model(IDS)
    expected = int8(table())
    torch.testing.assert_close(logits, F.linear(rows, expected, bias), rtol=1e-4, atol=1e-3)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_an_embedding_without_a_tied_head_is_quantized_alone() -> None:
    """A rule for the embedding leaves the head as it is, and the other way round."""
    for named, other in (("embed_tokens", "lm_head"), ("lm_head", "embed_tokens")):
        model = Vocabulary(tied=False)
        quantize(model, asking(**{named: INT4}))
        assert model.get_submodule(named).is_quantized
        assert not model.get_submodule(other).is_quantized


@pytest.mark.parametrize("target", ["Linear", "re:.*", "re:.*embed_tokens", "model", "odel.embed"])
def test_only_its_name_quantizes_an_embedding(target: str) -> None:
    """Rules for every layer, for patterns and for what is above an embedding leave it as it is."""
    model, scheme = vLLMModule(), ONLINE[CHANNEL]
    model.model = Vocabulary()
    quantize(model, Rules(((target, scheme),)))
    assert not model.model.embed_tokens.is_quantized
    assert not model.model.lm_head.is_quantized
    for name in ("=model.embed_tokens", "model.embed_tokens", "embed_tokens", "lm_head"):
        other = vLLMModule()
        other.model = Vocabulary()
        quantize(other, Rules(((target, None), (name, scheme))))
        assert other.model.embed_tokens.is_quantized, name
        assert other.model.lm_head.quant_method is other.model.embed_tokens.quant_method


def test_a_scheme_without_rows_is_refused() -> None:
    """NF4 has no rows to look up; the error names the layer."""
    model = Vocabulary()
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens cannot .* looks up rows"):
        quantize(model, Rules((("lm_head", OnlineNF4Method()),)))


def test_two_schemes_of_one_table_are_refused() -> None:
    """A tied vocabulary is one tensor, which cannot be held in two schemes."""
    with pytest.raises(UnsupportedModelError, match="embed_tokens and lm_head are one tensor"):
        quantize(Vocabulary(), asking(embed_tokens=CHANNEL, lm_head=INT4))


def test_blocks_of_one_row_have_scales_of_their_own() -> None:
    """MXFP8's scales are looked up with the rows: e4m3 values times powers of two."""
    values = torch.randn(TOKENS, FEATURES).clamp(-2, 2).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 134, (TOKENS, FEATURES // 32), dtype=torch.uint8)
    embedding = VocabParallelEmbedding(TOKENS, FEATURES)
    embedding.quantize(EightBitMethod(MXFP8))
    embedding.load_weights({"weight": values, "weight_scale": exponents})
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(embedding(IDS), (values.float() * scales)[IDS])
