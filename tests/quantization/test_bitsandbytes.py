"""Checkpoints that bitsandbytes quantized: their bytes are held, and mean what it says."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import build_model, read_config
from vllm_module.distributed import expert_parallel, run_ranks, tensor_parallel
from vllm_module.errors import WeightLoadError
from vllm_module.layers import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
)
from vllm_module.parameters import Dim, Slot
from vllm_module.quantization import QuantizableLayer, rules_for
from vllm_module.quantization.bitsandbytes import BitsAndBytes4BitMethod, BitsAndBytes8BitMethod
from vllm_module.testing.checkpoints import assert_same_state, state
from vllm_module.weights import open_checkpoint

bnb = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("bnb_checkpoints.py"))))

CASES = [
    *(("qwen3", kind) for kind in bnb.KINDS),
    *((model, kind) for model in ("llama", "phi3", "gpt2") for kind in ("nf4-nested", "int8")),
]
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def stored(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return the checkpoint of a model and kind; each is written once."""
    made: dict[Any, Any] = {}

    def get(model: str = "qwen3", kind: str = "nf4-nested") -> Any:
        if (model, kind) not in made:
            made[model, kind] = bnb.publish(tmp_path_factory.mktemp(kind), model, kind)
        return made[model, kind]

    return get


def load(folder: Path) -> Any:
    return get_model(model_config=ModelConfig(model=str(folder), dtype="float32"))


def unloaded(checkpoint: Any) -> Any:
    config = read_config(checkpoint.folder, ModelConfig(model=str(checkpoint.folder)))
    rules = rules_for(None, checkpoint.config["quantization_config"])
    return build_model(config, torch.float32, torch.device("cpu"), rules)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.compute_logits(model(ids, torch.arange(len(ids))))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.at_length), 4])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_rank_holds_its_part_of_what_bitsandbytes_multiplies_out(
    stored: Callable[..., Any], name: str, kind: str, size: int
) -> None:
    """Weights have the bits of the cut of the whole, int8 but for the last; logits agree."""
    checkpoint = stored(name, kind)

    def work(rank: int) -> None:
        model, plain = load(checkpoint.folder), load(checkpoint.plain)
        layers = 0
        for path, layer in model.named_modules():
            if not isinstance(layer, QuantizableLayer) or not layer.is_quantized:
                continue
            layers += 1
            got, expected = layer.quant_method.full_precision(layer), plain.get_submodule(path)
            if kind == "int8":  # 127 divides once for a channel, and theirs for each number
                torch.testing.assert_close(got, expected.weight.data, rtol=3e-7, atol=0)
            else:
                assert torch.equal(got, expected.weight.data), path
        assert layers == 4
        assert not model.lm_head.is_quantized
        got = logits(model, checkpoint.ids)
        torch.testing.assert_close(got, checkpoint.logits, rtol=0, atol=1e-4)

    run_ranks(size, work)


