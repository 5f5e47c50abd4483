"""Wrong checkpoints of experts: one report, folded, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.core import fill
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.errors import (
    DuplicateWeightError,
    MisshapenWeightError,
    MissingWeightError,
    UnexpectedWeightError,
    UnsupportedModelError,
    WeightLoadError,
)
from vllm_module.layers import FusedMoE
from vllm_module.testing import random_weights, write_checkpoint
from vllm_module.testing.checkpoints import assert_same_state, fuse, state
from vllm_module.testing.names import Names
from vllm_module.weights import open_checkpoint

Tensors = dict[str, torch.Tensor]
Pairs = list[tuple[str, torch.Tensor]]


class Layer(vLLMModule):
    def __init__(self, num_experts: int = 8) -> None:
        super().__init__()
        self.experts = FusedMoE(num_experts, 2, 4, 6)


def apart(num_experts: int = 8) -> Tensors:
    return random_weights(Layer(num_experts).expected_weights())


def packed(num_experts: int = 8) -> Tensors:
    return fuse(apart(num_experts), Names.of(Layer(num_experts)).fused)


def without(*parts: str) -> Pairs:
    return [(n, t) for n, t in apart().items() if not any(part in n for part in parts)]


def renumbered() -> Pairs:
    return [(name.replace(".5.", ".3."), tensor) for name, tensor in apart().items()]


GATE, UP, DOWN = (f"experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down"))
SAME = "already filled by another tensor of this name"
# From what is wrong to a checkpoint, the error, and the lines of its report.
WRONG: dict[str, tuple[Callable[[], Pairs], type[WeightLoadError], list[str]]] = {
    "an expert is missing": (
        lambda: without(".3."),
        MissingWeightError,
        [f"{name.format(3)}: expected shape" for name in (GATE, UP, DOWN)],
    ),
    "several are missing": (
        lambda: without(".3.", ".4.", ".7."),
        MissingWeightError,
        [f"{name.format('{3..4,7}')}: expected shape" for name in (GATE, UP, DOWN)],
    ),
    "gate without up": (
        lambda: without("up_proj"),
        MissingWeightError,
        [f"{UP.format('{0..7}')}: expected shape [6, 4], slot 'up_proj' of w13.weight"],
    ),
    "experts too many": (
        lambda: [*apart(10).items()],
        UnexpectedWeightError,
        [f"{name.format('{8..9}')}: FusedMoE has no such number" for name in (GATE, UP, DOWN)],
    ),
    "a name of another model": (
        lambda: [(name.replace("up_proj", "w3"), tensor) for name, tensor in apart().items()],
        WeightLoadError,
        [
            f"{UP.format('{0..7}')}: expected shape",
            "experts.{0..7}.w3.weight: FusedMoE has below each number gate_proj, up_proj, down",
        ],
    ),
    "two with one number": (
        renumbered,
        WeightLoadError,
        [
            *(f"{name.format(5)}: expected shape" for name in (GATE, UP, DOWN)),
            *(f"{name.format(3)}: experts.w" for name in (GATE, UP, DOWN)),
        ],
    ),
    "all of them twice": (
        lambda: [*apart().items()] * 2,
        DuplicateWeightError,
        [f"{name.format('{0..7}')}: experts.w" for name in (GATE, UP, DOWN)],
    ),
    "packed after one by one": (
        lambda: [*apart().items(), *packed().items()],
        DuplicateWeightError,
        ["experts.gate_up_proj: experts.w13.weight is", "experts.down_proj: experts.w2.weight is"],
    ),
    "one by one after packed": (
        lambda: [*packed().items(), *apart().items()],
        DuplicateWeightError,
        [f"{name.format('{0..7}')}: experts.w" for name in (GATE, UP, DOWN)],
    ),
    "packed of another number": (
        lambda: [*packed(4).items()],
        MisshapenWeightError,
        [
            "experts.gate_up_proj: expected shape [8, 12, 4], got [4, 12, 4]",
            "experts.down_proj: expected shape [8, 4, 6], got [4, 4, 6]",
        ],
    ),
    "packed and transposed": (
        lambda: [(name, tensor.mT) for name, tensor in packed().items()],
        MisshapenWeightError,
        [
            "experts.gate_up_proj: expected shape [8, 12, 4], got [8, 4, 12]",
            "experts.down_proj: expected shape [8, 4, 6], got [8, 6, 4]",
        ],
    ),
}


@pytest.fixture(scope="module", params=["one rank", "one rank of 4 with experts"])
def loaded(request: pytest.FixtureRequest) -> Layer:
    """Return a loaded layer, all of it or the part of a rank that keeps two experts."""
    of_four = request.param != "one rank"
    with tensor_parallel(rank=1, size=4) if of_four else nullcontext(), expert_parallel():
        layer = Layer()
    layer.load_weights(apart())
    return layer


@pytest.mark.parametrize(("pairs", "error", "lines"), WRONG.values(), ids=WRONG)
def test_wrong_experts_are_refused_in_one_report(
    loaded: Layer, pairs: Callable[[], Pairs], error: type[WeightLoadError], lines: list[str]
) -> None:
    """Every rank names all that is wrong, experts folded, and writes nothing."""
    before = state(loaded)
    with pytest.raises(error) as refused:
        loaded.load_weights(pairs())
    listed = [line for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert len(listed) == len(lines), listed
    for line, expected in zip(listed, lines, strict=True):
        assert line.startswith(f"  {expected}"), listed
    refused.match("Nothing was written to the model")
    assert_same_state(state(loaded), before, "after it refused")
    loaded.check_ready()


def test_a_missing_file_of_another_rank_is_refused(tmp_path: Path) -> None:
    """A rank refuses a checkpoint without a file that it would read nothing of."""
    folder = write_checkpoint(tmp_path, apart(), files=4)
    (folder / "model-00004-of-00004.safetensors").unlink()
    for rank in range(4):
        with tensor_parallel(rank=rank, size=4), expert_parallel():
            layer = Layer()
        with (
            pytest.raises(WeightLoadError, match=r"model-00004-of-00004\.safetensors"),
            open_checkpoint(folder) as checkpoint,
        ):
            layer.load_weights(checkpoint.items())
        assert all(parameter.is_meta for parameter in layer.parameters())


CHOICES = {
    "more experts a token than there are": (
        {"top_k": 9},
        "9 experts a token cannot be chosen from 8",
    ),
    "no expert a token": ({"top_k": 0}, "0 experts a token"),
    "more experts a token than in the groups": (
        {"top_k": 3, "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 1},
        "3 experts a token cannot be chosen from 2",
    ),
    "groups that do not divide": (
        {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1},
        "8 experts in 3 groups",
    ),
    "no number of groups that are chosen": (
        {"use_grouped_topk": True, "num_expert_group": 2},
        "8 experts in 2 groups, of which None are chosen",
    ),
    "more groups chosen than there are": (
        {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 3},
        "8 experts in 2 groups, of which 3 are chosen",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), CHOICES.values(), ids=CHOICES)
def test_experts_that_cannot_be_chosen_are_refused(arguments: dict, message: str) -> None:
    """The layer is not built, and the message has the numbers."""
    with pytest.raises(UnsupportedModelError, match=message):
        FusedMoE(
            **{"num_experts": 8, "top_k": 2, "hidden_size": 4, "intermediate_size": 6} | arguments
        )


def test_experts_need_not_divide_the_ranks() -> None:
    """Of 8 experts on 3 ranks, the first two have 3 and the last has 2; each says which."""
    kept = []
    for rank in range(3):
        with tensor_parallel(rank=rank, size=3), expert_parallel():
            layer = Layer()
        kept.append(list(layer.experts.experts.kept))
        assert f"experts={layer.experts.experts.kept} of 8" in repr(layer)
    assert kept == [[0, 1, 2], [3, 4, 5], [6, 7]]


# Numbers that are compared at a time: none, one, some of an expert, more than one.
@pytest.mark.parametrize("most", [None, 0, 1, 7, 48, 100])
@pytest.mark.parametrize("packed_first", [False, True])
def test_tied_experts_may_be_packed_under_one_name_alone(
    packed_first: bool, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two modules that share experts take both forms, of any size, and refuse two values."""
    if most is not None:
        monkeypatch.setattr(fill, "_COMPARED_BYTES", most * 4)  # real experts have more than 16 MiB

    class Two(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Layer(3), Layer(3)
            self.b.experts.w13.weight = self.a.experts.w13.weight

    tensors = random_weights(Two().expected_weights())
    layer = Names.of(Layer(3)).fused[0]
    whole = layer.join({name.removeprefix("a."): tensor for name, tensor in tensors.items()})
    model = Two()

    def load() -> None:
        packed = {"b.experts.gate_up_proj": whole}
        model.load_weights({**packed, **tensors} if packed_first else {**tensors, **packed})

    load()
    assert torch.equal(model.b.experts.w13.weight, whole)
    for expert, row, column in ((0, 0, 0), (1, 11, 3), (2, 1, 3), (2, 11, 0)):
        whole[expert, row, column] += 1
        with pytest.raises(DuplicateWeightError, match="their values differ"):
            load()
        whole[expert, row, column] -= 1
