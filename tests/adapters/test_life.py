"""Updates, failures and sleep of adapters while an engine serves others."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.errors import RankError, WeightLoadError

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
adapt, small_model = SUPPORT["adapt"], SUPPORT["small_model"]
imported = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["imported"]
# Of what transformers has renamed since.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
COUNT = 10
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
LONG = [(7 * i + 3) % 60 for i in range(20)]
TARGETS = {"head": ["lm_head"], "a": ["k_proj", "v_proj", "down_proj"], "b": ["q_proj"]}
# What every rank can import: a method of its worker raises, once.
PLANTED = """
import torch


def break_method(worker, rank, name, afterwards=False):
    right = getattr(worker, name)

    def broken(*arguments):
        setattr(worker, name, right)
        if afterwards:
            right(*arguments)
        raise torch.OutOfMemoryError("planted")

    if worker.rank == rank:
        setattr(worker, name, broken)
"""
Next = Callable[[str | None, list[int]], int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, and of each of three adapters two versions of the same shapes."""
    path = tmp_path_factory.mktemp("life")
    small_model("llama", path / "base")
    for number, (name, targets) in enumerate(TARGETS.items()):
        for seed, version in ((number, name), (10 + number, f"{name}-new")):
            model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
            adapt(model, path / version, seed, target_modules=targets, lora_alpha=16)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Callable[[str | None], Any]:
    """Return PEFT's model with an adapter, or transformers' without one."""

    @cache
    def model(name: str | None) -> Any:
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        return base if name is None else peft.PeftModel.from_pretrained(base, folder / name).eval()

    return model


@pytest.fixture(scope="module")
def following(theirs: Callable[[str | None], Any]) -> Next:
    """Return what gives the most probable token after some tokens."""

    @torch.no_grad()
    def token(name: str | None, ids: list[int]) -> int:
        return int(theirs(name)(torch.tensor([ids])).logits[0, -1].argmax())

    return token


@pytest.fixture(scope="module")
def break_method(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("planted") / "planted_in_adapters.py"
    with imported(path, PLANTED) as module:
        yield module.break_method


def greedy(following: Next, name: str | None, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(COUNT):
        ids.append(following(name, ids))
    return ids[len(prompt) :]


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder / "base"),
        **{"kv_cache_memory_bytes": 1 << 20, "dtype": "float32", "block_size": 4} | settings,
    )


def asked(prompt: list[int], name: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "adapter": name}


def new_weights(theirs: Callable[[str | None], Any], name: str) -> dict[str, torch.Tensor]:
    new = theirs(f"{name}-new")
    return dict(get_peft_model_state_dict(new, save_embedding_layers=False))


@pytest.mark.parametrize(
    "settings",
    [{}, {"async_scheduling": True}, {"pipeline_parallel_size": 2}],
    ids=["plain", "asynchronous", "stages"],
)
def test_updates_of_a_running_request(
    folder: Path, theirs: Any, following: Next, settings: dict[str, Any]
) -> None:
    """Each token is that of the version that its output names, also of a step under way.

    The adapter is of the head, so no keys and values depend on it.
    """
    with load(folder, **settings) as llm:
        for name in ("head", "b"):
            llm.load_adapter(name, folder / name)
        prompts = [asked(LONG[:3], "head"), asked(LONG[2:7], "b"), asked(LONG[:5], "head")]
        outputs, updated = {}, False
        for index, output in llm.serve(prompts, PARAMS, every_token=True):
            outputs[index] = output.outputs[0]
            if not updated and len(output.outputs[0].token_ids) == 4:
                llm.update_adapter("head", new_weights(theirs, "head"))
                updated = True
        for index, prompt in enumerate(prompts):
            ids, name = list(prompt["prompt_token_ids"]), prompt["adapter"]
            versions = outputs[index].weight_versions
            for version, count in versions:
                wanted = f"{name}-new" if version == "0/head@1" else name
                for _ in range(count):
                    ids.append(following(wanted, ids))
            assert list(outputs[index].token_ids) == ids[-COUNT:], versions
            known = [f"0/{name}@{each}" for each in ([0] if name == "b" else [0, 1])]
            assert [version for version, _ in versions] == known


