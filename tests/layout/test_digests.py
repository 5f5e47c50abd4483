"""Digests of models: the same on any ranks, and every planted fault of a transfer changes them."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.core import digests
from vllm_module.core.digests import ModelDigest, digest_of
from vllm_module.core.layout_of import layout_of_module
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.errors import WeightReadError
from vllm_module.kernels.digest.digest import Digest, digest_box
from vllm_module.layers import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from vllm_module.quantization import EightBitMethod, Scheme
from vllm_module.testing import random_weights
from vllm_module.weights.changes import find_changes

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))

SCHEME = Scheme("block", block=(4, 4), scale_name="weight_scale_inv")


class Layer(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8)
        self.qkv_proj = QKVParallelLinear(8, 2, 4, 2, bias=True)
        self.o_proj = RowParallelLinear(8, 8, bias=False)
        self.gate_up_proj = MergedColumnParallelLinear(
            8, [12, 12], bias=False, shard_names=["gate_proj", "up_proj"]
        )
        self.experts = FusedMoE(num_experts=6, top_k=2, hidden_size=8, intermediate_size=4)
        self.small = ColumnParallelLinear(8, 32, bias=False)
        self.small.quantize(EightBitMethod(SCHEME))


class Model(vLLMModule):
    """Every way to be cut: rows, columns, shared heads, whole experts, padding, scales, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(10, 8)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("table", torch.zeros(6))
        self.head = ParallelLMHead(10, 8)


def build(rank: int, size: int) -> Model:
    with tensor_parallel(rank=rank, size=size), expert_parallel(rank=rank, size=size):
        return Model()


WEIGHTS = random_weights(build(0, 1).expected_weights(), seed=1)
OLD = random_weights(build(0, 1).expected_weights(), seed=2)


def loaded(size: int, weights: dict[str, torch.Tensor] = WEIGHTS) -> list[Model]:
    models = [build(rank, size) for rank in range(size)]
    for model in models:
        model.load_weights(weights)
    return models


def total(models: list[Model]) -> ModelDigest:
    return sum((digest_of(model) for model in models), start=ModelDigest())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_digest_is_that_of_the_checkpoint(size: int) -> None:
    """Any number of ranks gives each tensor the digest of the whole, in any order of names."""
    models = [build(rank, size) for rank in range(size)]
    for model in models:
        model.load_weights(dict(reversed(WEIGHTS.items())))
    expected = {name: digest_box(tensor).hex for name, tensor in WEIGHTS.items()}
    assert total(models).tensors == expected
    assert total(models) == total(loaded(1))
    assert total(models).hex == total(loaded(1)).hex


def test_a_part_of_the_ranks_has_no_digest() -> None:
    """The message says how much is there, and what to do."""
    with pytest.raises(ValueError, match="elements: add those of the other ranks"):
        _ = digest_of(loaded(2)[0]).tensors


def test_an_update_changes_only_what_it_updates() -> None:
    """In any order and in parts, an update gives the digest of a fresh load."""
    models, expected = loaded(2, OLD), total(loaded(2))
    names = sorted(WEIGHTS, key=lambda name: hash(name) % 97)
    for part in (names[::2], names[1::2]):
        before = total(models)
        for model in models:
            model.update_weights([(name, WEIGHTS[name]) for name in part])
        assert set(total(models).differences(before)) <= set(part)
    assert total(models) == expected
    assert total(models).differences(expected.tensors) == []


def test_elements_that_were_sent_alone_have_no_digest_of_what_was_read() -> None:
    """What a cast tensor was read from is not what it holds once some elements are others."""
    model = build(0, 1)
    model.keep_digests = True
    stored = {n: t.bfloat16() if t.dtype == torch.float32 else t for n, t in WEIGHTS.items()}
    layout = model.plan_weights(stored).layout()
    model.load_weights(stored)
    expected = {name: digest_box(tensor).hex for name, tensor in stored.items()}
    assert digest_of(model, layout).tensors == expected
    names = [n for n in sorted(stored) if ".o_proj." in n or ".k_proj." in n or ".norm." in n]
    assert len(names) == 8
    for name in names:
        old = stored[name].float()
        new = old.clone()
        new.view(-1)[1::3] += 1
        model.update_weights({name: find_changes(old, new)})
        expected[name] = digest_box(new).hex
        assert digest_of(model, layout).tensors == expected


