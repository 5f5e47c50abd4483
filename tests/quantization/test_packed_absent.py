"""What files of packed weights leave out, or store in other integers."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.distributed import run_ranks
from vllm_module.errors import MissingWeightError, WeightReadError
from vllm_module.layers import FusedMoE, MergedColumnParallelLinear, RowParallelLinear
from vllm_module.quantization.packed import COMPRESSED_TENSORS, GPTQ, PackedMethod
from vllm_module.weights import open_checkpoint

packing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("packing.py"))))
METHOD = PackedMethod(GPTQ, 4, 32, symmetric=False)
Tensors = dict[str, torch.Tensor]


def merged(method: PackedMethod = METHOD) -> Any:
    layer = MergedColumnParallelLinear(64, [32, 32], False, shard_names=["a", "b"])
    layer.quantize(method)
    return layer


def of_slots(layers: dict[str, Any]) -> Tensors:
    return {f"{slot}.{n}": t for slot, made in layers.items() for n, t in made.stored.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_groups_that_are_in_order_may_be_left_out(size: int, tmp_path: Path) -> None:
    """A file without ``g_idx`` has the weights of one with it, read by name or as a stream."""
    layers = {slot: packing.gptq(32, 64, seed=seed) for seed, slot in enumerate("ab")}
    stored = {name: t for name, t in of_slots(layers).items() if "g_idx" not in name}
    save_file(stored, tmp_path / "model.safetensors")

    def work(rank: int) -> None:
        layer, whole = merged(), merged()
        whole.load_weights(of_slots(layers))
        with open_checkpoint(tmp_path) as checkpoint:
            assert layer.plan_weights(checkpoint).report.ok
            layer.load_weights(checkpoint)
        for _ in range(2):
            for name, parameter in whole.named_parameters():
                assert torch.equal(layer.get_parameter(name), parameter)
            assert torch.equal(layer(torch.eye(64)), whole(torch.eye(64)))
            layer.sleep()
            layer.load_weights(stored.items())
        layer.update_weights({"a.qweight": stored["a.qweight"]})
        row: Any = RowParallelLinear(64, 32, bias=False)
        row.quantize(METHOD)
        row.load_weights({n: t for n, t in layers["a"].stored.items() if n != "g_idx"})
        expected = torch.arange(64).int().view(size, -1)[rank] // 32
        assert torch.equal(row.g_idx, expected)

    run_ranks(size, work)


def test_some_experts_may_have_them() -> None:
    """Each slot that a file lacks is filled, and those that it has are checked."""
    moe: Any = FusedMoE(2, 1, 64, 32)
    for each in (moe.w13, moe.w2):
        each.quantize(METHOD)
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    stored = of_slots({f"{e}.{n}": packing.gptq(*s) for e in range(2) for n, s in shapes.items()})
    lacking = {n: t for n, t in stored.items() if n == "1.up_proj.g_idx" or "g_idx" not in n}
    moe.load_weights(lacking)
    assert torch.equal(moe.w13.g_idx, (torch.arange(64).int() // 32).expand(2, 2, 64).flatten(1))
    lacking["1.up_proj.g_idx"] = lacking["1.up_proj.g_idx"].flip(0)
    with pytest.raises(WeightReadError, match=r"g_idx \(slot '1.up_proj'\) is another one"):
        moe.load_weights(lacking)
    lacking["1.gate_proj.g_idx"] = lacking["1.up_proj.g_idx"]
    with pytest.raises(WeightReadError, match=r"g_idx \(slot '1.gate_proj'\) has groups in an"):
        moe.load_weights(lacking)


def test_groups_in_another_order_are_needed() -> None:
    """Where ``desc_act`` is set, a missing ``g_idx`` is refused, and so are other tensors."""
    order = packing.act_order(64, 32)
    made = packing.gptq(32, 64, order=order).stored
    layer: Any = RowParallelLinear(64, 32, bias=False)
    layer.quantize(PackedMethod(GPTQ, 4, 32, symmetric=False, act_order=True))
    with pytest.raises(MissingWeightError, match="g_idx"):
        layer.load_weights({name: t for name, t in made.items() if name != "g_idx"})
    with pytest.raises(MissingWeightError, match="qzeros"):
        merged().load_weights(
            {
                n: t
                for n, t in of_slots({"a": packing.gptq(32, 64), "b": packing.gptq(32, 64)}).items()
                if n != "b.qzeros"
            }
        )


@pytest.mark.parametrize("size", [1, 2])
def test_a_shape_of_32_bits(size: int, tmp_path: Path) -> None:
    """Kimi-K2 stores ``weight_shape`` as int32; it is read and compared all the same."""
    made = {slot: packing.by_compressed_tensors(torch.randn(32, 64)) for slot in "ab"}
    stored = {n: t.int() if "shape" in n else t for n, t in of_slots(made).items()}
    save_file(stored, tmp_path / "model.safetensors")

    def work(rank: int) -> None:
        layer = merged(PackedMethod(COMPRESSED_TENSORS, 4, 32))
        with open_checkpoint(tmp_path) as checkpoint:
            layer.load_weights(checkpoint)
        assert layer.weight_shape.dtype == torch.int64
        assert layer.weight_shape.tolist() == [32, 64, 32, 64]
        wrong = stored | {"b.weight_shape": torch.tensor([32, 65], dtype=torch.int32)}
        with pytest.raises(WeightReadError, match=r"weight_shape \(slot 'b'\) has \[32, 65\]"):
            layer.load_weights(wrong)

    run_ranks(size, work)
