"""Loads that are refused or break, on models that were loaded before."""

from __future__ import annotations

import contextlib
import gc
import re
import runpy
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_module import WeightLoadError
from vllm_module.core import fill
from vllm_module.core.run import execute
from vllm_module.errors import (
    DuplicateWeightError,
    ModelNotReadyError,
    UnexpectedWeightError,
    WeightReadError,
)
from vllm_module.layers import ColumnParallelLinear, ParallelLMHead, RMSNorm
from vllm_module.parameters import BasevLLMParameter
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.testing import failing_reads, failing_stream
from vllm_module.testing.checkpoints import assert_same_state, state, write_checkpoint
from vllm_module.testing.sources import WatchedSource
from vllm_module.weights import open_checkpoint

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))
pytestmark = pytest.mark.usefixtures("onto")


@pytest.fixture
def model():
    """A model that runs."""
    model = tree.Model().eval()
    model.load_weights(tree.checkpoint())
    return model


def test_a_refused_collection_leaves_a_loaded_model_as_it_was(model) -> None:
    """A collection is checked whole before anything is written: a bad reload changes nothing."""
    before = state(model)
    bad = {name: tensor + 1 for name, tensor in tree.checkpoint().items()}
    bad["extra"] = torch.zeros(1)
    for call in (model.load_weights, model.update_weights):
        with pytest.raises(UnexpectedWeightError, match="Nothing was written"):
            call(bad)
    assert_same_state(state(model), before, "after it refused")
    model(torch.arange(3))


def test_a_refused_stream_that_wrote_nothing_leaves_the_model_running() -> None:
    """Unexpected names alone do not stop a loaded model."""
    norm = RMSNorm(2)
    norm.load_weights({"weight": torch.ones(2)})
    with pytest.raises(UnexpectedWeightError, match="Nothing was written"):
        norm.update_weights(iter([("bogus", torch.ones(2))]))
    norm(torch.ones(2))


def test_a_refused_stream_that_wrote_something_stops_the_model(model) -> None:
    """Tensors before the refused name were written: the error tells that, and no model runs."""
    weights = {"embed.weight": torch.zeros(10, 8), "bogus": torch.zeros(1)}
    with pytest.raises(UnexpectedWeightError, match="Part of it was written"):
        model.update_weights(iter(weights.items()))
    with pytest.raises(ModelNotReadyError, match="UnexpectedWeightError"):
        model(torch.arange(3))


def test_a_stream_that_breaks_leaves_every_module_refusing(model) -> None:
    """Law 9: a mixture of weights never runs, nor any module of it, nor after a later update."""
    error = OSError("the trainer went away")
    with pytest.raises(OSError, match=r"^the trainer went away$"):
        model.update_weights(failing_stream({"embed.weight": torch.zeros(10, 8)}, 1, error))
    for module in (model, model.blocks[0], model.embed):
        with pytest.raises(ModelNotReadyError, match="OSError: the trainer went away\nIt had over"):
            module(torch.arange(3))
    model.update_weights({"embed.weight": torch.zeros(10, 8)})
    with pytest.raises(ModelNotReadyError, match="mixture"):
        model(torch.arange(3))
    model.load_weights(tree.checkpoint())
    model(torch.arange(3))