def test_digests_of_some_names_are_of_these_alone() -> None:
    """So they are of tied tensors, whichever of the two names is asked for."""
    model = Model()
    model.head.tie_weights(model.embed)
    tied = {**WEIGHTS, "head.weight": WEIGHTS["embed.weight"]}
    layout = model.plan_weights(tied).layout()
    model.load_weights(tied)
    whole = digest_of(model, layout).tensors
    assert len(whole) == len(tied)
    for names in ([], ["embed.weight"], ["head.weight"], ["head.weight", "table"], list(tied)):
        found = digest_of(model, layout, names).tensors
        assert found == {name: whole[name] for name in names}


def test_a_model_without_values_is_named() -> None:
    with pytest.raises(WeightReadError, match="holds no values: load"):
        digest_of(build(0, 1))
    with pytest.raises(WeightReadError, match=r"embed\.weight: the layout has \[64, 8\]"):
        digest_of(loaded(2)[0], layout_of_module(build(0, 1)))


class Ranks:
    """The loaded models of all ranks, and what each holds of a checkpoint tensor."""

    def __init__(self, size: int) -> None:
        self.models, self.old = loaded(size), loaded(size, OLD)
        self.layout = layout_of_module(self.models[0])

    def held(self, name: str, rank: int, *, old: bool = False) -> torch.Tensor:
        """Return the memory of a rank's part of a tensor."""
        entry, expert = self.layout.find(name)
        model: Any = (self.old if old else self.models)[rank]
        parameter = dict(model.named_parameters()) | dict(model.named_buffers())
        (box,) = [b for ranks, b in self.layout.held_by(entry, expert) if rank in ranks]
        memory = parameter[entry.parameter].detach()
        return memory.as_strided(box.held.shape, box.held.strides, box.held.offset)


Q, K, V = (f"layers.0.{name}_proj.weight" for name in "qkv")
OUT, GATE, UP = "layers.0.o_proj.weight", "layers.0.gate_proj.weight", "layers.0.up_proj.weight"
SMALL, SCALE = "layers.0.small.weight", "layers.0.small.weight_scale_inv"
TABLE, NORM, EMBED, HEAD = "table", "layers.0.norm.weight", "embed.weight", "head.weight"


def expert(number: int, name: str) -> str:
    return f"layers.0.experts.{number}.{name}_proj.weight"


