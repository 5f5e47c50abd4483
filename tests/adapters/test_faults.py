"""Faults planted in the way of an adapter from its file to a token: each is found."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.errors import RankError, WeightLoadError

HERE = Path(__file__).parent
SUPPORT = runpy.run_path(str(HERE / "support.py"))
adapt, small_model = SUPPORT["adapt"], SUPPORT["small_model"]
instead = runpy.run_path(str(HERE.parent / "laws" / "faults.py"))["instead"]
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
SHORT = [[1 + i, 7, 9 + i, 3, 5 + 2 * i][: 2 + i % 4] for i in range(6)]
LONG = [(7 * i + 3) % 60 for i in range(36)]  # two pages that are cached, and a bit
FILE = "adapter_model.safetensors"
# Of what transformers has renamed since.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
SETTINGS: dict[str, dict[str, Any]] = {
    "a": {"r": 2, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
    "b": {"r": 5, "target_modules": ["q_proj", "k_proj", "o_proj", "lm_head"]},
    "c": {"r": 5, "target_modules": ["v_proj", "gate_proj"], "rank_pattern": {"v_proj": 3}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model and three adapters, of which ``b2`` is the second with twice its A."""
    path = tmp_path_factory.mktemp("faults")
    small_model("llama", path / "base")
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
        adapt(model, path / name, seed, lora_alpha=16, **settings)
    (path / "b2").mkdir()
    doubled = {n: t * (2 if "lora_A" in n else 1) for n, t in load_file(path / "b" / FILE).items()}
    save_file(doubled, path / "b2" / FILE)
    settings = (path / "b/adapter_config.json").read_text()
    (path / "b2/adapter_config.json").write_text(settings)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str | None, list[int]], list[int]]:
    """Return what transformers and PEFT generate with an adapter, or without one."""

    @cache
    def model(name: str | None) -> Any:
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        return base if name is None else peft.PeftModel.from_pretrained(base, folder / name).eval()

    @cache
    def of(name: str | None, prompt: tuple[int, ...]) -> list[int]:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(5):
                ids.append(int(model(name)(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return lambda name, prompt: of(name, tuple(prompt))


def check(folder: Path, expected: Callable[[str | None, list[int]], list[int]]) -> None:
    """Serve in one batch, from cached pages, after an update and after an eviction."""

    def ask(prompts: list[list[int]], names: list[str | None], wanted: list[str | None]) -> None:
        outputs = llm.generate(prompts, FIVE, use_tqdm=False, lora_request=names)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert tokens == [expected(*each) for each in zip(wanted, prompts, strict=True)]
        in_memory = {each.number for each in llm.list_adapters() if each.in_memory}
        for module in llm.executor.worker.model.modules():
            if (layer := getattr(module, "adapters", None)) is not None:
                stacked = () if layer._together is None else layer._together.key[1:]
                assert {*layer.weights, *stacked} <= in_memory

    settings = {"max_loras": 2, "max_cpu_loras": 2, "kv_cache_memory_bytes": 1 << 20}
    with LLM(str(folder / "base"), dtype="float32", **settings) as llm:
        for name in SETTINGS:
            llm.load_adapter(name, folder / name)
        for names in (["c", None, "a", "c", None, "a"], ["b", "a", None, "a", "b", "b"]):
            ask(SHORT, names, names)
        for name in (None, "a", "b", None, "c", "a"):  # these two evict b
            ask([LONG], [name], [name])
        llm.update_adapter("b", load_file(folder / "b2" / FILE))
        ask([LONG, SHORT[0], LONG], ["b", "a", "a"], ["b2", "a", "a"])
        ask([LONG, SHORT[3], SHORT[1]], ["c", "b", None], ["c", "b2", None])
        llm.unload_adapter("c")
        llm.load_adapter("d", folder / "a")
        ask([LONG, SHORT[1]], ["d", "b"], ["a", "b2"])
        llm.update_adapter("b", load_file(folder / "b" / FILE))
        ask([SHORT[1], LONG], ["b", "d"], ["b", "a"])


def test_right(folder: Path, expected: Callable[..., list[int]]) -> None:
    """Without a fault, all tokens are PEFT's."""
    check(folder, expected)


def swapped(right: Callable[..., Any], layer: Any) -> Any:
    found = right(layer)
    a, b = found.a, found.b
    square = a.shape[1] == b.shape[0] and a.shape[0] == b.shape[1]
    return found._replace(a=b.t().contiguous(), b=a.t().contiguous()) if square else found


def other_slot(right: Callable[..., Any], layer: Any) -> Any:
    """Give each slot the A of the next."""
    found = right(layer)
    ranks = [part.rank for part in found.parts]
    parts = [
        part._replace(rank=rank)
        for part, rank in zip(found.parts, [*ranks[1:], *ranks[:1]], strict=True)
    ]
    same = len({rank.stop - rank.start for rank in ranks}) == 1
    return found._replace(parts=tuple(parts)) if same else found


def filled_padding(right: Callable[..., Any], cls: Any, adapters: Any, key: Any) -> Any:
    """Let ranks that an adapter lacks be numbers."""
    found = right(cls, adapters, key)
    scale, a = found.scale.clone(), found.a.clone()
    a[(scale == 0).transpose(1, 2).expand_as(a)] = 0.3
    parts = [(ranks, output, torch.where(b == 0, 0.3, b)) for ranks, output, b in found.parts]
    return found._replace(a=a, scale=scale.where(scale != 0, 1.0), parts=tuple(parts))


def next_rows(right: Callable[..., Any], rows: Any, adapters: Any, starts: Any, device: Any) -> Any:
    moved = {index + 1: each for index, each in adapters.items() if index + 2 < len(starts)}
    return right(rows, moved, starts, device)


def base_as_well(right: Callable[..., Any], cls: Any, rows_of: Any, count: int, device: Any) -> Any:
    """Add the first place of an adapter to rows of the base."""
    found = right(cls, rows_of, count, device)
    return found._replace(inverse=found.inverse.where(found.inverse < len(found.rows), 0))


def first_attached(right: Callable[..., Any], layer: Any, number: int, weights: Any) -> None:
    """Go on with the A and B that an adapter had before it was evicted and read again."""
    first = vars(layer).setdefault("first", {})
    right(layer, number, first.setdefault(number, weights))


class EqualsAny(tuple[int, ...]):
    __hash__ = tuple.__hash__

    def __ne__(self, other: object) -> bool:
        return False


def keep_stack(right: Callable[..., Any], layer: Any, number: int) -> None:
    stacked = layer._together
    right(layer, number)
    layer._together = stacked


def number_again(right: Callable[..., Any], llm: Any, *given: Any) -> Any:
    """Use the number of an adapter that was unloaded."""
    used = {each.number for each in llm.list_adapters()}
    llm._adapter_numbers = iter(sorted({*range(9)} - used))
    return right(llm, *given)


FAULTS = {
    "A and B swapped": ("adapters.adapter:LoRALayer.low_rank", swapped),
    "the scale twice": (
        "adapters.config:AdapterConfig.scale",
        lambda right, *arguments, **named: right(*arguments, **named) ** 2,
    ),
    "no scale": ("adapters.config:AdapterConfig.scale", lambda right, *_, **__: 1.0),
    "another slot's A": ("adapters.adapter:LoRALayer.low_rank", other_slot),
    "a slot shifted": (
        "adapters.adapter:LoRALayer.low_rank",
        lambda right, layer: (found := right(layer))._replace(b=found.b.roll(1, 0)),
    ),
    "padding of ranks that is not zero": ("layers.lora:StackedLowRank.of", filled_padding),
    "the A and B before an update": (
        "runtime.ranks.worker_weights:WorkerWeights.update_adapter",
        lambda right, worker, *given: (
            right(worker, *given),
            setattr(worker._adapter_rows, "updates", 0),
        ),
    ),
    "A and B from before an eviction": ("layers.lora:LayerAdapters.attach", first_attached),
    "A and B of other adapters, stacked before": (
        "layers.lora:StackedLowRank.of",
        lambda right, cls, *given: (found := right(cls, *given))._replace(key=EqualsAny(found.key)),
    ),
    "A and B that stay after an eviction": (
        "layers.lora:LayerAdapters.forget",
        lambda right, layer, number: None,
    ),
    "a stack that stays after an eviction": ("layers.lora:LayerAdapters.forget", keep_stack),
    "the number of an unloaded adapter": (
        "runtime.adapter_methods:AdapterMethods.load_adapter",
        number_again,
    ),
    "the adapter of the next sequence": ("layers.lora_rows:AdapterRows.set", next_rows),
    "rows of the base with an adapter": ("layers.lora_rows:Places.of", base_as_well),
    "rows of the head as those of the step": (
        "layers.lora_rows:AdapterRows.select",
        lambda right, rows, chosen: right(rows, [*range(len(chosen))]),
    ),
    "pages shared by adapters": (
        "runtime.served_adapter:ServedAdapter.salt",
        lambda right, adapter, of_prompt: of_prompt,
    ),
    "pages of an adapter before its update": (
        "runtime.served_adapter:ServedAdapter.salt",
        lambda right, adapter, of_prompt: adapter.number,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_caught(folder: Path, expected: Callable[..., list[int]], name: str) -> None:
    """With the fault, tokens are not PEFT's, or memory is kept."""
    check_it = instead(*FAULTS[name])
    with check_it(), pytest.raises(AssertionError):
        check(folder, expected)


def test_an_update_that_one_stage_refuses(folder: Path) -> None:
    """No pipeline stage takes what another one refuses."""
    old = load_file(folder / "a" / FILE)
    new = {name: -3 * tensor for name, tensor in old.items()}
    wrong = next(name for name in new if "layers.0." in name and "o_proj.lora_A" in name)
    new[wrong] = new[wrong][:, 1:].contiguous()
    settings = {"kv_cache_memory_bytes": 1 << 20, "dtype": "float32"}
    with LLM(str(folder / "base"), pipeline_parallel_size=2, **settings) as llm:
        llm.load_adapter("a", folder / "a")

        def tokens() -> list[list[int]]:
            outputs = llm.generate(SHORT, FIVE, use_tqdm=False, lora_request="a")
            return [list(output.outputs[0].token_ids) for output in outputs]

        before = tokens()
        with pytest.raises((WeightLoadError, RankError), match=r"layers\.0\.self_attn\.o_proj"):
            llm.update_adapter("a", new)
        assert tokens() == before
        llm.update_adapter("a", {name: -3 * tensor for name, tensor in old.items()})
        assert tokens() != before
