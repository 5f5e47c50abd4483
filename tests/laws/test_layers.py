"""The laws of loading, checked on every layer and on blocks of layers."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.distributed import tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.quantization import online
from vllm_module.testing import (
    LAWS,
    Law,
    assert_accounting_exact,
    assert_cost_linear,
    assert_order_independent,
    assert_pure,
    assert_reload_in_place,
    assert_staged,
    tp_sizes,
)
from vllm_module.weights import file_bytes, pieces, reading

STAND_IN = runpy.run_path(str(Path(__file__).parents[1] / "weights" / "delayed_device.py"))
SUBJECTS = runpy.run_path(str(Path(__file__).with_name("subjects.py")))
LAYERS, STAGES = SUBJECTS["LAYERS"], SUBJECTS["STAGES"]


CASES = 2  # of a law for one subject; "make laws" tries as many as are asked for


@pytest.fixture
def fewer_cases() -> Iterator[None]:
    """Try fewer cases than of a property."""
    before = settings.get_current_profile_name()
    few = min(CASES, settings.default.max_examples)
    settings.register_profile("few", settings.get_profile(before), max_examples=few)
    settings.load_profile("few")
    yield
    settings.load_profile(before)


# These two are about what all layers share: each is held for a third of them, and for each class
# of parameters in test_parameters.py.
SHARED = assert_cost_linear, assert_pure


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize(
    ("name", "law"),
    [
        pytest.param(
            name,
            law,
            marks=[pytest.mark.at_length] if law in SHARED and (row + column) % 3 else [],
        )
        for row, name in enumerate(LAYERS)
        for column, law in enumerate(LAWS)
    ],
)
def test_a_layer_keeps_the_law(name: str, law: Law) -> None:
    """The law holds for any arguments of the layer and any number of ranks."""
    LAYERS[name].hold(law)


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["a stage of a tied model", "a stage of a hybrid with experts"])
def test_a_pipeline_stage_keeps_the_law(name: str, law: Law) -> None:
    """The law holds for the first, second and last of three stages."""
    STAGES[name].hold(law)


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize("name", ["a tied model in depth", "a hybrid with experts in depth"])
def test_stages_of_many_layers_are_the_whole(name: str) -> None:
    """The law of stages holds for as many as four of them."""
    STAGES[name].hold(assert_staged)


@pytest.mark.parametrize("name", LAYERS)
@given(data=st.data(), size=tp_sizes())
def test_a_layer_takes_every_size_that_divides_it(
    name: str, data: st.DataObject, size: int
) -> None:
    """A size is refused only if features or heads cannot be divided, never because of padding."""
    subject = LAYERS[name]
    arguments = {
        key: data.draw(value, key) if isinstance(value, st.SearchStrategy) else value
        for key, value in subject.arguments.items()
    }
    taken = True
    try:
        for rank in {0, size - 1}:
            with tensor_parallel(rank=rank, size=size):
                subject.build(**arguments)
    except ShardingError:
        taken = False
    assert taken == subject.takes(size, **arguments)


# A law says so of each tensor, of drawn models as well.
@pytest.mark.parametrize("name", SUBJECTS["MODELS"])
@given(data=st.data())
@settings(max_examples=6)
def test_every_tensor_of_a_model_is_born_on_meta(name: str, data: st.DataObject) -> None:
    """Building a model allocates nothing for parameters, for any configuration."""
    subject = SUBJECTS["MODELS"][name]
    model = subject.build(data.draw(subject.arguments["config"]))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize(
    "name",
    [
        "column",
        "row",
        "attention",
        "vocabulary",
        "quantized while loading",
        "packed while loading",
        "quantized to NF4 while loading",
    ],
)
def test_order_does_not_matter_to_large_tensors_either(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are the same when several threads read pieces and batches of a few bytes."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 24)
    monkeypatch.setattr(reading, "_BATCH_BYTES", 16)
    monkeypatch.setattr(online, "_PIECE", 24)
    monkeypatch.setattr(file_bytes, "_WINDOW", 64)
    monkeypatch.setattr(file_bytes, "_SCRATCH", 64)
    LAYERS[name].hold(assert_order_independent)


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize(
    "law", [assert_accounting_exact, assert_order_independent, assert_reload_in_place]
)
@pytest.mark.parametrize("name", ["layouts quantized while loading"])
def test_a_load_onto_a_device_keeps_the_law(name: str, law: Law) -> None:
    """The law holds where copies to the device are done as late as its streams and events allow."""
    with STAND_IN["loading_onto_a_device"]():
        LAYERS[name].hold(law)