def put(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values.clone())


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the bits; values of 8 bits are bytes."""
    return tensor.view({1: torch.uint8, 4: torch.int32}[tensor.dtype.itemsize])


def both(ranks: Ranks, name: str, change: Callable[[torch.Tensor], object]) -> None:
    for rank in range(len(ranks.models)):
        change(ranks.held(name, rank))


def pairs_in_the_wrong_order(tensor: torch.Tensor) -> None:
    put(tensor, torch.cat([tensor[0::2], tensor[1::2]]))


def opposite_errors(tensor: torch.Tensor) -> None:
    values = bits(tensor)
    values[0, 0] += 16
    values[-1, -1] -= 16


Fault = tuple[list[str], Callable[[Ranks], object]]


def of_last_version(ranks: Ranks, name: str, rank: int, part: Any = ...) -> None:
    """Put back what an update should have replaced, or the part of it."""
    put(ranks.held(name, rank)[part], ranks.held(name, rank, old=True)[part])


def bytes_reversed(tensor: torch.Tensor) -> None:
    values = tensor.view(torch.uint8).unflatten(-1, (-1, 4))
    put(values, values.flip(-1))


def alternating(ranks: Ranks) -> None:
    gate, up = (ranks.held(expert(0, name), 0) for name in ("gate", "up"))
    rows = torch.cat([gate, up])
    put(gate, rows[0::2])
    put(up, rows[1::2])


def shifted(ranks: Ranks) -> None:
    for number in (0, 1):
        swap(*(ranks.held(expert(each, "up"), 0) for each in (number, number + 1)))


def of_layer_1(ranks: Ranks, name: str, change: Callable[..., object]) -> None:
    for rank in range(2):
        change(ranks.held(name, rank), ranks.held(name.replace("0", "1", 1), rank))


FAULTS: dict[str, Fault] = {
    "a shard is missed": ([Q], lambda r: r.held(Q, 1).zero_()),
    "a shard is of the last version": ([OUT], lambda r: of_last_version(r, OUT, 1)),
    "two slots are swapped": ([K, V], lambda r: swap(r.held(K, 0), r.held(V, 0))),
    "two slots are swapped on all ranks": (
        [GATE, UP], lambda r: [swap(r.held(GATE, i), r.held(UP, i)) for i in range(2)],
    ),
    "a slot has another slot's values": ([UP], lambda r: put(r.held(UP, 0), r.held(GATE, 0))),
    "rows are shifted by one": ([Q], lambda r: put(r.held(Q, 0), r.held(Q, 0).roll(1, 0))),
    "columns are shifted by one": ([OUT], lambda r: put(r.held(OUT, 0), r.held(OUT, 0).roll(1, 1))),
    "all elements are shifted by one": (
        [EMBED], lambda r: put(r.held(EMBED, 0), r.held(EMBED, 0).flatten().roll(1).view(10, 8)),
    ),
    "a rank has the other rank's rows": ([GATE], lambda r: put(r.held(GATE, 1), r.held(GATE, 0))),
    "a rank has the other rank's columns": ([OUT], lambda r: put(r.held(OUT, 0), r.held(OUT, 1))),
    "two ranks have each other's rows": ([UP], lambda r: swap(r.held(UP, 0), r.held(UP, 1))),
    "two ranks have each other's columns": ([OUT], lambda r: swap(r.held(OUT, 0), r.held(OUT, 1))),
    "an update is torn": ([Q], lambda r: of_last_version(r, Q, 0, slice(2))),
    "an update lacks its last row": ([K], lambda r: of_last_version(r, K, 1, -1)),
    "an update lacks its first column": (
        [OUT], lambda r: of_last_version(r, OUT, 1, (slice(None), 0)),
    ),
    "an update lacks one element": ([V], lambda r: of_last_version(r, V, 0, (1, 3))),
    "a difference is added twice": (
        [Q], lambda r: r.held(Q, 1).add_(r.held(Q, 1) - r.held(Q, 1, old=True)),
    ),
    "a square block is transposed": (
        [UP], lambda r: put(r.held(UP, 0)[:4, :4], r.held(UP, 0)[:4, :4].T),
    ),
    "a rank's part is transposed": ([Q], lambda r: put(r.held(Q, 0)[:, :4], r.held(Q, 0)[:, :4].T)),
    "scales are of another block": (
        [SCALE], lambda r: put(r.held(SCALE, 0)[0, 0], r.held(SCALE, 0)[1, 0]),
    ),
    "two blocks have each other's scales": (
        [SCALE], lambda r: put(r.held(SCALE, 1), r.held(SCALE, 1).flip(1)),
    ),
    "scales are of the last version": (
        [SCALE], lambda r: of_last_version(r, SCALE, 0),
    ),
    "quantized values are of the last version": (
        [SMALL], lambda r: put(bits(r.held(SMALL, 1)), bits(r.held(SMALL, 1, old=True))),
    ),
    "quantized values are signed integers": (
        [SMALL], lambda r: put(bits(r.held(SMALL, 0)), bits(r.held(SMALL, 0)) ^ 0x80),
    ),
    "halves of a head are in the wrong order": (
        [Q], lambda r: both(r, Q, pairs_in_the_wrong_order),
    ),
    "rows are in the opposite order": ([K], lambda r: put(r.held(K, 0), r.held(K, 0).flip(0))),
    "two rows are swapped": ([EMBED], lambda r: swap(r.held(EMBED, 0)[2], r.held(EMBED, 0)[7])),
    "two columns are swapped": ([OUT], lambda r: swap(r.held(OUT, 0)[:, 1], r.held(OUT, 0)[:, 2])),
    "two elements are swapped": ([V], lambda r: swap(r.held(V, 1)[0, 1], r.held(V, 1)[1, 0])),
    "two errors add up to zero": ([GATE], lambda r: opposite_errors(r.held(GATE, 1))),
    "one bit is flipped": ([HEAD], lambda r: bits(r.held(HEAD, 0))[4, 4].bitwise_xor_(1)),
    "the sign bit is flipped": (
        [TABLE], lambda r: both(r, TABLE, lambda t: bits(t)[2].bitwise_xor_(-(2**31))),
    ),
    "values are rounded to 16 bits": (
        [Q], lambda r: put(r.held(Q, 0), r.held(Q, 0).bfloat16().float()),
    ),
    "values are cut off after 16 bits": (
        [OUT], lambda r: bits(r.held(OUT, 0)).bitwise_and_(-65536),
    ),
    "bytes are in the opposite order": (
        [K], lambda r: bytes_reversed(r.held(K, 1)),
    ),
    "an expert is of the last version": (
        [expert(1, "down")],
        lambda r: of_last_version(r, expert(1, "down"), 0),
    ),
    "an expert is its neighbour": (
        [expert(4, "gate")],
        lambda r: put(r.held(expert(4, "gate"), 1), r.held(expert(3, "gate"), 1)),
    ),
    "experts are shifted by one": (
        [expert(n, "up") for n in (0, 1, 2)], shifted,
    ),
    "gate and up of an expert are swapped": (
        [expert(2, "gate"), expert(2, "up")],
        lambda r: swap(r.held(expert(2, "gate"), 0), r.held(expert(2, "up"), 0)),
    ),
    "experts are on each other's rank": (
        [expert(0, "down"), expert(3, "down")],
        lambda r: swap(r.held(expert(0, "down"), 0), r.held(expert(3, "down"), 1)),
    ),
    "gate and up of an expert alternate": (
        [expert(0, "gate"), expert(0, "up")], alternating,
    ),
    "a bias is another slot's": (
        ["layers.0.k_proj.bias"],
        lambda r: put(r.held("layers.0.k_proj.bias", 0), r.held("layers.0.v_proj.bias", 0)),
    ),
    "a norm is another layer's": (
        [NORM], lambda r: of_layer_1(r, NORM, put),
    ),
    "two layers are swapped": (
        [OUT, "layers.1.o_proj.weight"],
        lambda r: of_layer_1(r, OUT, swap),
    ),
    "embeddings and head are swapped": (
        [EMBED, HEAD], lambda r: swap(r.held(EMBED, 0), r.held(HEAD, 0)),
    ),
    "a buffer is of the last version": (
        [TABLE], lambda r: both(r, TABLE, lambda t: put(t, OLD[TABLE])),
    ),
}  # fmt: skip


@cache
def of_two_ranks() -> ModelDigest:
    return total(Ranks(2).models)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_transfer_is_named(fault: str) -> None:
    """The digest differs in the tensors that the fault is in, and in no others."""
    ranks, expected = Ranks(2), of_two_ranks()
    names, plant = FAULTS[fault]
    with torch.no_grad():
        plant(ranks)
    assert total(ranks.models).differences(expected) == sorted(names)


def qkv(model: Model) -> torch.Tensor:
    layer: Any = model.layers[0]
    data: torch.Tensor = layer.qkv_proj.weight.data
    return data


REFUSED: dict[str, tuple[str, Callable[[list[Model]], object]]] = {
    "a copy differs": (NORM, lambda m: m[1].layers[0].norm.weight.data[3].add_(1)),
    "a shared head is another one": (
        K, lambda m: qkv(m[3])[2:4].copy_(qkv(m[0])[2:4]),
    ),
    "a buffer is missed on one rank": (TABLE, lambda m: m[2].table.zero_()),
    "padding is not zero": (EMBED, lambda m: m[3].embed.weight.data[-1, -1].fill_(1e-30)),
    "padding is a NaN": (HEAD, lambda m: m[0].head.weight.data[10, 0].fill_(float("nan"))),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_a_fault_that_no_sum_shows_is_refused_by_name(fault: str) -> None:
    """What ranks hold twice is compared, and padding is zero."""
    models = loaded(4)
    name, plant = REFUSED[fault]
    with torch.no_grad():
        plant(models)
    with pytest.raises(WeightReadError, match=name.replace(".", r"\.")):
        total(models)


def test_the_dtype_is_part_of_a_digest() -> None:
    """The same bits read as another dtype are another tensor."""
    tensor = torch.randn(4, 6).half()
    assert digest_box(tensor).sums == digest_box(tensor.view(torch.bfloat16)).sums
    assert digest_box(tensor).hex != digest_box(tensor.view(torch.bfloat16)).hex
    assert len(FAULTS) + len(REFUSED) + 1 >= 40


def test_shards_of_fsdp_in_processes_add_up(tmp_path: Path) -> None:
    """What DTensor says of each local shard gives the digest of the whole parameter."""
    script = Path(__file__).with_name("fsdp_shards.py")
    log = tmp_path / "log"
    assert SUPPORT["run_program"](script, tmp_path, log=log) == 0, log.read_text()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    trained = runpy.run_path(str(script))["trained"]()
    held = {name: [bool(rank[name]) for rank in ranks] for name in ranks[0]}
    assert [True, True] in held.values()
    for name, parameter in trained.named_parameters():
        digest = digest_box(parameter.detach())
        parts = [rank[name] for rank in ranks if rank[name]]
        sums = tuple(sum(part[at] for part in parts) % 2**64 for at in range(2))
        assert sums == digest.sums, name


@pytest.mark.parametrize("piece", [1, 7, 8, 20, 1 << 20])
def test_boxes_of_a_view_are_counted_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a piece, boxes add up to the digest of the whole tensor."""
    monkeypatch.setattr(digests, "_PIECE", piece)
    whole = torch.randn(4, 12)
    viewed = whole.view(6, 2, 4)
    total = Digest(whole.dtype, (4, 12))
    for first in (0, 3):
        for at in (0, 1):
            box = viewed[first : first + 3, at : at + 1]
            total += digests._of_elements(box, (first, at, 0), (6, 2, 4), (4, 12))
    assert total == digest_box(whole)


@pytest.mark.parametrize("place", [0, 1])
def test_copies_of_one_stored_scale_are_all_looked_at(place: int) -> None:
    """A checkpoint has one scale for a fused tensor, and the layer holds it once for each slot."""
    model = vLLMModule()
    model.fc = MergedColumnParallelLinear(32, [16, 16], False, shard_names=None)
    model.fc.quantize(EightBitMethod(Scheme("tensor")))
    weights = random_weights(model.expected_weights()) | {"fc.weight_scale": torch.tensor([0.5])}
    layout = model.plan_weights(weights).layout()
    model.load_weights(weights)
    expected = digest_box(weights["fc.weight_scale"]).hex
    assert model.digest(layout).tensors["fc.weight_scale"] == expected
    model.fc.weight_scale.data[place] *= 2
    with pytest.raises(WeightReadError, match=r"several copies of fc\.weight_scale, which differ"):
        model.digest(layout)
