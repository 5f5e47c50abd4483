"""Each argument of a public layer changes what the layer takes, holds or returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import torch

from vllm_module import layers, vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.parameters import Dim, Slot

BASES = {"RecurrentLayer", "DecayingLayer"}  # which compute nothing
DYNAMIC = {"scaling": {"rope_type": "dynamic", "factor": 2.0}}


class Case(NamedTuple):
    """A layer's arguments, another value of each, and what ``forward`` of the layer takes.

    A value that needs other arguments beside it is a pair of both.
    """

    arguments: dict[str, Any]
    others: dict[str, Any]
    inputs: Callable[[Any], tuple[Any, ...]]


def numbers(name: str, *shape: int) -> torch.Tensor:
    """Return normal numbers, the same ones for the same name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))


def x(layer: Any) -> tuple[Any, ...]:
    """Return an input as wide, and of the dtype, as the first weight takes."""
    weight = next(iter(layer.parameters()))
    width = weight.shape[-1] * (1 if getattr(layer, "input_is_parallel", True) else 2)
    return (numbers("x", TOKENS, width).to(weight.dtype),)


def gated(layer: Any) -> tuple[Any, ...]:
    return *x(layer), numbers("gate", TOKENS, layer.weight.shape[-1]).to(layer.weight.dtype)


def heads(layer: Any) -> tuple[Any, ...]:
    kv_heads = getattr(layer, "num_kv_heads", layer.num_heads)
    counts = {"q": layer.num_heads, "k": kv_heads, "v": kv_heads}
    return tuple(numbers(name, TOKENS, n, layer.head_size) for name, n in counts.items())


def latents(layer: Any) -> tuple[Any, ...]:
    """Return queries and latents of heads with 3 features without positions, and values of 5."""
    n, rank, rope = layer.num_heads, layer.kv_lora_rank, layer.token_shape[-1] - layer.kv_lora_rank
    shapes = (TOKENS, n, 3), (TOKENS, n, rope), (TOKENS, rank), (TOKENS, 1, rope)
    absorbed = (n, 3, rank), (n, rank, 5)
    return tuple(numbers(str(i), *shape) for i, shape in enumerate((*shapes, *absorbed)))


def rotated(layer: Any) -> tuple[Any, ...]:
    queries_and_keys = (numbers(name, TOKENS, 2, layer.head_size) for name in "qk")
    return torch.arange(TOKENS) * 5, *queries_and_keys


def routed(layer: Any) -> tuple[Any, ...]:
    hidden = numbers("x", TOKENS, layer.w13.weight.shape[-1])
    return hidden.to(layer.w13.weight.dtype), numbers("logits", TOKENS, layer.num_experts)


def bias_of_experts() -> torch.nn.Parameter:
    return torch.nn.Parameter(numbers("correction", 8), requires_grad=False)


TOKENS = 6
HALF = {"params_dtype": torch.float16}
LINEAR = {"bias": False, "skip_bias_add": True} | HALF
ONE = {
    "input_size": 6,
    "output_size": 8,
    "output": Dim((Slot("a", 8, 2), Slot("b", 4, 2)), groups=1),
}
SEVERAL = {"input_size": 6, "output_sizes": [8, 4], "shard_names": ("c", "b")}
TABLE = {"num_embeddings": 11, "embedding_dim": 4, "padding_size": 1} | HALF
NORM = {"hidden_size": 6, "eps": 0.5, "weight_offset": 1.0} | HALF
SLOT, OTHER = Slot("q", 8, 2), Slot("q", 4, 2)
WHOLE = {"input_size": 8, "output_size": 12}
MERGED = {"input_size": 8, "output_sizes": [4, 8], "shard_names": ("a", "b")}

