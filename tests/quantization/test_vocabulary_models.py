"""Models with a quantized vocabulary: from GGUF files, in an engine, written, and by the laws."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from hypothesis import strategies as st

from vllm_module import LLM, ModelConfig, QuantizationConfig, SamplingParams, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import UnsupportedModelError
from vllm_module.export.compressed import convert
from vllm_module.export.sharded_state import shard
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.quantization import Rules, quantize
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.testing import LAWS

HERE = Path(__file__).parent
written = SimpleNamespace(**runpy.run_path(str(HERE.parent / "weights" / "gguf_models.py")))
of = SimpleNamespace(**runpy.run_path(str(HERE / "vocabularies.py")))
FORMULAS, IDS, CHANNEL, INT4 = of.FORMULAS, of.IDS, of.CHANNEL, of.INT4


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


class Logits(of.Vocabulary):
    """A tied vocabulary in a scheme, or in blocks of a type."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        if scheme in BLOCK_TYPES:
            quantize(self, Rules((("embed_tokens", GGUFMethod(((None, scheme),))),)))
        else:
            quantize(self, of.asking(embed_tokens=scheme))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(ids)[1]
        return logits


@pytest.mark.usefixtures("_few_examples", "_finite_blocks")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_tied_vocabulary_keeps_the_laws(law: Any) -> None:
    """All that is promised of loading holds for one tensor in two layers, with its scales."""
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