@pytest.mark.parametrize("kind", ["nf4-nested", "fp4", "int8"])
@pytest.mark.parametrize("way", ["stream", "reversed", "calls", "handles"])
def test_order_does_not_matter(stored: Callable[..., Any], kind: str, way: str) -> None:
    """Any order and division into calls gives the same bits, scales that are computed included."""
    checkpoint = stored("llama", kind)
    pairs = list(checkpoint.tensors.items())

    class Handle:
        """A handle that cannot be viewed in another shape."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

        def narrow(self, dim: int, start: int, length: int) -> Handle:
            return Handle(self.tensor.narrow(dim, start, length))

        def read_into(self, destination: torch.Tensor) -> None:
            destination.copy_(self.tensor)

        def read(self) -> torch.Tensor:
            return self.tensor

    with tensor_parallel(rank=1, size=2):
        expected, model = unloaded(checkpoint), unloaded(checkpoint)
    expected.load_weights(dict(pairs))
    if way == "stream":
        model.load_weights(iter(pairs))
    elif way == "reversed":
        model.load_weights(iter(pairs[::-1]))
    elif way == "calls":
        for first in range(3):
            model.update_weights(pairs[first::3])
    else:
        model.load_weights([(name, Handle(tensor)) for name, tensor in pairs])
    model.check_ready()
    assert_same_state(state(model), state(expected), way)


@pytest.mark.parametrize("kind", ["nf4-nested", "nf4", "int8"])
def test_an_update_keeps_the_memory(stored: Callable[..., Any], kind: str) -> None:
    """New tensors of one slot go into the same memory, and products are those of a fresh load."""
    checkpoint = stored("qwen3", kind)
    name = f"{ATTENTION}.k_proj"
    tensors, _ = bnb.quantized(torch.randn(128, 256), kind)
    changed = {f"{name}.{key}": tensor for key, tensor in tensors.items()}
    assert changed.keys() <= checkpoint.tensors.keys()

    def work(rank: int) -> None:
        model, fresh = unloaded(checkpoint), unloaded(checkpoint)
        model.load_weights(checkpoint.tensors)
        places = {path: t.data_ptr() for path, t in (*model.named_parameters(),)}
        places |= {path: t.data_ptr() for path, t in model.named_buffers()}
        before = logits(model, checkpoint.ids)
        model.update_weights(changed)
        fresh.load_weights(checkpoint.tensors | changed)
        now = dict(model.named_parameters()) | dict(model.named_buffers())
        assert places == {path: tensor.data_ptr() for path, tensor in now.items()}
        assert_same_state(state(model), state(fresh), "after an update")
        assert not torch.equal(before, logits(model, checkpoint.ids))

    run_ranks(2, work)


@pytest.mark.parametrize("kind", ["nf4-nested", "int8"])
def test_ranks_read_what_they_keep(stored: Callable[..., Any], kind: str) -> None:
    """Columns too are cut before they are read; a plan of another rank has that rank's memory."""
    checkpoint, size = stored("qwen3", kind), 4
    models = []
    for rank in range(size):
        with tensor_parallel(rank=rank, size=size):
            models.append(unloaded(checkpoint))
    with open_checkpoint(checkpoint.folder) as weights:
        plans = [model.plan_weights(weights) for model in models]
        assert all(plan.report.ok for plan in plans)
        for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"):
            read = sum(
                each.source.shape.numel()
                for plan in plans
                for each in plan.reads()
                if each.name == f"model.layers.0.{name}.weight"
            )
            assert read == checkpoint.tensors[f"model.layers.0.{name}.weight"].numel()
        for model, plan, rank in zip(models, plans, range(size), strict=True):
            assert plans[0].of_rank(rank).memory().model == plan.memory().model
            model.load_weights(weights)
            held = (*model.parameters(), *model.buffers())
            assert plan.memory().model == sum(tensor.nbytes for tensor in held)


def test_other_dtypes_round_as_bitsandbytes_does(stored: Callable[..., Any]) -> None:
    """In bfloat16 a weight is the product in float32, rounded once; casts leave codes alone."""
    checkpoint = stored("qwen3", "nf4-nested")
    model, plain = load(checkpoint.folder), load(checkpoint.plain)
    before = state(model)
    model.to(torch.bfloat16)
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizableLayer) and layer.is_quantized:
            wide = plain.get_submodule(path).weight.data.bfloat16()
            layer.params_dtype = torch.bfloat16
            assert torch.equal(layer.quant_method.full_precision(layer), wide)
            names = ("weight", "absmax", "quant_state", "scales", "codebook")
            for name in names:
                assert torch.equal(getattr(layer, name), before[f"{path}.{name}"])
    assert logits(model, checkpoint.ids).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["nf4-nested", "int8"])
def test_a_state_dict_is_taken_back(stored: Callable[..., Any], kind: str) -> None:
    """What is saved restores computed scales too, and full precision in its place is refused."""
    checkpoint = stored("qwen3", kind)
    model, other = load(checkpoint.folder), load(checkpoint.folder)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(saved)
    assert_same_state(state(other), state(model), "from a state dict")
    name = f"{ATTENTION}.qkv_proj.weight"
    with pytest.raises(RuntimeError, match="update_weights quantize"):
        other.load_state_dict(saved | {name: saved[name].float()})


