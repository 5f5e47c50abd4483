"""An engine takes some elements of tensors, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import LLM, SamplingParams
from vllm_module.errors import WeightLoadError
from vllm_module.weights.changes import Changes, find_changes
from vllm_module.weights.digests import digest_weight

TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
NAMES = (
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with load(folder, tensor_parallel_size=request.param) as llm:
        yield llm


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), kv_cache_memory_bytes=1 << 20, dtype="float32", **settings)


def tokens(llm: LLM) -> list[int]:
    (output,) = llm.generate([{"prompt_token_ids": [5, 9, 3]}], TEN, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_engine_and_digest(folder: Path, llm: LLM, tmp_path: Path) -> None:
    """Tokens and digest are those of a fresh load of the changed checkpoint."""
    llm.reload_weights()
    old = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name in NAMES:
        flat = new[name].view(-1)
        at = torch.randperm(flat.numel(), generator=generator)[: max(1, flat.numel() // 50)]
        flat[at] += 1.5
    before, digest = tokens(llm), llm.digest()
    sent = {name: find_changes(old[name], new[name]) for name in NAMES}
    assert sum(each.nbytes for each in sent.values()) < sum(old[n].nbytes for n in NAMES) / 8
    llm.update_weights(sent, weight_version="step-1")
    assert llm.weight_version == "step-1"
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(new, tmp_path / "model.safetensors", {"format": "pt"})
    with load(tmp_path) as fresh:
        assert tokens(llm) == tokens(fresh) != before
        assert llm.digest().tensors == fresh.digest().tensors != digest.tensors
    llm.update_weights({name: find_changes(new[name], old[name]) for name in NAMES})
    assert (tokens(llm), llm.digest().tensors) == (before, digest.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_digest_follows_the_changes(dtype: torch.dtype) -> None:
    """From the old digest and the elements alone comes that of the whole new tensor."""
    old = torch.arange(105).view(3, 5, 7).to(dtype)
    new = old.clone()
    new[1, 2, 3], new[2, 4, 6], new[0, 0, 0] = 7, 0, 1
    changes = find_changes(old, new)
    assert len(changes.indices) == 3
    assert changes.digest_after(digest_weight(old), old) == digest_weight(new) != digest_weight(old)


def at(*indices: int, **others: Any) -> Callable[[], Changes]:
    values = others.get("values", torch.ones(len(indices)))
    where = others.get("where", torch.tensor(indices))
    return lambda: Changes(where, values, others.get("shape", (16,)))


WRONG: dict[str, tuple[Callable[[], Changes], str]] = {
    "out of range": (at(3, 16), "indices from 0 to 15, got 16"),
    "negative": (at(-1, 3), "indices from 0 to 15, got -1"),
    "twice": (at(3, 3), "each once, got 3 twice"),
    "in another order": (at(5, 3), "got 5 before 3"),
    "another shape": (at(3, shape=(15,)), r"expected shape \[16\], got \[15\]"),
    "another dtype": (at(3, values=torch.ones(1).half()), "expected elements of the dtype"),
    "NaN": (at(3, values=torch.tensor([float("nan")])), "NaN"),
    "more values": (at(3, values=torch.ones(2)), "as many values"),
    "indices of 32 bits": (at(3, where=torch.tensor([3]).int()), "indices of int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(llm: LLM, case: str) -> None:
    """Nothing is written, and the engine goes on."""
    make, named = WRONG[case]
    before, digest = tokens(llm), llm.digest().tensors
    with pytest.raises(WeightLoadError, match=rf"(?s)model\.norm\.weight.*{named}"):
        llm.update_weights({"model.norm.weight": make()})
    assert (tokens(llm), llm.digest().tensors) == (before, digest)


def test_a_load_needs_whole_tensors(llm: LLM) -> None:
    model: Any = llm.executor.worker.model
    whole = {name: torch.zeros(each.shape) for name, each in model.expected_weights().items()}
    with pytest.raises(WeightLoadError, match=r"norm\.weight: some elements .* send the tensor"):
        model.load_weights({**whole, "model.norm.weight": at(3)()})
    assert tokens(llm)


def test_a_quantized_tensor_is_sent_whole(folder: Path) -> None:
    with load(folder, quantization="fp8_per_tensor") as llm:
        before = tokens(llm)
        with pytest.raises(WeightLoadError, match="needs all of it: send the tensor whole"):
            llm.update_weights({NAMES[1]: at(3, shape=(16, 16))()})
        assert tokens(llm) == before


def test_an_iterator(folder: Path, llm: LLM) -> None:
    """Elements and whole tensors come one after another; what is wrong is named."""
    llm.reload_weights()
    old = load_file(folder / "model.safetensors")
    new = {name: tensor.clone() for name, tensor in old.items()}
    digests = {name: digest_weight(tensor) for name, tensor in old.items()}
    for name in NAMES:
        new[name].view(-1)[::9] -= 2.5
    sent = [(name, find_changes(old[name], new[name])) for name in NAMES[:-1]]
    for name, changes in sent:  # as a trainer follows what the engine has
        digests[name] = changes.digest_after(digests[name], old[name])
    digests[NAMES[-1]] = digest_weight(new[NAMES[-1]])
    llm.update_weights(iter([*sent, (NAMES[-1], new[NAMES[-1]])]))
    assert llm.digest().tensors == {name: digest.hex for name, digest in digests.items()}
    with load(folder) as alone:
        alone.update_weights(new)
        assert tokens(llm) == tokens(alone)
    for make, named in (WRONG["twice"], WRONG["another shape"], WRONG["NaN"]):
        with pytest.raises(ValueError, match=rf"(?s)model\.norm\.weight.*{named}"):
            llm.update_weights(iter([("model.norm.weight", make())]))
    assert llm.digest().tensors == {name: digest.hex for name, digest in digests.items()}


def test_a_sleep_knows_nothing_of_what_was_before(folder: Path, llm: LLM) -> None:
    """After a reload there are no updates; an update wakes up all of what slept later."""
    llm.reload_weights()
    before, whole = tokens(llm), load_file(folder / "model.safetensors")
    llm.update_weights(whole)
    llm.sleep(level=2)
    llm.wake_up(["weights"])  # they wait for an update
    llm.reload_weights()
    llm.sleep(level=2)
    llm.wake_up()  # the weights are those of the checkpoint again
    assert tokens(llm) == before
    llm.update_weights(whole)
    llm.sleep(level=2)
    llm.update_weights(whole)
    assert tokens(llm) == before