@pytest.mark.parametrize("call", ["load_weights", "update_weights"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_interrupt_leaves_every_module_refusing(model, streamed: bool, call: str) -> None:
    """Law 9: Ctrl-C in the middle of a load leaves a mixture, as an error does."""
    tensors, stop = tree.checkpoint(), KeyboardInterrupt("Ctrl-C")
    broken = failing_stream(tensors, 2, stop)
    with pytest.raises(KeyboardInterrupt):
        getattr(model, call)(broken if streamed else failing_reads(tensors, ["head.weight"], stop))
    for module in (model, model.blocks[0], model.embed):
        with pytest.raises(ModelNotReadyError, match="KeyboardInterrupt: Ctrl-C"):
            module(torch.arange(3))
    model.load_weights(tensors)
    model(torch.arange(3))


def test_a_stream_that_breaks_before_the_first_tensor_changes_nothing(model) -> None:
    """A model to which nothing was written runs as before."""
    with pytest.raises(OSError, match="not even one"):
        model.update_weights(failing_stream(tree.checkpoint(), 0, OSError("not even one")))
    model(torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_wide_floats_convert(dtype: torch.dtype) -> None:
    """Weights of a checkpoint in another precision are converted to the parameter's dtype."""
    layer = ColumnParallelLinear(4, 4, bias=False, params_dtype=dtype)
    weight = torch.rand(4, 4)
    layer.load_weights({"weight": weight})
    assert torch.equal(layer.weight, weight.to(dtype))


def test_a_value_that_the_dtype_cannot_hold_is_refused_by_name() -> None:
    """No value becomes infinite; the message has the tensor's full name."""
    model = tree.Model(1)
    model.head = ParallelLMHead(10, 8, params_dtype=torch.float16)
    with pytest.raises(WeightLoadError, match=r"head\.weight"):
        model.load_weights(tree.checkpoint(1) | {"head.weight": torch.full((10, 8), 1e6)})
    with pytest.raises(ModelNotReadyError, match=r"head\.weight"):
        model.check_ready()


@pytest.mark.parametrize("form", ["mapping", "handles", "stream of handles"])
@pytest.mark.parametrize("call", ["load_weights", "update_weights"])
def test_tied_tensors_are_compared_before_anything_is_written(call: str, form: str) -> None:
    """Where both can be read twice, a model that served keeps its values and runs."""
    model = tree.Model(tied=True).eval()
    tensors = tree.checkpoint(head=False)
    model.load_weights(tensors)
    before = state(model)
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    changed["head.weight"] = changed["embed.weight"].clone()
    changed["head.weight"][9, 7] += 1
    weights = WatchedSource(changed).items() if form != "mapping" else changed
    given = iter(weights) if form.startswith("stream") else weights
    with pytest.raises(DuplicateWeightError, match="Nothing was written to the model") as error:
        getattr(model, call)(given)
    assert "head.weight and embed.weight fill one tensor" in str(error.value)
    assert_same_state(state(model), before, "after it refused")
    model(torch.arange(3))
    changed["head.weight"] = changed["embed.weight"].clone()
    getattr(model, call)(changed)
    assert torch.equal(model.head.weight[:10], changed["embed.weight"])


def test_tied_tensors_are_compared_in_pieces(monkeypatch) -> None:
    """A difference in any piece is found, in other dtypes too, and no tensor is read whole."""
    monkeypatch.setattr(fill, "_COMPARED_BYTES", 64)  # two rows of eight
    tensors = tree.checkpoint(1, head=False)
    for row in (None, 0, 1, 9):
        head = tensors["embed.weight"].double()
        if row is not None:
            head[row, 7] += 1
        source = WatchedSource({**tensors, "head.weight": head})
        model = tree.Model(1, tied=True)
        if row is None:
            model.load_weights(source)
            model.check_ready()
            continue
        with pytest.raises(DuplicateWeightError, match="Nothing was written"):
            model.load_weights(source)
        assert all(parameter.is_meta for parameter in model.head.parameters())


def test_a_tied_tensor_of_a_stream_is_compared_to_a_handle_that_waits() -> None:
    """A stream may mix handles and tensors: what is tied is compared, in either order."""
    tensors = tree.checkpoint(1, head=False)
    handle = WatchedSource({"weight": tensors["embed.weight"]})["weight"]
    for names in (["embed.weight", "head.weight"], ["head.weight", "embed.weight"]):
        for wrong in (0, 1):
            tied = dict(zip(names, (handle, tensors["embed.weight"] + wrong), strict=True))
            model = tree.Model(1, tied=True).eval()
            stream = iter((tensors | tied).items())
            if wrong:
                with pytest.raises(
                    DuplicateWeightError, match=r"head\.weight and|embed\.weight and"
                ):
                    model.load_weights(stream)
            else:
                model.load_weights(stream)
                assert torch.equal(model.head.weight[:10], tensors["embed.weight"])


def test_the_message_says_what_was_overwritten(model) -> None:
    """Where it cannot be known before, the error lists what was written, numbers folded."""
    changed = {name: tensor + 1 for name, tensor in tree.checkpoint().items()}
    first = {name: tensor for name, tensor in changed.items() if name != "blocks.1.norm.weight"}
    broken = first | {"blocks.1.norm.weight": torch.full((8,), 1e300, dtype=torch.float64)}
    with pytest.raises(WeightReadError, match="beyond the range") as error:
        model.load_weights(broken)
    *_, overwritten, outcome = str(error.value).splitlines()
    assert overwritten.startswith("Overwritten before, at least in part: embed.weight, ")
    assert "blocks.{0..1}.qkv_proj.weight" in overwritten
    assert re.search(r" and [45] more\.$", overwritten)  # a reader may be one tensor ahead
    assert outcome == "Part of it was written: the model refuses to run until a load succeeds."
    with pytest.raises(ModelNotReadyError, match=r"WeightReadError: blocks\.1\.norm\.weight"):
        model(torch.arange(3))
    stream = iter([("embed.weight", torch.zeros(10, 8)), ("bogus", torch.zeros(1))])
    with pytest.raises(UnexpectedWeightError, match=r"at least in part: embed\.weight\."):
        model.update_weights(stream)


@pytest.mark.parametrize("form", ["checkpoint", "pairs", "stream"])
def test_a_refusal_names_the_folder_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    """Handles know their file, so each kind of refusal says where the checkpoint is."""
    tensors, model = tree.checkpoint(1, head=False), tree.Model(1, tied=True)
    differs = tensors | {"head.weight": tensors["embed.weight"] + 1}
    for number, (bad, message) in enumerate(
        [
            (tensors | {"x": torch.ones(1)}, "Model refuses the checkpoint in {}.\nmatched"),
            (differs, "\nThe checkpoint is in {}.\nNothing was written to the model."),
        ]
    ):
        folder = tmp_path / str(number)
        write_checkpoint(folder, bad)
        with open_checkpoint(folder) as checkpoint:
            forms = {
                "checkpoint": lambda given=checkpoint: given,
                "pairs": checkpoint.items,
                "stream": lambda given=checkpoint: iter(given.items()),
            }
            for call in (model.load_weights, model.update_weights):
                with pytest.raises(WeightLoadError) as error:
                    call(forms[form]())
                assert message.format(folder) in str(error.value)


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, WeightReadError])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_first_load_that_breaks_leaves_no_new_memory(
    streamed: bool, kind: type[BaseException]
) -> None:
    """What it materialized is on meta again, scales included, so that no call can read it."""
    error = kind("torn")
    tensors = tree.checkpoint(1)
    model = tree.Model(1).eval()
    model.blocks[0].mlp.gate_up_proj.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    typed = [p for p in model.parameters() if isinstance(p, BasevLLMParameter)]
    assert all(parameter.is_meta for parameter in typed)
    broken = (
        failing_stream(tensors, len(tensors) - 1, error)
        if streamed
        else failing_reads(tensors, ["blocks.0.mlp.down_proj.weight"], error)
    )
    with pytest.raises(type(error)) as raised:
        model.load_weights(broken)
    if isinstance(error, WeightReadError):
        assert "at least in part: blocks.0.plain" in str(raised.value)  # which had memory before
    typed = [p for p in model.parameters() if isinstance(p, BasevLLMParameter)]
    assert all(parameter.is_meta for parameter in typed)
    with pytest.raises(ModelNotReadyError, match=type(error).__name__):
        model(torch.arange(3))
    model.load_weights(tensors)
    model(torch.arange(3))


@pytest.mark.parametrize("outcome", ["loaded", "refused", "broken", "planned", "run", "incomplete"])
def test_a_model_that_is_deleted_gives_back_its_memory_at_once(outcome: str) -> None:
    """A load leaves no cycle of references, which would hold the model until a collection."""
    gc.disable()
    try:
        model, tensors = tree.Model(), tree.checkpoint()
        if outcome == "loaded":
            model.load_weights(tensors)
            model.update_weights(iter(tensors.items()))
            model.check_ready()
        elif outcome == "refused":
            with contextlib.suppress(WeightLoadError):
                model.load_weights({**tensors, "other": torch.zeros(1)})
        elif outcome == "broken":
            with contextlib.suppress(WeightReadError):
                model.load_weights(tensors | {"embed.weight": tensors["embed.weight"] * torch.nan})
        elif outcome == "planned":
            model.plan_weights(tensors)
        elif outcome == "run":
            model.blocks[0].mlp.gate_up_proj.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
            plan = model.plan_weights(tensors)
            execute(plan)
            model.check_ready()
            del plan
        else:
            with contextlib.suppress(ModelNotReadyError):
                model.check_ready()
        deleted = weakref.ref(model)
        del model
        assert deleted() is None
    finally:
        gc.enable()