@pytest.mark.parametrize("kind", ["nf4-nested", "fp4", "int8"])
@pytest.mark.parametrize("spread", [False, True])
def test_experts_are_multiplied_out(kind: str, spread: bool) -> None:
    """Experts that are stored one by one compute what full precision does, on two ranks."""
    torch.manual_seed(0)
    tensors, wide = {}, {}
    for expert in range(3):  # of which a rank that keeps whole ones has one or two
        for slot in ("gate_proj", "up_proj", "down_proj"):
            made, weight = bnb.quantized(torch.randn(128, 128) / 8, kind)
            tensors |= {f"{expert}.{slot}.{key}": tensor for key, tensor in made.items()}
            wide[f"{expert}.{slot}.weight"] = weight
    x, scores = torch.randn(5, 128), torch.randn(5, 3)
    nested = kind == "nf4-nested"
    method: Any = BitsAndBytes8BitMethod()
    if kind != "int8":
        method = BitsAndBytes4BitMethod(kind[:3], nested=nested)

    def work(rank: int) -> None:
        def build() -> FusedMoE:
            if not spread:
                return FusedMoE(3, 2, 128, 128)
            with expert_parallel():
                return FusedMoE(3, 2, 128, 128)

        model, plain = build(), build()
        for layer in (model.w13, model.w2):
            layer.quantize(method)
        model.load_weights(tensors)
        plain.load_weights(wide)
        with torch.no_grad():
            torch.testing.assert_close(model(x, scores), plain(x, scores), rtol=1e-4, atol=1e-4)

    run_ranks(2, work)


@pytest.mark.parametrize("rows", [(128, 128), (128, 192), (256, 64), (64, 64), (192, 256)])
@pytest.mark.parametrize("kind", ["nf4-nested", "nf4"])
def test_slots_stored_as_one_tensor(kind: str, rows: tuple[int, int]) -> None:
    """A layer with named slots takes them as one tensor, unless a nested block has two of them."""
    whole, wide = bnb.quantized(torch.randn(sum(rows), 128), kind)

    def build() -> MergedColumnParallelLinear:
        return MergedColumnParallelLinear(128, rows, False, shard_names=["a", "b"])

    def work(rank: int) -> None:
        layer, plain = build(), build()
        layer.quantize(BitsAndBytes4BitMethod("nf4", nested=kind == "nf4-nested"))
        plain.load_weights({"weight": wide})
        if rows[0] % 128 and kind == "nf4-nested":  # the last block may have fewer scales
            problem = r"expected shape \[2\]|384 scales of a end inside a block of 256"
            with pytest.raises(WeightLoadError, match=problem):
                layer.load_weights(whole)
            return
        layer.load_weights(whole)
        assert torch.equal(layer.quant_method.full_precision(layer), plain.weight.data)

    run_ranks(2, work)


def test_padding_multiplies_to_zero() -> None:
    """Rows that pad a vocabulary are zero, though code 0 and a nested scale of 0 are not."""
    tensors, wide = bnb.quantized(torch.randn(70, 64), "nf4-nested")

    def work(rank: int) -> None:
        head, plain = ParallelLMHead(70, 64), ParallelLMHead(70, 64)
        head.quantize(BitsAndBytes4BitMethod("nf4", nested=True))
        head.load_weights(tensors)
        plain.load_weights({"weight": wide})
        assert torch.equal(head.quant_method.full_precision(head), plain.weight.data)

    run_ranks(2, work)


def test_padding_between_slots_multiplies_to_zero() -> None:
    """Slots that are stored as one tensor only may be padded too, the first one in the middle."""
    tensors, wide = bnb.quantized(torch.randn(140, 64), "nf4-nested")

    def build(size: int) -> ColumnParallelLinear:
        slots = tuple(Slot(name, 70, size, 72) for name in ("a", "b"))
        return ColumnParallelLinear(64, 140, bias=False, output=Dim(slots, 1))

    def work(rank: int) -> None:
        layer, plain = build(2), build(2)
        layer.quantize(BitsAndBytes4BitMethod("nf4", nested=True))
        layer.load_weights(tensors)
        plain.load_weights({"weight": wide})
        assert torch.equal(layer.quant_method.full_precision(layer), plain.weight.data)

    run_ranks(2, work)


