"""A running engine with an adapter merged into it holds PEFT's ``merge_and_unload``."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import LLM, SamplingParams
from vllm_module.errors import ModelNotReadyError, UnsupportedModelError, WeightLoadError

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
FAMILIES, adapt, load_base = SUPPORT["FAMILIES"], SUPPORT["adapt"], SUPPORT["load_base"]
as_peft = runpy.run_path(str(Path(__file__).with_name("test_merged.py")))["as_peft"]
tied_llama = runpy.run_path(str(Path(__file__).with_name("test_merged.py")))["tied_llama"]
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
WEIGHTS = "adapter_model.safetensors"


def start(base: Path, **settings: Any) -> LLM:
    return LLM(str(base), **{"kv_cache_memory_bytes": 1 << 20, "dtype": "float32"} | settings)


def tokens(llm: LLM, adapter: str | None = None) -> list[int]:
    [output] = llm.generate([[5, 9, 2, 41]], FIVE, use_tqdm=False, lora_request=adapter)
    return list(output.outputs[0].token_ids)


def ranks_of(family: str) -> dict[str, Any]:
    """Return settings of two ranks for five families: experts apart for one, layers for another."""
    return {
        "llama": {"tensor_parallel_size": 2},
        "mixtral": {
            "tensor_parallel_size": 2, "enable_expert_parallel": True, "num_redundant_experts": 2,
        },
        "gpt_oss": {"tensor_parallel_size": 2},
        "qwen3": {"pipeline_parallel_size": 2},  # one stage has no A and B, and the other has
        "phi3": {"pipeline_parallel_size": 2},
    }.get(family, {})  # fmt: skip


# The others are merged on one rank, as test_merged.py merges their files.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if ranks_of(family) else [pytest.mark.at_length])
        for family in FAMILIES
    ],
)
def test_family(tuned: Callable[[str], Any], family: str, tmp_path: Path) -> None:
    """Every tensor has PEFT's bits, on several ranks too, and requests get the adapter's tokens."""
    one = tuned(family)
    as_peft(one.base, one.adapter, tmp_path / "peft")
    wanted = load_base(tmp_path / "peft").digest()
    with start(one.base, **ranks_of(family)) as llm:
        llm.load_adapter("a", one.adapter)
        adapted, before = tokens(llm, "a"), llm.digest()
        llm.merge_adapter("a")
        assert llm.digest().tensors == wanted.tensors != before.tensors
        assert tokens(llm) == adapted
        assert llm.list_adapters() == []
        assert llm.weight_version == "1"


LONG = [(7 * i + 3) % 60 for i in range(40)]


def answers(llm: LLM, adapter: str | None = None) -> list[int]:
    [output] = llm.generate([LONG], FIVE, use_tqdm=False, lora_request=adapter)
    return list(output.outputs[0].token_ids)


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Return a copy of an adapter in which ``change`` has changed the tensors."""
    folder.mkdir()
    tensors = load_file(source / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    settings = (source / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(settings)
    return folder


def test_updated_adapter(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """What update_adapter wrote is merged, cached pages of the old weights are not used."""
    one = tuned("qwen3")
    tensors: dict[str, torch.Tensor] = {}

    def double(of: dict[str, torch.Tensor]) -> None:
        for name in of:
            of[name] = of[name] * 2
        tensors.update(of)

    other = changed(one.adapter, tmp_path / "other", double)
    as_peft(one.base, other, tmp_path / "peft")
    with start(one.base, max_cpu_loras=8) as llm, start(tmp_path / "peft") as wanted:
        llm.load_adapter("a", one.adapter)
        base = answers(llm)
        llm.update_adapter("a", tensors)
        adapted = answers(llm, "a")
        llm.merge_adapter("a")
        assert llm.digest().tensors == wanted.digest().tensors
        assert answers(llm) == answers(wanted) == adapted != base


def test_two_adapters(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """The second adds to the sums of the first, as PEFT's merges one after the other do."""
    one = tuned("qwen3")
    other = changed(
        one.adapter, tmp_path / "other", lambda of: of.update({n: -t for n, t in of.items()})
    )
    as_peft(one.base, one.adapter, tmp_path / "one")
    as_peft(tmp_path / "one", other, tmp_path / "two")
    with start(one.base) as llm, start(tmp_path / "two") as wanted:
        for name, path in (("a", one.adapter), ("b", other)):
            llm.load_adapter(name, path)
        llm.merge_adapter("a")
        assert tokens(llm, "b") == tokens(wanted)
        llm.merge_adapter("b")
        assert llm.digest().tensors == wanted.digest().tensors
        assert llm.weight_version == "2"


def test_refused(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """A sum beyond the dtype, an adapter in use and an unknown one change nothing."""
    one = tuned("qwen3")
    infinite = changed(
        one.adapter,
        tmp_path / "infinite",
        lambda of: of[next(n for n in of if "o_proj.lora_A" in n)].fill_(3e38),
    )
    with start(one.base) as llm:
        llm.load_adapter("a", one.adapter)
        llm.load_adapter("b", infinite)
        digest, adapted = llm.digest(), tokens(llm, "a")
        with pytest.raises(WeightLoadError, match=r"o_proj\.weight has a NaN or an infinite"):
            llm.merge_adapter("b")
        with pytest.raises(ValueError, match="'c'"):
            llm.merge_adapter("c")
        prompt = {"prompt_token_ids": [5, 9, 2, 41], "adapter": "a"}
        stream = llm.stream(prompt, FIVE)
        next(stream)
        with pytest.raises(RuntimeError, match="1 requests use the adapter 'a'"):
            llm.merge_adapter("a")
        *_, last = stream
        assert list(last.outputs[0].token_ids) == adapted[:5]
        llm.sleep()
        with pytest.raises(RuntimeError, match="sleeps"):
            llm.merge_adapter("a")
        llm.wake_up()
        assert llm.digest().tensors == digest.tensors
        assert tokens(llm, "a") == adapted
        assert [each.name for each in llm.list_adapters()] == ["a", "b"]


def test_after_a_failed_update(tuned: Callable[[str], Any]) -> None:
    """The error says what has failed, not which tensors a merge does not change."""
    one = tuned("qwen3")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(load_file(one.base / "model.safetensors").items())[:4]
        raise OSError("the disk is gone")

    with start(one.base) as llm:
        llm.load_adapter("a", one.adapter)
        with pytest.raises(OSError, match="the disk is gone"):
            llm.update_weights(broken())
        with pytest.raises(ModelNotReadyError, match="a load broke midway"):
            llm.merge_adapter("a")
        llm.reload_weights()
        llm.merge_adapter("a")


def test_served_weights(tuned: Callable[[str], Any]) -> None:
    """A server does not send what it has kept of a tensor from before."""
    one = tuned("gpt_oss")
    with start(one.base) as llm, llm.serve_weights() as server:
        tensor = next(
            each
            for each in server._files["model.safetensors"]._tensors
            if "experts.gate_up" in each.name
        )
        assert not tensor.holds_rows  # such a tensor is kept
        llm.load_adapter("a", one.adapter)

        def sent() -> bytes:
            end = tensor.begin + tensor.nbytes
            pieces = server.pieces("model.safetensors", tensor.begin, end, server.tag())
            return b"".join(pieces)

        before = sent()
        llm.merge_adapter("a")
        after = sent()
        held = server._files["model.safetensors"].take(tensor.name)
    assert after == held.numpy().tobytes() != before


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_what_cannot_be_merged(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """A quantized base, and an embedding that the head shares."""
    one = tuned("qwen3")
    with start(one.base, quantization="int8_per_channel_weight_only") as llm:
        llm.load_adapter("a", one.adapter)
        with pytest.raises(UnsupportedModelError, match=r"quantized.*convert --adapter"):
            llm.merge_adapter("a")
        tokens(llm, "a")
    adapt(tied_llama(tmp_path / "base"), tmp_path / "tied", target_modules=["embed_tokens"])
    with start(tmp_path / "base") as llm:
        llm.load_adapter("a", tmp_path / "tied")
        with pytest.raises(UnsupportedModelError, match="shares its weight"):
            llm.merge_adapter("a")
        tokens(llm, "a")


def test_an_adapter_that_left_the_memory_is_read_again(tuned: Callable[[str], Any]) -> None:
    """With room for one, the first is merged after the second was loaded."""
    one, digests = tuned("qwen3"), []
    for others in ([], ["b"]):
        with start(one.base, max_loras=1, max_cpu_loras=1) as llm:
            before = llm.digest()
            for name in ("a", *others):
                llm.load_adapter(name, one.adapter)
            assert llm.list_adapters()[0].in_memory is not bool(others)
            llm.merge_adapter("a")
            digests.append(llm.digest().tensors)
    assert digests[0] == digests[1] != before.tensors
