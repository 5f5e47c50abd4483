"""Packed layers of published layouts mean what their formulas say, element by element."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.layers import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    MLAUpProjection,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_module.quantization.packed import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_OF_WORDS,
    GPTQ_V2,
    PackedMethod,
)
from vllm_module.quantization.stored_rules import GPTQConfig

packing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("packing.py"))))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Tensors = dict[str, torch.Tensor]


def loaded(method: PackedMethod, layer: Any, weights: Tensors) -> Any:
    layer.quantize(method)
    layer.load_weights(weights)
    return layer


def linear(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> ReplicatedLinear:
    return ReplicatedLinear(columns, rows, False, params_dtype=dtype)


def assert_means(layer: Any, weight: torch.Tensor) -> None:
    """Check the weight, bit by bit, and the product with it."""
    dtype = layer.params_dtype
    assert torch.equal(layer.quant_method.full_precision(layer), weight.float().to(dtype))
    x = torch.randn(3, weight.shape[1]).to(dtype)
    expected = F.linear(x.double(), weight.float().to(dtype).double())
    within = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(
        layer(x).double(), expected, rtol=0, atol=within * expected.abs().max()
    )


@pytest.mark.parametrize("layout", [GPTQ, GPTQ_OF_WORDS, GPTQ_V2], ids=["v1", "words", "v2"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, symmetric: bool, layout: Any) -> None:
    """GPTQ of all bits, with zeros or without, and of each version of zeros."""
    for group, dtype in zip((32, None, 64), DTYPES, strict=True):
        made = packing.gptq(32, 96, bits, group, symmetric=symmetric, v2=layout is GPTQ_V2)
        method = PackedMethod(layout, bits, group, symmetric)
        assert_means(loaded(method, linear(32, 96, dtype), made.stored), made.weight)


def test_gptq_in_activation_order() -> None:
    """With ``desc_act``, the scale of an input is that of its group, wherever it is."""
    order = packing.act_order(64, 16)
    made = packing.gptq(32, 64, 4, 16, order=order)
    method = PackedMethod(GPTQ, 4, 16, symmetric=False, act_order=True)
    assert_means(loaded(method, linear(32, 64), made.stored), made.weight)
    ordered = packing.gptq(32, 64, 4, 16)  # of static groups
    assert_means(loaded(method, linear(32, 64), ordered.stored), ordered.weight)


def zeros_of(method: PackedMethod, stored: Tensors) -> torch.Tensor:
    """Return the zeros ``[output, groups]`` that a layer reads from ``stored``."""
    return loaded(method, linear(32, 64), stored).zeros_for_matmul


def drawn_zeros(bits: int) -> torch.Tensor:
    """Return zeros ``[groups, output]``, many of which are 0, also beside each other."""
    zeros = torch.randint(0, 1 << bits, (2, 32), generator=torch.Generator().manual_seed(bits))
    zeros[:, 5:9] = zeros[:, 20::3] = 0
    return zeros


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_of_zero_wraps_in_the_first_version(bits: int) -> None:
    """AutoGPTQ reads each zero of version 1 by itself: the largest code stands for 0."""
    made, zeros = packing.gptq(32, 64, bits, 32), drawn_zeros(bits)
    stored = made.stored | {"qzeros": packing.packed_rows((zeros - 1) % (1 << bits), bits)}
    read = zeros_of(PackedMethod(GPTQ, bits, 32, symmetric=False), stored)
    assert torch.equal(read.T, zeros.to(torch.uint8))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_of_zero_borrows_in_files_of_gptqmodel(bits: int) -> None:
    """GPTQModel takes one from all zeros of a word at once, and of three bits from each one."""
    made, zeros = packing.gptq(32, 64, bits, 32), drawn_zeros(bits)
    words = packing.packed_rows(zeros, bits)
    if bits == 3:
        words = packing.packed_rows((zeros - 1) % 8, 3)
    else:
        ones = sum(1 << place for place in range(0, 32, bits))
        words = torch.tensor(
            [[((word - ones + (1 << 31)) % (1 << 32)) - (1 << 31) for word in row]
             for row in words.tolist()], dtype=torch.int32,
        )  # fmt: skip
    stored = made.stored | {"qzeros": words}
    read = zeros_of(PackedMethod(GPTQ_OF_WORDS, bits, 32, symmetric=False), stored)
    assert torch.equal(read.T, zeros.to(torch.uint8))
    if bits != 3:
        other = zeros_of(PackedMethod(GPTQ, bits, 32, symmetric=False), stored)
        assert not torch.equal(other, read)


@pytest.mark.parametrize(
    ("meta", "layout"),
    [
        ({"quantizer": ["optimum:1.23.3", "gptqmodel:1.4.0"]}, GPTQ_OF_WORDS),
        ({"quantizer": "gptqmodel:0.9.1"}, GPTQ_OF_WORDS),
        ({"quantizer": ["auto_gptq:0.7.1", 3]}, GPTQ),
        ({"quantizer": None}, GPTQ),
        (["gptqmodel"], GPTQ),
        (None, GPTQ),
    ],
)
def test_the_configuration_says_who_wrote_the_zeros(meta: Any, layout: Any) -> None:
    """Files of GPTQModel have words that borrow; where nobody is named, zeros are by themselves."""
    stored = {"bits": 4, "group_size": 32, "sym": False, "meta": meta}
    assert GPTQConfig.read(stored).rules[-1][1].format == layout
    for second in ("gptq_v2", "gptq_p"):
        read = GPTQConfig.read(stored | {"checkpoint_format": second})
        assert read.rules[-1][1].format == GPTQ_V2


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_in_one_plane_are_the_words_of_the_second_version(bits: int) -> None:
    """GPTQModel's ``gptq_p``: 32 codes are as many words as they have bits, low plane first."""
    codes = torch.randint(0, 1 << bits, (64,), generator=torch.Generator().manual_seed(bits))
    planes: list[int] = []
    for block in codes.view(2, 32).tolist():
        for word in range(bits):  # one plane, of as many bits as a code has
            kept = block[word * (32 // bits) : (word + 1) * (32 // bits)]
            planes.append(sum(code << (bits * place) for place, code in enumerate(kept)))
    assert [word % (1 << 32) for word in packing.words_of(codes.tolist(), bits)] == planes


def test_awq() -> None:
    """AWQ packs along the output, and in an order of its own."""
    for rows, group, dtype in zip((8, 24, 40), (32, None, 64), DTYPES, strict=True):
        made = packing.awq(rows, 128, group)
        method = PackedMethod(AWQ, 4, group, symmetric=False)
        assert_means(loaded(method, linear(rows, 128, dtype), made.stored), made.weight)


@pytest.mark.parametrize("order", [None, packing.AWQ_COLUMNS], ids=["none", "the inverse"])
def test_awq_in_another_order_would_show(order: tuple[int, ...] | None) -> None:
    """Without AWQ's order, or with its inverse, the weight is another one."""
    made = packing.awq(24, 128)
    method = PackedMethod(AWQ._replace(order=order), 4, 32, symmetric=False)
    layer = loaded(method, linear(24, 128), made.stored)
    assert not torch.equal(layer.quant_method.full_precision(layer), made.weight.float())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors(bits: int, symmetric: bool) -> None:
    """What compressed-tensors packs means what it unpacks."""
    for group in (32, None):
        made = packing.by_compressed_tensors(torch.randn(64, 96), bits, group, symmetric)
        method = PackedMethod(COMPRESSED_TENSORS, bits, group, symmetric)
        assert_means(loaded(method, linear(64, 96), made.stored), made.weight)


def test_compressed_tensors_in_activation_order() -> None:
    """``weight_g_idx`` of older checkpoints is the group of each input, as in GPTQ."""
    made = packing.by_compressed_tensors(torch.randn(32, 64), 4, 16, symmetric=True)
    scale, order = made.stored["weight_scale"], packing.act_order(64, 16)
    codes = (made.weight / scale.repeat_interleave(16, 1)).round()
    method = PackedMethod(COMPRESSED_TENSORS, 4, 16, act_order=True)
    layer = loaded(method, linear(32, 64), made.stored | {"weight_g_idx": order})
    assert_means(layer, codes * scale[:, order])


# Over ranks

KINDS: dict[str, tuple[PackedMethod, Callable[..., Any]]] = {
    "gptq": (PackedMethod(GPTQ, 4, 32, symmetric=False), packing.gptq),
    "gptq 3 bits": (
        PackedMethod(GPTQ, 3, 32, symmetric=False),
        lambda rows, columns, **more: packing.gptq(rows, columns, 3, **more),
    ),
    "gptq symmetric": (
        PackedMethod(GPTQ, 4, None, symmetric=True),
        lambda rows, columns, **more: packing.gptq(
            rows, columns, group=None, symmetric=True, **more
        ),
    ),
    "gptq in activation order": (
        PackedMethod(GPTQ_V2, 4, 32, symmetric=False, act_order=True),
        lambda rows, columns, **more: packing.gptq(
            rows, columns, v2=True, order=packing.act_order(columns, 32), **more
        ),
    ),
    "awq": (PackedMethod(AWQ, 4, 32, symmetric=False), packing.awq),
}


@pytest.mark.parametrize(("kind", "size"), [*product(KINDS, (1, 2, 4))])
def test_ranks_hold_the_cut_of_the_whole(kind: str, size: int) -> None:
    """Each rank's weight is its cut of the whole, bit by bit, and the ranks' product the whole's.

    The layers are a fused one that is cut by output, and one that is cut by input.
    """
    method, make = KINDS[kind]
    gate, up, down = make(128, 64, seed=1), make(128, 64, seed=2), make(64, 128, seed=3)
    x = torch.randn(2, 64)

    def work(rank: int) -> torch.Tensor:
        fused = MergedColumnParallelLinear(
            64, [128, 128], False, gather_output=True, shard_names=["gate", "up"]
        )
        stored = {
            f"{slot}.{name}": tensor
            for slot, made in (("gate", gate), ("up", up))
            for name, tensor in made.stored.items()
        }
        loaded(method, fused, stored)
        parts = [made.weight.chunk(size)[rank] for made in (gate, up)]
        assert torch.equal(fused.quant_method.full_precision(fused), torch.cat(parts).float())
        row = loaded(method, RowParallelLinear(128, 64, False), down.stored)
        part = down.weight.chunk(size, 1)[rank]
        assert torch.equal(row.quant_method.full_precision(row), part.float())
        y = fused(x)
        assert "weight=" in repr(fused)
        return row(y[:, :128].chunk(size, 1)[rank])

    expected = F.linear(F.linear(x.double(), gate.weight), down.weight)
    for computed in run_ranks(size, work):
        torch.testing.assert_close(computed.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "rows", "named"),
    [
        (3, 96, "shard of 48 features (96 in 2 parts) ends inside a run of 3 elements of 32"),
        (4, 24, "shard of 12 features (24 in 2 parts) ends inside a packed element of 8"),
    ],
)
def test_zeros_that_share_a_word_are_not_cut(bits: int, rows: int, named: str) -> None:
    """Rows whose zeros are in a word of two ranks are refused with the numbers."""
    with tensor_parallel(rank=0, size=2):
        layer = ColumnParallelLinear(64, rows, False)
        with pytest.raises(ShardingError) as refused:
            layer.quantize(PackedMethod(GPTQ, bits, 32, symmetric=False))
        assert named in str(refused.value)
        # Symmetric ones of compressed-tensors have no zeros, and may be cut between any rows.
        layer.quantize(PackedMethod(COMPRESSED_TENSORS, bits, 32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_experts(kind: str, size: int) -> None:
    """Experts are routed by name, cut as other layers, and multiplied one by one."""
    method, make = KINDS[kind]
    experts, hidden, inner = 3, 32, 64
    made = {
        f"{e}.{name}": make(*shape, seed=10 * e + at)
        for e in range(experts)
        for at, (name, shape) in enumerate(
            {
                "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
                "down_proj": (hidden, inner),
            }.items()
        )
    }  # fmt: skip
    stored = {f"{layer}.{n}": t for layer, each in made.items() for n, t in each.stored.items()}
    x, logits = torch.randn(5, hidden), torch.randn(5, experts)
    logits[:, 1] = -1e4  # no token goes to this one

    def work(rank: int) -> torch.Tensor:
        moe = FusedMoE(experts, 2, hidden, inner)
        for layer in (moe.w13, moe.w2):
            layer.quantize(method)
        moe.load_weights(stored)
        wide = moe.w2.quant_method.full_precision(moe.w2)
        for e in range(experts):
            part = made[f"{e}.down_proj"].weight.chunk(size, 1)[rank]
            assert torch.equal(wide[e], part.float())
        return moe(x, logits)

    weights, chosen = logits.double().softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    expected = torch.zeros(5, hidden, dtype=torch.float64)
    for token, (ws, es) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for w, e in zip(ws, es, strict=True):
            gate, up, down = (made[f"{e}.{n}_proj"].weight for n in ("gate", "up", "down"))
            row = x[token].double()
            expected[token] += w * (down @ (F.silu(gate @ row) * (up @ row)))
    for computed in run_ranks(size, work):
        torch.testing.assert_close(computed.double(), expected, rtol=1e-4, atol=1e-5)


def test_an_update_changes_a_slot_in_place() -> None:
    """New words and zeros of one slot are in the next product; the memory stays."""
    method, make = KINDS["gptq"]
    gate, up, other = make(64, 64, seed=1), make(64, 64, seed=2), make(64, 64, seed=3)
    layer = MergedColumnParallelLinear(64, [64, 64], False, shard_names=["gate", "up"])
    stored = {f"gate.{n}": t for n, t in gate.stored.items()}
    loaded(method, layer, stored | {f"up.{n}": t for n, t in up.stored.items()})
    tensors = (*layer.parameters(), *layer.buffers())
    memory = [tensor.data_ptr() for tensor in tensors]
    layer.update_weights({f"up.{n}": t for n, t in other.stored.items() if n != "g_idx"})
    assert [t.data_ptr() for t in (*layer.parameters(), *layer.buffers())] == memory
    expected = torch.cat([gate.weight, other.weight]).float()
    assert torch.equal(method.full_precision(layer), expected)


def test_a_plan_of_another_rank_counts_its_buffers() -> None:
    """A plan of rank 1 of 2, made on rank 0, has the memory that rank 1 takes."""
    method, make = KINDS["gptq"]
    made = make(128, 64)
    memory = {}
    for rank in (0, 1):
        with tensor_parallel(rank=rank, size=2):
            layer = ColumnParallelLinear(64, 128, False)
            layer.quantize(method)
            plan = layer.plan_weights(made.stored)
            memory[rank] = plan.memory(), plan.of_rank(1 - rank).memory()
    assert memory[0] == memory[1][::-1]
    held = memory[0][0].model
    # Words, zeros twice (four bits, then eight), scales in float32, and groups.
    assert held == 64 * 64 // 2 + 64 * 2 // 2 + 64 * 2 + 64 * 2 * 4 + 64 * 4


@pytest.mark.parametrize("size", [1, 2])
def test_slots_that_are_stored_as_one(size: int) -> None:
    """A fused tensor of a checkpoint is cut by slot and by rank; its inputs have one order."""
    order = packing.act_order(64, 16)
    made = packing.gptq(96, 64, 4, 16, order=order)
    method = PackedMethod(GPTQ, 4, 16, symmetric=False, act_order=True)

    def work(rank: int) -> None:
        layer = MergedColumnParallelLinear(64, [64, 32], False, shard_names=None)
        loaded(method, layer, made.stored)
        parts = [slot.chunk(size)[rank] for slot in made.weight.split([64, 32])]
        assert torch.equal(method.full_precision(layer), torch.cat(parts).float())

    run_ranks(size, work)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [64, 128, 1 << 70])
def test_a_group_of_all_inputs(size: int, ranks: int) -> None:
    """A group may be as large as the layer, or larger by any number: its inputs may be cut."""
    made = packing.gptq(32, 64, 4, None)
    method, x = PackedMethod(GPTQ, 4, size, symmetric=False), torch.randn(3, 64)

    def work(rank: int) -> torch.Tensor:
        layer = loaded(method, RowParallelLinear(64, 32, False), made.stored)
        part = made.weight.chunk(ranks, 1)[rank]
        assert torch.equal(method.full_precision(layer), part.float())
        return layer(x.chunk(ranks, 1)[rank])

    for computed in run_ranks(ranks, work):
        expected = F.linear(x.double(), made.weight)
        torch.testing.assert_close(computed.double(), expected, rtol=0, atol=1e-4)


def test_latent_attention_takes_the_weight_apart() -> None:
    """A layer that needs its weight in full precision gets it once it is loaded."""
    made = packing.awq(2 * (8 + 8), 64)
    layer = MLAUpProjection(64, 2, 8, 8)
    loaded(PackedMethod(AWQ, 4, 32, symmetric=False), layer, made.stored)
    w_uk, w_uv = layer.absorbed()
    heads = made.weight.float().view(2, 16, 64)
    assert torch.equal(w_uk, heads[:, :8])
    assert torch.equal(w_uv, heads[:, 8:].transpose(1, 2))
