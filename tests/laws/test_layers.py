"""The laws of loading, held against every layer and some plain modules."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.distributed import tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.quantization import online
from vllm_module.testing import LAWS, Law, assert_order_independent, tp_sizes
from vllm_module.weights import file_bytes, reading

SUBJECTS = runpy.run_path(str(Path(__file__).with_name("subjects.py")))
LAYERS = SUBJECTS["LAYERS"]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_the_law(name: str, law: Law) -> None:
    """Whatever the layer is built with and however many ranks share it, the law holds."""
    LAYERS[name].hold(law)


@pytest.mark.parametrize("name", LAYERS)
@given(data=st.data(), size=tp_sizes())
def test_a_layer_takes_every_size_that_divides_it(
    name: str, data: st.DataObject, size: int
) -> None:
    """A size is refused only where features or heads cannot be shared: padding is no reason."""
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


@pytest.mark.parametrize("name", SUBJECTS["MODELS"])
@given(data=st.data())
def test_every_tensor_of_a_model_is_born_on_meta(name: str, data: st.DataObject) -> None:
    """Building a model takes no memory, whatever its configuration."""
    subject = SUBJECTS["MODELS"][name]
    model = subject.build(data.draw(subject.arguments["config"]))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    "name", ["column", "row", "attention", "vocabulary", "quantized while loading"]
)
def test_order_does_not_matter_to_large_tensors_either(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in pieces and batches of a few bytes, by several threads, the bits are the same."""
    monkeypatch.setattr(reading, "PIECE_BYTES", 24)
    monkeypatch.setattr(reading, "_BATCH_BYTES", 16)
    monkeypatch.setattr(online, "_PIECE", 24)
    monkeypatch.setattr(file_bytes, "_WINDOW", 64)
    monkeypatch.setattr(file_bytes, "_SCRATCH", 64)
    LAYERS[name].hold(assert_order_independent)