def test_an_update_while_a_request_waits(folder: Path, theirs: Any, following: Next) -> None:
    """A request that is begun after an update finds no pages from before it."""
    with load(folder, max_num_seqs=1) as llm:
        llm.load_adapter("a", folder / "a")
        (first,) = llm.generate([asked(LONG, "a")], PARAMS, use_tqdm=False)
        assert list(first.outputs[0].token_ids) == greedy(following, "a", LONG)
        prompts = [asked(LONG[:3], None), asked(LONG, "a")]
        stream = llm.serve(prompts, PARAMS, every_token=True)
        next(stream)
        llm.update_adapter("a", new_weights(theirs, "a"))
        outputs = dict(stream)
        assert list(outputs[1].outputs[0].token_ids) == greedy(following, "a-new", LONG)
        assert outputs[1].outputs[0].weight_versions == [("0/a@1", COUNT)]
        assert outputs[1].num_cached_tokens == 0
        (again,) = llm.generate([asked(LONG, "a")], PARAMS, use_tqdm=False)
        assert again.num_cached_tokens == 16
        assert again.outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_pages_across_an_update(folder: Path, theirs: Any, following: Next) -> None:
    """A page that holds keys of two versions is not found by requests after the update."""
    short = LONG[:6]  # its second page is filled after the update
    with load(folder, max_num_seqs=2, enable_prefix_caching=True, block_size=8) as llm:
        llm.load_adapter("a", folder / "a")
        stream = llm.serve([asked(short, "a")], PARAMS, every_token=True)
        next(stream)
        llm.update_adapter("a", new_weights(theirs, "a"))
        *_, (_, output) = stream
        longer = short + list(output.outputs[0].token_ids)
        (after,) = llm.generate([asked(longer, "a")], PARAMS, use_tqdm=False)
        assert after.num_cached_tokens == 0
        assert list(after.outputs[0].token_ids) == greedy(following, "a-new", longer)


@pytest.mark.parametrize(
    ("settings", "rank"),
    [({}, 0), ({"tensor_parallel_size": 2}, 1),
     ({"pipeline_parallel_size": 2}, 1)],
    ids=["alone", "second", "stage"],
)  # fmt: skip
def test_one_that_cannot_be_read(
    folder: Path, following: Next, break_method: Any, settings: dict[str, Any], rank: int
) -> None:
    """If memory is short on any rank, the requests of that adapter end, and no others."""
    names = [None, "head", "b", "head", "b"]
    with load(folder, max_loras=2, max_cpu_loras=2, **settings) as llm:
        for name in TARGETS:
            llm.load_adapter(name, folder / name)
        assert [each.in_memory for each in llm.list_adapters()] == [False, True, True]
        llm.collective_rpc(break_method, args=(rank, "load_adapter"))
        for fails in (True, False):  # the second time it is read
            prompts = [asked(LONG[:5], name) for name in names]
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            broken = [output.error for output in outputs if output.error is not None]
            # Two stages have a step for each of the two requests, and the second one reads it.
            assert len(broken) in (
                ({1, 2} if "pipeline_parallel_size" in settings else {2}) if fails else {0}
            )
            assert all("OutOfMemoryError: planted" in error for error in broken)
            for name, output in zip(names, outputs, strict=True):
                if name != "head" or output.error is None:
                    tokens = list(output.outputs[0].token_ids)
                    wanted = greedy(following, name, LONG[:5])
                    assert (output.error, tokens) == (None, wanted)
        assert not llm.engine.requests


def test_prompts_in_parts_beside_others(folder: Path, following: Next) -> None:
    """An adapter of the head is not used before its prompt is complete, which is no fault."""
    with load(folder, max_num_batched_tokens=8) as llm:
        llm.load_adapter("head", folder / "head")
        prompts = [asked(LONG[:3], None), asked(LONG, "head")]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            wanted = greedy(following, prompt["adapter"], prompt["prompt_token_ids"])
            assert (output.error, list(output.outputs[0].token_ids)) == (None, wanted)


