"""Embeddings, and heads that are tied to them: in blocks of GGUF files, or quantized online."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vllm_module import LLM, ModelConfig, QuantizationConfig, SamplingParams, get_model, vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.errors import DuplicateWeightError, UnsupportedModelError, WeightReadError
from vllm_module.export.compressed import convert
from vllm_module.export.sharded_state import shard
from vllm_module.kernels.matmul import gguf_blocks
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.layers import ParallelLMHead, VocabParallelEmbedding
from vllm_module.quantization import EightBitMethod, Rules, online_rules, quantize
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.scheme import MXFP8, ONLINE
from vllm_module.testing import LAWS

written = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[1] / "weights" / "gguf_models.py"))
)
IDS = torch.arange(2, 14)
TOKENS, FEATURES = 150, 256  # no multiple of the padding, and a whole block of every type
CHANNEL, INT4 = "int8_per_channel_weight_only", "int4_per_group"


class Vocabulary(vLLMModule):
    """An embedding and a head, tied or not."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(TOKENS, FEATURES)
        self.lm_head = ParallelLMHead(TOKENS, FEATURES)
        if tied:
            self.lm_head.tie_weights(self.embed_tokens)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.embed_tokens(ids)
        return rows, self.lm_head(rows)


def asking(**overrides: Any) -> Rules:
    return online_rules(QuantizationConfig(scheme=CHANNEL, group_size=32, overrides=overrides))


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(seed))


