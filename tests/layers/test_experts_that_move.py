"""Experts that move between ranks, against loads of the same weights into the new places.

Ranks are threads, each with a gloo group of its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.config import QuantizationConfig
from vllm_module.cooperative import moving
from vllm_module.cooperative.rank_transfer import RankTransfer
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.errors import RankError, UnsupportedModelError
from vllm_module.layers import FusedMoE
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.layout import transfer
from vllm_module.parameters import BasevLLMParameter
from vllm_module.quantization import Rules, online_rules, quantize
from vllm_module.quantization.mxfp4 import MXFP4Method
from vllm_module.runtime.ranks import worker_experts
from vllm_module.runtime.ranks.worker_experts import forget_sources, move_experts
from vllm_module.runtime.ranks.worker_weights import WorkerWeights
from vllm_module.testing import random_weights
from vllm_module.weights.sharded_state import ShardedState

Tensors = dict[str, torch.Tensor]

EXPERTS, HIDDEN, INNER = 6, 64, 64
LIMIT = 5  # seconds that a rank waits for another
SCHEMES = (
    "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "bitsandbytes", "int4_per_group",
)  # fmt: skip
SIZES = {"weight_block_size": (16, 32), "group_size": 32}
RULES = {name: online_rules(QuantizationConfig(scheme=name, **SIZES)) for name in SCHEMES}
KINDS: dict[str, dict[str, Any]] = {
    "per expert": {},
    "per expert, with biases": {"bias": True},
    "packed only": {"shard_names": None, "bias": True},
    "packed only, transposed and alternating": {
        "shard_names": None, "transposed": True, "interleaved": True,
    },
    **{f"per expert, {name}": {"quantized": RULES[name]} for name in RULES},
    "packed only, int4_per_group": {"shard_names": None, "quantized": RULES["int4_per_group"]},
    "packed only, MXFP4": {"shard_names": None, "quantized": Rules((("Linear", MXFP4Method()),))},
}  # fmt: skip


def built(
    rank: int, size: int, placement: list[int], quantized: Rules | None = None, **arguments: Any
) -> FusedMoE:
    """Return a layer on meta, whose experts have these places."""
    with (
        tensor_parallel(rank=rank, size=size),
        expert_parallel(redundant=len(placement) - EXPERTS),
    ):
        layer = FusedMoE(EXPERTS, 2, HIDDEN, INNER, torch.float32, **arguments)
    if quantized is not None:
        quantize(layer, quantized)
    layer.place_experts(placement)
    return layer


def drawn(draw: random.Random, size: int, places: int) -> list[int]:
    """Return a placement in which no rank has an expert twice."""
    each, more = divmod(places, size)
    while True:
        placed = draw.sample(
            [*range(EXPERTS), *draw.choices(range(EXPERTS), k=places - EXPERTS)], k=places
        )
        ranks = [placed[r * each + min(r, more) :][: each + (r < more)] for r in range(size)]
        if all(len({*held}) == len(held) for held in ranks):
            return placed


def valid(layer: FusedMoE, seed: int) -> Tensors:
    """Return weights for the layer; no scale of MXFP4 is NaN."""
    weights = random_weights(layer.expected_weights(), seed=seed)
    for tensor in weights.values():
        if tensor.dtype == torch.uint8:
            tensor.clamp_(max=254)
    return weights


def on_ranks(size: int, work: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    store = dist.HashStore()

    def run(rank: int) -> Any:
        limit = timedelta(seconds=LIMIT)
        group = private_group(store, rank, size, torch.device("cpu"), limit)
        try:
            return work(rank, group)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
    return [future.result() for future in futures]


def held(layer: FusedMoE) -> Tensors:
    return {
        name: each.detach() for name, each in (*layer.named_parameters(), *layer.named_buffers())
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def check(kind: str, size: int, places: int, draw: random.Random) -> None:
    """Move experts twice, update them, and compare with what loads give."""
    arguments = KINDS[kind]
    orders = [drawn(draw, size, places) for _ in range(3)]
    first, other = (valid(built(0, 1, [*range(EXPERTS)], **arguments), seed) for seed in (1, 2))
    some = {name: other[name] for name in draw.sample(sorted(other), k=max(1, len(other) // 3))}

    def work(rank: int, group: dist.ProcessGroup) -> None:
        layer = built(rank, size, orders[0], **arguments)
        layer.load_weights(first)
        memory = {name: each.data_ptr() for name, each in held(layer).items()}
        one = sum(each[0].nbytes for each in layer.parameters()) if len(layer.experts.kept) else 0
        weights = dict(first)
        for before, placed in pairwise(orders):
            was = {*built(rank, size, before).experts.kept}
            received = move_experts(layer, placed, group, LIMIT)
            assert received == one * len({*layer.experts.kept} - was)  # nothing comes that is there
            for new in ({}, some):
                layer.update_weights(new)
                weights |= new
                expected = built(rank, size, placed, **arguments)
                expected.load_weights(weights)
                assert held(layer).keys() == held(expected).keys()
                for name, tensor in held(expected).items():
                    assert bits(held(layer)[name]) == bits(tensor), (name, placed)
        assert {name: each.data_ptr() for name, each in held(layer).items()} == memory

    on_ranks(size, work)


@pytest.mark.parametrize("kind", KINDS)
def test_what_moved_is_what_a_load_gives(kind: str) -> None:
    """Bit for bit, in the memory that there was, also after updates; copies too."""
    draw, at = random.Random(kind), [*KINDS].index(kind)
    without_copies, with_copies = [(2, 6), (3, 6), (7, 6)], [(2, 7), (3, 9)]
    # One of each; all are tried with several kinds.
    some = [without_copies[at % 3], with_copies[at % 2]]
    for size, places in without_copies + with_copies if "AT_LENGTH" in os.environ else some:
        check(kind, size, places, draw)


def test_only_what_moved_loses_its_digests() -> None:
    """The digests of what other layers cast stay, by which updates are compared."""

    class Model(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.other = (
                built(0, 2, [*range(EXPERTS)]),
                built(0, 2, [1, 0, 2, 3, 4, 5]),
            )

    model = Model()
    model.keep_digests = True
    weights = random_weights(model.expected_weights(), seed=1)
    model.load_weights({name: each.bfloat16() for name, each in weights.items()})
    sources = dict(model.load_state.sources)
    forget_sources(model, ["experts"])
    kept = {name: each for name, each in sources.items() if name.startswith("other.")}
    assert model.load_state.sources == kept
    assert 0 < len(kept) < len(sources)


def test_adapters_hold_the_places_that_they_were_loaded_to() -> None:
    """A sharded state, which has experts in order, is not loaded under them."""
    layer, order = built(0, 2, [1, 0, 2, 3, 4, 5]), (1, 0, 2, 3, 4, 5)
    source = SimpleNamespace(name="state")
    worker: Any = SimpleNamespace(model=layer, source=source, _adapters={1: None})
    with pytest.raises(UnsupportedModelError, match="unload_adapter them first"):
        WorkerWeights._load(worker, object.__new__(ShardedState))
    assert layer.experts.placement == order


def in_turn(right: Any) -> Any:
    return lambda moving: [[each] for batch in right(moving) for each in batch]


def from_another(right: Any) -> Any:
    def send(making: Any, piece: Any, box: Any, target: int, first: int, end: int) -> None:
        own = [h for h in piece.holders if h.rank == target and h.first <= first < h.end]
        others = [h for h in piece.holders if h.rank != target and h.first <= first < h.end]
        left = [h for h in piece.holders if not (others and h in own)]
        right(making, piece._replace(holders=tuple(left)), box, target, first, end)

    return send


def to_the_first(right: Any) -> Any:
    def found(*given: Any) -> Any:
        return [replace(box, held=replace(box.held, offset=0)) for box in right(*given)]

    return found


def only_on_meta(right: Any) -> Any:
    def written(layer: Any) -> None:
        if "w13" not in layer._modules or next(layer.w13.parameters()).is_meta:
            right(layer)

    return written


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "an expert is written where another has to be sent from": (
        RankTransfer, "parameters", in_turn,
    ),
    "the table is that of the places before": (PlacedExperts, "_write_places", only_on_meta),
    "updates go to the places before": (
        BasevLLMParameter, "place_experts",
        lambda right: lambda parameter, experts: parameter.is_meta and right(parameter, experts),
    ),
    "a rank takes from another one what it has": (transfer._Making, "_send", from_another),
    "every expert lies in the first place": (moving, "boxes_on", to_the_first),
    "what is computed from the weights stays": (
        worker_experts, "vLLMModule", lambda right: PlacedExperts,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault in the running code, some rank holds or receives something else."""
    owner, name, faulty = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty(getattr(owner, name)))
    monkeypatch.setitem(globals(), "LIMIT", 1)

    def several() -> None:
        for seed in range(5):
            check("per expert, fp8_per_tensor", 2, 8, random.Random(seed))

    with pytest.raises((AssertionError, RankError)):
        several()
