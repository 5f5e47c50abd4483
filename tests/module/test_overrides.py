"""An overridden load_weights may rename, transform and call children; all it loads is counted."""

from __future__ import annotations

import copy
import pickle
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_module import WeightLoadError, vLLMModule
from vllm_module.core.given import Renamed
from vllm_module.errors import MissingWeightError, ModelNotReadyError
from vllm_module.layers import RMSNorm
from vllm_module.testing.checkpoints import assert_same_state, state

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))
pytestmark = pytest.mark.usefixtures("onto")


class Around(vLLMModule):
    """A module above the one that overrides."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def below(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"inner.{name}": tensor for name, tensor in tensors.items()}


def test_an_override_may_rename_and_call_super() -> None:
    """Law 9: a generator of renamed pairs, passed to super(), is part of the load in progress."""

    class Old(tree.Block):
        def load_weights(self, weights):
            return super().load_weights((n.replace("gamma", "weight"), w) for n, w in weights)

    gammas = tree.block_checkpoint()
    expected, nested, outermost = tree.Block(), Around(Old()), Old()
    expected.load_weights(gammas)
    gammas["norm.gamma"] = gammas.pop("norm.weight")
    nested.load_weights(below(gammas))
    assert outermost.load_weights(gammas.items()) == set(expected.state_dict())
    assert_same_state(state(nested.inner), state(expected), "below another module")
    assert_same_state(state(outermost), state(expected), "as the outermost")
    del gammas["norm.gamma"]
    with pytest.raises(MissingWeightError, match=r"inner\.norm\.weight"):
        Around(Old()).load_weights(below(gammas))


def test_a_module_that_an_override_adds_to_has_to_be_loaded() -> None:
    """A module that is added while tensors arrive is missed in the report of the same load."""

    class Growing(tree.Block):
        def load_weights(self, weights):
            def pairs():
                yield from weights
                self.added = RMSNorm(2)

            return super().load_weights(pairs())

    with pytest.raises(MissingWeightError, match=r"added\.weight"):
        Growing().load_weights(iter(tree.block_checkpoint().items()))


def test_an_override_may_call_a_child_by_hand() -> None:
    """A child called by an override keeps its place in the tree and in the report."""

    class Hand(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([tree.MLP()])

        def load_weights(self, weights):
            return self.parts[0].load_weights(weights)

    block = tree.block_checkpoint()
    mlp = {n.removeprefix("mlp."): t for n, t in block.items() if n.startswith("mlp.")}
    model = Around(Hand())
    model.load_weights(below(mlp))
    assert "inner.parts.0.down_proj.bias" in model.load_report.loaded
    del mlp["down_proj.bias"]
    with pytest.raises(MissingWeightError, match=r"inner\.parts\.0\.down_proj\.bias"):
        Around(Hand()).load_weights(below(mlp))


class PlusOne(RMSNorm):
    """A norm whose weight a checkpoint stores minus one."""

    def load_weights(self, weights):
        return super().load_weights((name, weight + 1) for name, weight in weights)


def test_an_override_holds_for_loads_updates_and_plans() -> None:
    """Law 9: every call takes weights through the override, of the root or of a child."""
    for model, name in ((PlusOne(2), "weight"), (Around(PlusOne(2)), "inner.weight")):
        for value, call in enumerate((model.load_weights, model.update_weights)):
            weight = torch.full((2,), float(value))
            for weights in ({name: weight}, [(name, weight)]):
                assert call(weights) == {name}
                (filled,) = model.parameters()
                assert filled.tolist() == [value + 1] * 2
        assert model.plan_weights({name: torch.zeros(2)}).report.ok


def test_a_root_override_that_loads_children_by_hand_is_accounted_for() -> None:
    """Law 1: if an override forgets a child, that child's weights are missing."""

    class Hand(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = RMSNorm(2), RMSNorm(2)

        def load_weights(self, weights):
            for name, weight in weights:
                child, _, rest = name.partition(".")
                getattr(self, child).load_weights([(rest, weight)])

    model = Hand()
    both = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
    assert model.load_weights(both) == set(both)
    with pytest.raises(MissingWeightError, match=r"b\.weight"):
        model.load_weights({"a.weight": torch.ones(2)})


def test_an_override_that_swallows_a_failed_read_does_not_succeed() -> None:
    """Law 9: the load fails all the same, because a value was not written."""

    class Careless(RMSNorm):
        def load_weights(self, weights):
            try:
                return super().load_weights((name, weight) for name, weight in weights)
            except WeightLoadError:
                return set()

    model = Around(Careless(2, params_dtype=torch.float16))
    model.last = RMSNorm(2)
    good = {"inner.weight": torch.ones(2), "last.weight": torch.ones(2)}
    model.load_weights(good)
    with pytest.raises(WeightLoadError, match=r"inner\.weight"):
        model.load_weights(good | {"inner.weight": torch.full((2,), 1e6)})
    with pytest.raises(ModelNotReadyError):
        model.check_ready()


def test_an_override_with_yield_is_refused() -> None:
    """A generator function would route nothing, without an error."""

    class Yielding(RMSNorm):
        def load_weights(self, weights):
            yield from super().load_weights(weights)

    with pytest.raises(TypeError, match=r"Yielding\.load_weights must not be"):
        Yielding(2).load_weights({"weight": torch.ones(2)})


def test_a_parameter_made_while_loading_is_loaded() -> None:
    """An override may create parameters for what it finds in the checkpoint."""

    class Lazy(vLLMModule):
        def load_weights(self, weights):
            pairs = list(weights)
            for name, weight in pairs:
                self.register_parameter(
                    name, nn.Parameter(torch.empty(weight.shape, device="meta"))
                )
            return super().load_weights(iter(pairs))

    for weights in ({"w": torch.ones(2)}, iter([("w", torch.ones(2))])):
        model = Lazy()
        assert model.load_weights(weights) == {"w"}
        assert model.w.tolist() == [1, 1]


class Logged:
    """Logs calls of load_weights; it is no vLLMModule."""

    def load_weights(self, weights):
        self.calls += 1
        return super().load_weights(weights)


class LoggedNorm(Logged, RMSNorm):
    calls = 0


@pytest.mark.parametrize("on_object", [False, True])
def test_an_override_of_a_mixin_or_of_one_object_is_called_too(on_object: bool) -> None:
    """No shortcut is taken past a load_weights that is not the base class's."""
    norm = RMSNorm(2) if on_object else LoggedNorm(2)
    model = Around(norm)
    if on_object:
        norm.calls, load_weights = 0, norm.load_weights

        def logged(weights):
            norm.calls += 1
            return load_weights(weights)

        norm.load_weights = logged
    model.load_weights({"inner.weight": torch.ones(2)})
    assert norm.calls == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_an_override_may_stream_some_and_call_children_with_others(streamed: bool) -> None:
    """A child that is called after tensors were read still takes part in the load."""

    class Mixed(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = RMSNorm(2), nn.ModuleList([RMSNorm(2), RMSNorm(3)])

        def load_weights(self, weights):
            for name, weight in weights:
                if name.startswith("second.0."):
                    self.second[0].load_weights([(name.removeprefix("second.0."), weight)])
                else:
                    super().load_weights(iter([(name, weight)]))

    weights = {"first": torch.ones(2), "second.0": torch.ones(2), "second.1": torch.ones(3)}
    weights = {f"{name}.weight": tensor for name, tensor in weights.items()}
    model = Mixed()
    assert model.load_weights(iter(weights.items()) if streamed else weights) == set(weights)
    del weights["second.0.weight"]
    with pytest.raises(MissingWeightError, match=r"second\.0\.weight"):
        Mixed().load_weights(weights)


def test_a_renamed_tensor_keeps_the_name_of_the_checkpoint_in_reports() -> None:
    """An override that passes on ``Renamed`` names; what is wrong has both names."""

    class Old(tree.Block):
        def load_weights(self, weights):
            return super().load_weights(
                [(Renamed(name.replace("gamma", "weight"), f"x.{name}"), w) for name, w in weights]
            )

        def stored_names(self, given):
            assert "x.norm.gamma" not in given
            return lambda name: name.replace("norm.weight", "norm.gamma")

    tensors = tree.block_checkpoint()
    tensors["norm.gamma"] = tensors.pop("norm.weight")
    module = Old()
    module.load_weights(tensors)
    assert module.load_report is not None
    assert module.load_report.loaded["norm.weight"] == ["x.norm.gamma"]
    bad = tensors | {"norm.gamma": torch.ones(7)}
    with pytest.raises(WeightLoadError, match=r"x\.norm\.gamma: .*\(renamed: norm\.weight\)"):
        Old().load_weights(bad)
    del tensors["norm.gamma"]
    with pytest.raises(MissingWeightError, match=r"norm\.weight: .* \(or norm\.gamma\)"):
        Old().load_weights(tensors)


def test_reports_keep_full_names_where_an_override_copies_names() -> None:
    """Names that are equal to those that it was given are those, whatever string they are."""

    class Copying(tree.MLP):
        def load_weights(self, weights):
            return super().load_weights([(f"{name}", weight) for name, weight in weights])

    class Above(vLLMModule):
        weight_aliases = {"old": "mlp"}

        def __init__(self) -> None:
            super().__init__()
            self.mlp = Copying()

    tensors = {f"old.{n}": torch.ones(t.shape) for n, t in tree.MLP().expected_weights().items()}
    model = Above()
    model.load_weights(tensors)
    assert model.load_report is not None
    loaded = [name for names in model.load_report.loaded.values() for name in names]
    assert sorted(loaded) == sorted(tensors)


def test_a_renamed_name_can_be_copied() -> None:
    """A module that keeps the names it passed on can be copied and pickled."""
    name = Renamed("new", "old")
    for copied in (copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert (copied, copied.stored) == ("new", "old")