# Formulas of the schemes, written out.
def int8(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round().clamp(-128, 127) * scale


def int4(rows: torch.Tensor) -> torch.Tensor:
    groups = rows.view(len(rows), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    return ((groups / scale).round().clamp(-8, 7) * scale).view(rows.shape)


def fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def per_tensor(rows: torch.Tensor) -> torch.Tensor:
    return fp8(rows, rows.abs().max() / 448)


def per_channel(rows: torch.Tensor) -> torch.Tensor:
    return fp8(rows, rows.abs().amax(1, keepdim=True) / 448)


def per_block(rows: torch.Tensor) -> torch.Tensor:
    values = torch.zeros_like(rows)
    for top in range(0, len(rows), 128):
        for left in range(0, rows.shape[1], 128):
            at = slice(top, top + 128), slice(left, left + 128)
            values[at] = fp8(rows[at], rows[at].abs().max() / 448)
    return values


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    CHANNEL: int8,
    INT4: int4,
    "fp8_per_channel": per_channel,
    "fp8_per_tensor": per_tensor,
    "fp8_per_block": per_block,
}


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


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_tied_file_stays_in_blocks(tmp_path: Path, kind: str, size: int) -> None:
    """Of a file without a head the model holds the file's bytes and has transformers' logits."""
    model = written.new_model(written.CONFIGS["llama-tied"])
    path = written.write(tmp_path / "m.gguf", model, lambda _: kind)
    expected = written.logits(model, IDS)
    file = gguf.GGUFReader(path)
    (stored,) = (each for each in file.tensors if each.name == "token_embd.weight")
    whole = torch.from_numpy(stored.data.copy())

    def work(rank: int) -> torch.Tensor:
        loaded = get_model(model_config=ModelConfig(model=str(path), dtype="float32"))
        head, embedding = loaded.lm_head, loaded.model.embed_tokens
        if kind != "F16":
            name = f"weight_{kind.lower()}"
            held = embedding.get_parameter(name)
            assert head.get_parameter(name) is held
            rows = whole[rank * len(held) : (rank + 1) * len(held)]
            assert torch.equal(held.flatten(1)[: len(rows)], rows)
        result: torch.Tensor = loaded.compute_logits(loaded(IDS, torch.arange(len(IDS))))
        return result

    for computed in run_ranks(size, torch.inference_mode()(work)):
        torch.testing.assert_close(computed, expected, rtol=0, atol=1e-4)


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


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("scheme", [CHANNEL, INT4])
def test_an_engine_runs_and_sleeps_with_it(tmp_path: Path, scheme: str) -> None:
    """Greedy tokens are transformers' with the formula's table, before and after sleep."""
    config = written.CONFIGS["llama-tied"]
    model = written.new_model(config)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_(FORMULAS[scheme](weight))
    prompt = IDS.tolist()
    theirs = model.generate(IDS[None], max_new_tokens=8, do_sample=False, pad_token_id=0)
    asked = QuantizationConfig(
        scheme=scheme, group_size=32, overrides={"embed_tokens": scheme, "layers": "none"}
    )
    llm = LLM(
        str(tmp_path), dtype="float32", quantization=asked, skip_tokenizer_init=True, device="cpu"
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    try:
        for _ in range(2):
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
            assert list(output.outputs[0].token_ids) == theirs[0, len(prompt) :].tolist()
            llm.sleep(level=1)
            llm.wake_up()
    finally:
        llm.close()


class Logits(Vocabulary):
    """A tied vocabulary in a scheme, or in blocks of a type."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        if scheme in BLOCK_TYPES:
            quantize(self, Rules((("embed_tokens", GGUFMethod(((None, scheme),))),)))
        else:
            quantize(self, asking(embed_tokens=scheme))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(ids)[1]
        return logits


@pytest.fixture
def _few_examples() -> Iterator[None]:
    """Draw few: the laws are held with many in tests/laws, and here the ties are what is new."""
    before = settings.get_current_profile_name()
    settings.register_profile("vocabulary", settings.get_profile("ci"), max_examples=4)
    settings.load_profile("vocabulary")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("_few_examples")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_tied_vocabulary_keeps_the_laws(law: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is promised of loading holds for one tensor in two layers, with its scales."""

    def finite(blocks: torch.Tensor, at: int) -> torch.Tensor:
        return blocks[:, at : at + 1].float() / 4096  # random bytes may be NaN as a float16

    monkeypatch.setattr(gguf_blocks, "_half", finite)
    law(Logits, st.sampled_from([*FORMULAS, "Q8_0", "Q4_0"]), inputs=lambda model: (IDS,))


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", [CHANNEL, INT4])
def test_a_sharded_state_holds_one_table(tmp_path: Path, scheme: str, size: int) -> None:
    """What ranks hold is written once for both layers, and loaded again with the same logits."""
    written.new_model(written.CONFIGS["llama-tied"]).save_pretrained(tmp_path / "full")
    asked = QuantizationConfig(scheme=scheme, group_size=32, overrides={"lm_head": scheme})
    config = ModelConfig(model=str(tmp_path / "full"), dtype="float32", quantization=asked)
    shard(config, size, tmp_path / "sharded")
    again = config.model_copy(update={"model": str(tmp_path / "sharded")})

    @torch.inference_mode()
    def work(rank: int) -> None:
        whole, parts = (get_model(model_config=each) for each in (config, again))
        positions = torch.arange(len(IDS))
        expected, logits = (each.compute_logits(each(IDS, positions)) for each in (whole, parts))
        assert torch.equal(logits, expected)
        assert parts.lm_head.weight is parts.model.embed_tokens.weight
        assert parts.digest().parts == whole.digest().parts

    run_ranks(size, work)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("named", ["embed_tokens", "lm_head"])
def test_a_quantized_table_is_not_converted(tmp_path: Path, named: str) -> None:
    """Readers of compressed-tensors would look up rows of words; the error names the layer."""
    written.new_model(written.CONFIGS["llama-tied"]).save_pretrained(tmp_path / "full")
    asked = QuantizationConfig(scheme=CHANNEL, overrides={named: CHANNEL})
    config = ModelConfig(model=str(tmp_path / "full"), quantization=asked)
    with pytest.raises(UnsupportedModelError, match=r"model\.embed_tokens is an embedding"):
        convert(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