CASES = {
    "Attention": Case(
        {"num_heads": 4, "head_size": 8, "num_kv_heads": 2},
        {"num_heads": 2, "head_size": 16, "scale": 0.7, "num_kv_heads": 4, "sliding_window": 3}
        | {"softcap": 0.5, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        heads,
    ),
    "CausalConv1d": Case(
        {"channels": Dim.cut(4, 2), "width": 3, "bias": True},
        {"channels": Dim.cut(8, 2), "width": 2, "bias": False, "silu": False},
        lambda layer: (numbers("x", TOKENS, len(layer.weight)),),
    ),
    "ColumnParallelLinear": Case(WHOLE, ONE | LINEAR | {"gather_output": True}, x),
    "EncoderAttention": Case(
        {"num_heads": 2, "head_size": 4}, {"num_heads": 1, "head_size": 8, "scale": 0.7}, heads
    ),
    "FusedMoE": Case(
        {"num_experts": 8, "top_k": 2, "hidden_size": 8, "intermediate_size": 8}
        | {"num_expert_group": 2, "topk_group": 1},
        {"num_experts": 6, "top_k": 1, "hidden_size": 6, "intermediate_size": 4}
        | HALF
        | {"renormalize": False, "use_grouped_topk": True, "scoring_func": "sigmoid"}
        | {"num_expert_group": (4, {"use_grouped_topk": True})}
        | {"topk_group": (2, {"use_grouped_topk": True})}
        | {"e_score_correction_bias": (bias_of_experts(), {"scoring_func": "sigmoid"})}
        | {"routed_scaling_factor": 2.0, "activation": "gelu", "bias": True}
        | {
            "apply_router_weight_on_input": (True, {"top_k": 1, "renormalize": False}),
            "shard_names": ("w1", "w3", "w2"),
            "block": 6,
        }
        | {"transposed": (True, {"shard_names": None})}
        | {"interleaved": (True, {"shard_names": None}), "packed": False},
        routed,
    ),
    "GatedDeltaNet": Case(
        {"hidden_size": 6, "num_key_heads": 2, "num_value_heads": 4, "key_dim": 3, "value_dim": 5},
        {"hidden_size": 4, "num_key_heads": 4, "num_value_heads": 8, "key_dim": 4, "value_dim": 4}
        | {"conv_kernel": 3, "eps": 0.5, "stored": "by_kind"}
        | {"negative_eigenvalues": True},
        lambda layer: (numbers("x", TOKENS, layer.out_proj.weight.shape[0]),),
    ),
    "GatedRMSNorm": Case({"hidden_size": 8}, NORM, gated),
    "GeluAndMul": Case({}, {"approximate": "tanh"}, lambda layer: (numbers("x", TOKENS, 8),)),
    "GroupedGatedRMSNorm": Case(
        {"hidden_size": 8, "groups": 2, "eps": 1e-5},
        {"hidden_size": 4, "groups": 4, "eps": 0.5, "norm_before_gate": True},
        gated,
    ),
    "LayerNorm": Case({"hidden_size": 8}, {"hidden_size": 6, "eps": 0.5, "bias": False} | HALF, x),
    "MLAAttention": Case(
        {"num_heads": 2, "kv_lora_rank": 4, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2},
        {"num_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": 9, "qk_rope_head_dim": 4}
        | {"scale": 0.7},
        latents,
    ),
    "MLAHeadProjection": Case(
        {"kv_lora_rank": 4, "num_heads": 2, "head_dim": 3},
        {"kv_lora_rank": 6, "num_heads": 4, "head_dim": 5, "transposed_product": True} | HALF,
        x,
    ),
    "MLAUpProjection": Case(
        {"kv_lora_rank": 4, "num_heads": 2, "qk_nope_head_dim": 3, "v_head_dim": 5},
        {"kv_lora_rank": 6, "num_heads": 4, "qk_nope_head_dim": 4, "v_head_dim": 4} | HALF,
        x,
    ),
    "Mamba2Mixer": Case(
        {"hidden_size": 6, "num_heads": 4, "head_dim": 3, "n_groups": 2, "state_size": 5},
        {"hidden_size": 4, "num_heads": 8, "head_dim": 2, "n_groups": 4, "state_size": 3}
        | {"conv_kernel": 3, "eps": 0.5, "bias": True, "conv_bias": False, "norm": False}
        | {"norm_before_gate": True, "time_step_limit": (0.5, 0.7)},
        lambda layer: (numbers("x", TOKENS, layer.out_proj.weight.shape[0]),),
    ),
    "MergedColumnParallelLinear": Case(MERGED, SEVERAL | LINEAR | {"gather_output": True}, x),
    "MergedReplicatedLinear": Case(MERGED, SEVERAL | LINEAR, x),
    "ParallelLMHead": Case({"num_embeddings": 9, "embedding_dim": 8}, TABLE | {"bias": True}, x),
    "PerHeadLayerNorm": Case(
        {"slot": SLOT, "head_size": 4},
        {"slot": Slot("q", 16, 2), "head_size": 2, "eps": 0.5} | HALF,
        lambda layer: (numbers("x", TOKENS, *layer.weight.shape),),
    ),
    "QKVParallelLinear": Case(
        {"hidden_size": 8, "head_size": 4, "total_num_heads": 4, "total_num_kv_heads": 2},
        {"hidden_size": 6, "head_size": 2, "total_num_heads": 2, "total_num_kv_heads": 4}
        | LINEAR
        | {"shard_names": ("a", "b", "c"), "stored_rotary_pairs": True}
        | {"groups": (2, {"shard_names": None})},
        x,
    ),
    "RMSNorm": Case({"hidden_size": 8}, NORM, x),
    "ReplicatedLinear": Case(WHOLE, ONE | LINEAR, x),
    "RotaryEmbedding": Case(
        {"head_size": 8, "max_position": 30},
        {"head_size": 6, "base": 500.0, "rotary_dim": 4, "is_neox_style": False}
        | {"scaling": {"rope_type": "linear", "factor": 2.0}}
        | {"max_position": (40, DYNAMIC | {"max_model_len": 90}), "max_model_len": (90, DYNAMIC)},
        rotated,
    ),
    "Router": Case(
        {"hidden_size": 8, "num_experts": 4},
        {"hidden_size": 6, "num_experts": 8, "bias": True, "e_score_correction_bias": True} | HALF,
        x,
    ),
    "RowParallelLinear": Case(
        WHOLE,
        {"input_size": 4, "output_size": 8, "reduce_results": False}
        | {"input_is_parallel": False}
        | LINEAR,
        x,
    ),
    "ShardedRMSNorm": Case(
        {"slot": SLOT}, {"slot": OTHER, "eps": 0.5, "weight_offset": 1.0} | HALF, x
    ),
    "SwigluOAIAndMul": Case(
        {}, {"alpha": 1.0, "limit": 0.5}, lambda layer: (numbers("x", TOKENS, 8),)
    ),
    "VocabParallelEmbedding": Case(
        {"num_embeddings": 9, "embedding_dim": 8}, TABLE, lambda layer: (torch.arange(9),)
    ),
}


def behaviour(build: Callable[..., Any], arguments: dict[str, Any], inputs: Any) -> list[Any]:
    """Return what two ranks want of a checkpoint, hold of it and compute, as can be compared."""

    def rank_fn(rank: int) -> tuple[Any, ...]:
        layer = build(**arguments)
        wanted = layer.expected_weights()
        layer.load_weights(
            {name: numbers(name, *each.shape).to(each.dtype) for name, each in wanted.items()}
        )
        output = layer(*inputs(layer))
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = *layer.named_parameters(), *layer.named_buffers()
        held = [(name, each.shape, each.tolist()) for name, each in tensors]
        names = [each.stored_beside for each in layer.modules() if isinstance(each, vLLMModule)]
        return sorted(wanted), names, held, [(each.dtype, each.tolist()) for each in outputs]

    return run_ranks(2, rank_fn)


def test_every_argument_of_every_layer_has_another_value() -> None:
    """A new layer, or argument, is refused here until the test below tries it."""
    for name in layers.__all__:
        layer = getattr(layers, name)
        if not (isinstance(layer, type) and issubclass(layer, vLLMModule)) or name in BASES:
            continue
        named = set(inspect.signature(layer).parameters)
        assert named == set(CASES[name].others if name in CASES else ()), name


@pytest.mark.parametrize("name", CASES)
def test_each_argument_changes_what_a_layer_does(name: str) -> None:
    """With another value it takes other weights, holds others or computes another output."""
    arguments, others, inputs = CASES[name]
    build = getattr(layers, name)
    before = behaviour(build, arguments, inputs)
    assert before == behaviour(build, arguments, inputs), "is the same for the same arguments"
    for argument, other in others.items():
        needs_others = isinstance(other, tuple) and isinstance(other[-1], dict)
        value, beside = other if needs_others else (other, {})
        base = behaviour(build, arguments | beside, inputs) if beside else before
        after = behaviour(build, arguments | beside | {argument: value}, inputs)
        assert after != base, f"{argument} changes nothing"
