"""Adapters of equal names and shapes are loaded by one plan, and share nothing else."""

from __future__ import annotations

import gc
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from vllm_module.adapters import Adapter, AdapterPlans, open_adapter
from vllm_module.errors import WeightLoadError
from vllm_module.testing.sources import FailingHandle

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
load_base = SUPPORT["load_base"]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["llama", "mixtral", "gpt_oss", "deepseek_v3"])
def one(tuned: Callable[[str], Any], request: pytest.FixtureRequest) -> Any:
    return tuned(request.param)


def read(folder: Path) -> tuple[Any, Tensors]:
    with open_adapter(folder) as (config, weights):
        return config, {
            n: w if isinstance(w, torch.Tensor) else w.read() for n, w in weights.items()
        }


def held(adapter: Adapter) -> Tensors:
    return {name: each.detach().clone() for name, each in adapter.named_parameters()}


def loaded_alone(base: Any, config: Any, weights: Tensors) -> Tensors:
    adapter = Adapter(base, config)
    adapter.load(weights)
    return held(adapter)


def assert_same(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def scaled(weights: Tensors, factor: float) -> Tensors:
    """Return other A and B; copies of the base's tensors stay."""
    return {n: t if ".base_layer." in n else t * factor for n, t in weights.items()}


def test_alike(one: Any) -> None:
    """The second is routed by the plan of the first; each has its own values, also updated."""
    base = load_base(one.base)
    config, weights = read(one.adapter)
    plans = AdapterPlans(base)
    with patch.object(Adapter, "__init__", autospec=True, side_effect=Adapter.__init__) as made:
        first = plans.load(config, weights)
        second = plans.load(config, scaled(weights, -2))
    assert made.call_count == 1
    wanted = [loaded_alone(base, config, scaled(weights, factor)) for factor in (1, -2, 3)]
    assert_same(held(first), wanted[0])
    assert_same(held(second), wanted[1])
    second.update(scaled(weights, 3))
    assert_same(held(first), wanted[0])
    assert_same(held(second), wanted[2])
    first.update(scaled(weights, -2))
    assert_same(held(plans.load(config, weights)), wanted[0])
    addresses = [each.data_ptr() for adapter in (first, second) for each in adapter.parameters()]
    assert len({*addresses}) == len(addresses)


def test_refused_loads_change_no_later_one(one: Any) -> None:
    """NaN, and a tensor whose bytes cannot be read, are refused; the next adapter is right."""

    class Broken:
        def __init__(self, like: torch.Tensor) -> None:
            self.shape, self.dtype = like.shape, like.dtype

        def narrow(self, *_: Any) -> Any:
            return self

        def read_into(self, _: torch.Tensor) -> None:
            raise OSError("the file is shorter")

        def read(self) -> torch.Tensor:
            raise OSError("the file is shorter")

    base = load_base(one.base)
    config, weights = read(one.adapter)
    plans, wanted = AdapterPlans(base), loaded_alone(base, config, weights)
    name = next(each for each in weights if each.endswith(("q_proj.lora_A", "q_b_proj.lora_A")))
    wrong: list[tuple[Any, type[Exception]]] = [
        (torch.full_like(weights[name], torch.nan), WeightLoadError),
        (weights[name][:, 1:], WeightLoadError),
        (Broken(weights[name]), OSError),
        # Integers in a file, whose dtype only a plan of their own looks at.
        (FailingHandle(weights[name].int(), lambda: None), WeightLoadError),
    ]
    for each, error in wrong:
        with pytest.raises(error):
            plans.load(config, {**weights, name: each})
        assert_same(held(plans.load(config, weights)), wanted)
    fewer = {n: t for n, t in weights.items() if n != name}
    with pytest.raises(WeightLoadError, match="lora_A"):
        plans.load(config, fewer)


def test_other_settings_have_other_plans(tuned: Callable[[str], Any]) -> None:
    """Settings that change only the scale are not those of an adapter before."""
    one = tuned("qwen3")
    base = load_base(one.base)
    config, weights = read(one.adapter)
    plans = AdapterPlans(base)
    other = config.model_copy(update={"lora_alpha": 3 * config.lora_alpha})
    scales = []
    for each in (config, other, config):
        parts = [layer.low_rank().parts for layer in plans.load(each, weights).layers()]
        scales.append([part.scale for of_layer in parts for part in of_layer])
    assert scales[0] == scales[2]
    assert scales[1] == pytest.approx([3 * scale for scale in scales[0]])


def test_nothing_is_kept(tuned: Callable[[str], Any]) -> None:
    """A plan keeps neither tensors of a file nor the memory of an adapter; few plans are kept."""
    one = tuned("qwen3")
    base = load_base(one.base)
    config, weights = read(one.adapter)
    plans = AdapterPlans(base)
    adapter = plans.load(config, weights)
    gone = [weakref.ref(each) for each in (*weights.values(), *adapter.parameters())]
    del adapter, weights
    gc.collect()
    assert [each() for each in gone if each() is not None] == []
    _, weights = read(one.adapter)
    for alpha in range(1, 40):
        plans.load(config.model_copy(update={"lora_alpha": alpha}), weights)
    assert len(plans._kept) == 8
    with patch.object(Adapter, "__init__", autospec=True, side_effect=Adapter.__init__) as made:
        for alpha, count in ((39, 0), (32, 0), (31, 1), (32, 1), (35, 1), (33, 2)):
            plans.load(config.model_copy(update={"lora_alpha": alpha}), weights)
            assert made.call_count == count  # those used longest ago went first