def test_an_update_that_the_dtype_does_not_have(folder: Path, theirs: Any) -> None:
    """A number that is infinite in 16 bits is refused, as it is when an adapter is loaded."""
    large = new_weights(theirs, "a")
    name = next(iter(large))
    large[name] = large[name] * 0 + 70_000
    with load(folder, dtype="float16") as llm:
        llm.load_adapter("a", folder / "a")
        (before,) = llm.generate([asked(LONG, "a")], PARAMS, use_tqdm=False)
        with pytest.raises(WeightLoadError, match=r"lora_A, as torch\.float16, .* infinite"):
            llm.update_adapter("a", large)
        (after,) = llm.generate([asked(LONG, "a")], PARAMS, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert after.outputs[0].weight_versions == [("0/a@0", COUNT)]


@pytest.mark.parametrize(
    ("settings", "rank"),
    [
        ({}, 0),
        ({"async_scheduling": True}, 0),
        ({"tensor_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 2, "async_scheduling": True}, 1),
    ],
    ids=["alone", "asynchronous", "two ranks", "two ranks, asynchronous"],
)
def test_an_update_that_fails_midway(
    folder: Path, theirs: Any, following: Next, break_method: Any, settings: Any, rank: int
) -> None:
    """No token is computed with a mixture of old and new A and B, of layers or of ranks."""

    def answers() -> list[tuple[str | None, list[int]]]:
        prompts = [asked(LONG[:5], name) for name in (None, "a", "b")]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        return [(output.error, list(output.outputs[0].token_ids)) for output in outputs]

    def wanted(a: str) -> list[tuple[str | None, list[int]]]:
        return [(None, greedy(following, name, LONG[:5])) for name in (None, a, "b")]

    new = new_weights(theirs, "a")
    with load(folder, **settings) as llm:
        for name in ("a", "b"):
            llm.load_adapter(name, folder / name)
        stream = llm.serve([asked(LONG[:7], "a")], PARAMS, every_token=True)
        next(stream)
        llm.collective_rpc(break_method, args=(rank, "update_adapter", True))
        with pytest.raises((torch.OutOfMemoryError, RankError), match="planted"):
            llm.update_adapter("a", new)
        *_, (_, output) = stream  # goes on with what is in the folder
        assert list(output.outputs[0].token_ids) == greedy(following, "a", LONG[:7])
        assert output.outputs[0].weight_versions == [("0/a@0", COUNT)]
        assert answers() == wanted("a")
        llm.update_adapter("a", new)
        assert answers() == wanted("a-new")
        llm.collective_rpc(break_method, args=(rank, "update_adapter", True))
        with pytest.raises((torch.OutOfMemoryError, RankError), match="planted"):
            llm.update_adapter("a", new_weights(theirs, "a"))
        base, broken, other = answers()
        assert [base, other] == [wanted("a")[0], wanted("a")[2]]
        assert "an update of the adapter 'a' had failed midway" in (broken[0] or "")
        assert broken[1] == []
        llm.unload_adapter("a")
        llm.load_adapter("a", folder / "a")
        assert answers() == wanted("a")


@pytest.mark.parametrize("early", [False, True])
def test_requests_of_more_adapters_wait_fairly(folder: Path, following: Next, early: bool) -> None:
    """None is begun before one that came earlier, though its adapter runs or it has none."""
    names = ["a", "b", "a", None, "b"]
    with load(folder, max_loras=1, max_num_seqs=4, async_scheduling=early) as llm:
        for name in ("a", "b"):
            llm.load_adapter(name, folder / name)
        first: list[int] = []
        ended: dict[int, list[int]] = {}  # the requests that had begun when this one ended
        prompts = [asked(LONG[: 3 + at], name) for at, name in enumerate(names)]
        for index, output in llm.serve(prompts, PARAMS, every_token=True):
            first += [index] * (index not in first)
            if output.finished:
                ended[index] = list(first)
                tokens = list(output.outputs[0].token_ids)
                assert tokens == greedy(following, names[index], LONG[: 3 + index])
        assert first == [0, 1, 2, 3, 4]
        assert ended[0] == [0]
        assert ended[1] == [0, 1]
        assert ended[2] == ended[3][:4] == [0, 1, 2, 3]