def test_key_value_heads_are_copied_with_their_scales() -> None:
    """With fewer heads than ranks, neighbours hold the same codes and scales."""
    names, wide = ("q_proj", "k_proj", "v_proj"), {}
    tensors = {}
    for name, rows in zip(names, (256, 128, 128), strict=True):
        made, weight = bnb.quantized(torch.randn(rows, 128), "fp4-nested")
        tensors |= {f"{name}.{key}": tensor for key, tensor in made.items()}
        wide[f"{name}.weight"] = weight

    def work(rank: int) -> None:
        layer, plain = (QKVParallelLinear(128, 64, 4, 2, bias=False) for _ in range(2))
        layer.quantize(BitsAndBytes4BitMethod("fp4", nested=True))
        layer.load_weights(tensors)
        plain.load_weights(wide)
        assert torch.equal(layer.quant_method.full_precision(layer), plain.weight.data)

    run_ranks(4, work)


def test_the_format_of_int8_may_be_left_out() -> None:
    """The first versions stored no ``weight_format``, and bitsandbytes takes rows then."""
    saved, wide = bnb.quantized(torch.randn(32, 64), "int8")
    layer: Any = ReplicatedLinear(64, 32, bias=False)
    layer.quantize(BitsAndBytes8BitMethod())
    layer.load_weights({name: tensor for name, tensor in saved.items() if "format" not in name})
    torch.testing.assert_close(layer(torch.eye(64)).T, wide)


@pytest.mark.parametrize("kind", bnb.KINDS)
@pytest.mark.parametrize("rows", [[0, 7, 31], range(32)], ids=["some", "all"])
def test_rows_of_zeros(kind: str, rows: Sequence[int]) -> None:
    """Rows of zeros, such as those of unused tokens, have the scale 0 and stay zeros.

    In a tensor of zeros, the mean that is taken off nested scales is 0, too.
    """
    weight = torch.randn(32, 64)
    weight[list(rows)] = 0
    saved, wide = bnb.quantized(weight, kind)
    layer: Any = ReplicatedLinear(64, 32, bias=False)
    quant_type = bnb.KINDS[kind].get("bnb_4bit_quant_type")
    if quant_type is None:
        layer.quantize(BitsAndBytes8BitMethod())
    else:
        layer.quantize(BitsAndBytes4BitMethod(quant_type, nested=kind.endswith("nested")))
    layer.load_weights(saved)
    torch.testing.assert_close(layer(torch.eye(64)).T, wide)


SPARSE = bnb.TINY | {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_local_experts": 4}
bnb.MODELS |= {
    "qwen3_moe": {"model_type": "qwen3_moe", **SPARSE, "num_experts": 4},
    "mixtral": {"model_type": "mixtral", **SPARSE},
    "gpt_oss": {"model_type": "gpt_oss", **SPARSE, "layer_types": ["full_attention"]},
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["nf4-nested", "int8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_that_transformers_does_not_quantize(
    stored: Callable[..., Any], name: str, kind: str, size: int
) -> None:
    """They are no linear layers there, so they are stored in full precision, without a word."""
    checkpoint = stored(name, kind)
    assert checkpoint.config["quantization_config"]["llm_int8_skip_modules"] is None

    def work(rank: int) -> None:
        model = load(checkpoint.folder)
        layers = {
            n: each for n, each in model.named_modules() if isinstance(each, QuantizableLayer)
        }
        quantized = {path for path, layer in layers.items() if layer.is_quantized}
        assert quantized == {f"{ATTENTION}.qkv_proj", f"{ATTENTION}.o_proj"}
        got = logits(model, checkpoint.ids)
        torch.testing.assert_close(got, checkpoint.logits, rtol=0, atol=1e-4)

    run_ranks(size, work)


def test_experts_that_are_stored_quantized() -> None:
    """Files of before transformers 5 have a linear layer for each projection of each expert."""
    name = "model.layers.0.mlp.experts.0.up_proj"
    for codes in (torch.uint8, torch.int8):
        rules = rules_for(None, {"quant_method": "bitsandbytes", "load_in_4bit": True})
        assert rules is not None
        kept = rules.for_experts({f"{name}.weight": codes, f"{name}.bias": torch.float32})
        assert kept == rules
