"""The modules that the laws are checked on: layers, blocks of them, parameter classes and models.

Pytest's importlib mode allows no imports between test files: use ``runpy.run_path``.
"""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

from vllm_module import BasevLLMParameter, vLLMModule
from vllm_module.build.registry import model_class
from vllm_module.build.stages import divide
from vllm_module.distributed import PipelineStage, expert_parallel, tensor_parallel_group
from vllm_module.layers import (
    Attention,
    CausalConv1d,
    ColumnParallelLinear,
    DecayingLayer,
    EncoderAttention,
    FusedMoE,
    GatedDeltaNet,
    GatedRMSNorm,
    GeluAndMul,
    GroupedGatedRMSNorm,
    LayerNorm,
    Mamba2Mixer,
    MergedColumnParallelLinear,
    MergedReplicatedLinear,
    MLAAttention,
    MLAHeadProjection,
    MLAUpProjection,
    ParallelLMHead,
    PerHeadLayerNorm,
    QKVParallelLinear,
    RecurrentLayer,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    Router,
    RowParallelLinear,
    ShardedRMSNorm,
    SiluAndMul,
    SwigluOAIAndMul,
    VocabParallelEmbedding,
    add_up_projections,
)
from vllm_module.quantization import (
    ONLINE,
    EightBitMethod,
    QuantizableLayer,
    QuantizeMethod,
    Scheme,
)
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.testing import (
    HeadLayout,
    Law,
    ParameterLayout,
    dim_layouts,
    dtypes,
    features,
    head_layouts,
    model_configs,
    parameter_layouts,
    vocabularies,
)
from vllm_module.testing.configurations import architectures
from vllm_module.testing.strategies import DimLayout, parameter_classes

NAMES = ["gate_proj", "up_proj", "third"]
packed = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("packed.py"))))


class Subject(NamedTuple):
    """A module that the laws are checked on.

    Attributes:
        build: makes the module.
        arguments: of ``build``; values or Hypothesis strategies.
        inputs: makes the arguments of the module's ``forward``.
        covers: layers that the subject tests.
        takes: whether ``size`` ranks can share a module of these arguments, computed independently.

    """

    build: Callable[..., vLLMModule]
    arguments: Mapping[str, Any]
    inputs: Callable[[vLLMModule], tuple[Any, ...]] | None
    covers: tuple[type, ...] = ()
    takes: Callable[..., bool] = lambda size, **arguments: True

    def hold(self, law: Law) -> int:
        return law(self.build, inputs=self.inputs, **self.arguments)


class Held(vLLMModule):
    """One typed parameter in a layer without ``forward``."""

    def __init__(self, layout: ParameterLayout) -> None:
        super().__init__()
        self.layer = vLLMModule()
        self.layer.scale = layout.build()
        self.layer.shard_names = tuple(name for name in self.layer.scale.slots if name)
        if layout.stored_beside is not None:
            self.layer.stored_beside = {"scale": layout.stored_beside}


class Attend(vLLMModule):
    """An attention block, from the fused projection to the reduction.

    Queries and keys are normalized over all heads, each head by itself, or not.
    """

    def __init__(self, layout: HeadLayout, bias: bool, norm: str) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(6, layout.head_size, layout.heads, layout.kv_heads, bias)
        local = self.qkv_proj
        q, k, _ = local.output.slots
        self.norm = norm
        if norm == "all heads":
            self.q_norm, self.k_norm = ShardedRMSNorm(q), ShardedRMSNorm(k)
        elif norm == "each head":
            self.q_norm, self.k_norm = (PerHeadLayerNorm(x, layout.head_size) for x in (q, k))
        self.rotary_emb = RotaryEmbedding(layout.head_size, 16)
        self.attn = Attention(local.num_heads, layout.head_size, num_kv_heads=local.num_kv_heads)
        self.o_proj = RowParallelLinear(layout.heads * layout.head_size, 6, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(x).split(self.qkv_proj.output_sizes, dim=-1)
        heads = -1, self.attn.head_size
        q, k, v = (part.unflatten(-1, heads) for part in qkv)
        if self.norm == "all heads":
            q, k = self.q_norm(q.flatten(-2)), self.k_norm(k.flatten(-2))
            q, k = q.unflatten(-1, heads), k.unflatten(-1, heads)
        elif self.norm == "each head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(torch.arange(len(x)), q, k)
        return self.o_proj(self.attn(q, k, v))


class AttendToLatents(vLLMModule):
    """An attention block whose keys and values come from latents."""

    def __init__(self, heads: int, nope: int, v: int, apart: bool) -> None:
        super().__init__()
        self.q_size, self.nope = nope + 2, nope
        self.a_proj = MergedReplicatedLinear(6, [4, 3 + 2], shard_names=NAMES[:2])
        self.q_b_proj = ColumnParallelLinear(4, heads * self.q_size, bias=False)
        self.up = add_up_projections(self, 3, heads, nope, v, apart=apart)
        self.attn = MLAAttention(self.up[0].num_heads, 3, nope, 2)
        self.o_proj = RowParallelLinear(heads * v, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv_c, k_pe = self.a_proj(x).split([4, 3, 2], dim=-1)
        q = self.q_b_proj(q).unflatten(-1, (-1, self.q_size)).split([self.nope, 2], dim=-1)
        absorbed = [part for each in self.up for part in each.absorbed()]
        return self.o_proj(self.attn(*q, kv_c, k_pe, *absorbed))


ACTIVATIONS = (SiluAndMul, GeluAndMul, SwigluOAIAndMul)


class Encode(vLLMModule):
    """An attention block of an encoder: two sequences end to end, the residual and the norm."""

    def __init__(self, layout: HeadLayout, bias: bool) -> None:
        super().__init__()
        heads, _, head_size = layout
        self.qkv_proj = QKVParallelLinear(6, head_size, heads)
        self.attn = EncoderAttention(self.qkv_proj.num_heads, head_size)
        self.o_proj = RowParallelLinear(heads * head_size, 6)
        self.norm = LayerNorm(6, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (3, -1, self.attn.head_size))
        return self.norm(self.o_proj(self.attn(*qkv.unbind(-3), [1, len(x) - 1])) + x)


class MLP(vLLMModule):
    """A gated MLP, from the fused projection to the reduction."""

    def __init__(self, inner: int, bias: bool, act: type[vLLMModule]) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(6, [inner] * 2, bias, shard_names=NAMES[:2])
        self.act_fn = act()
        self.down_proj = RowParallelLinear(inner, 6, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Vocabulary(vLLMModule):
    """Tokens to features and back to logits, tied or not."""

    def __init__(self, vocab: int, padding_size: int, tied: bool, bias: bool) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(vocab, 6, padding_size=padding_size)
        self.head = ParallelLMHead(vocab, 6, bias, padding_size=padding_size)
        if tied:
            self.head.tie_weights(self.embed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


class Derived(vLLMModule):
    """Processes its weight, which may be tied, and the result of the same in a child."""

    def __init__(self, width: int, tied: bool) -> None:
        super().__init__()
        self.first = RMSNorm(width)
        self.last = RMSNorm(width)
        if tied:
            self.last.weight = self.first.weight
        self.inner = Summed(width)
        self.register_buffer("both", torch.zeros(()), persistent=False)

    def process_weights_after_loading(self) -> None:
        self.both.copy_(self.inner.total + self.last.weight.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.last(self.first(x))) + self.both


class Summed(vLLMModule):
    """A layer that adds the sum of its weight, computed when the weight was loaded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False)
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def process_weights_after_loading(self) -> None:
        self.total.copy_(self.weight.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.total


def quantized(build: Callable[..., vLLMModule]) -> Callable[..., vLLMModule]:
    """Return a function that builds a block with all of its layers quantized by one scheme."""

    def quantize(scheme: Scheme | QuantizeMethod, **arguments: Any) -> vLLMModule:
        module = build(**arguments)
        for layer in module.modules():
            if isinstance(layer, QuantizableLayer):
                layer.quantize(EightBitMethod(scheme) if isinstance(scheme, Scheme) else scheme)
        return module

    return quantize


# A block of one row allows a cut between any two rows.
ONLINE_SCHEMES = st.sampled_from(
    [
        Scheme("block", block=(1, 2), online=True),
        *(scheme for scheme in ONLINE.values() if scheme.strategy != "block"),
    ]
)
STORED_SCHEMES = st.sampled_from(
    [
        Scheme("tensor"),
        Scheme("tensor", activations="static"),
        Scheme("channel"),
        Scheme("channel", torch.int8, "none"),
        Scheme("block", block=(1, 2), scale_name="weight_scale_inv"),
    ]
)


class Plain(vLLMModule):
    """PyTorch's own modules and buffers around one of our layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), RMSNorm(width))
        self.register_buffer("offset", torch.zeros(width))
        self.scale = nn.Parameter(torch.empty(1, width, dtype=torch.float64, device="meta"), False)
        self.steps = nn.Parameter(torch.empty((), dtype=torch.int8, device="meta"), False)
        self.register_buffer("table", torch.ones(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.table + self.offset + self.scale.float() * self.steps


class Named(vLLMModule):
    """Aliases, skip rules, one module under two names, and one tied parameter."""

    weight_aliases = {"ln_1": "norm", "alpha": "gain"}
    skipped_weights = {"masked_bias": "computed", "rope": "computed"}

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = RMSNorm(6)
        self.gain = nn.Parameter(torch.empty(6, device="meta"), requires_grad=False)
        self.a = self.b = MLP(inner, bias=True, act=SiluAndMul)
        self.last = RMSNorm(6)
        self.last.weight = self.norm.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.b(self.a(self.norm(x * self.gain))))


class Experts(vLLMModule):
    """A router and its experts, cut or spread over the ranks.

    Those that are spread lie in the order of a ``turn`` and a ``step``, some several times.
    """

    def __init__(
        self,
        spread: bool,
        hidden: int,
        correction: bool,
        turn: int = 0,
        step: int = 1,
        redundant: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__()
        if not arguments["use_grouped_topk"]:
            arguments |= {"num_expert_group": None, "topk_group": None}
        arguments["interleaved"] &= arguments["shard_names"] is None
        experts = arguments["num_experts"]
        self.gate = Router(hidden, experts, e_score_correction_bias=correction)
        bias = self.gate.e_score_correction_bias
        size = tensor_parallel_group().size
        more = min(redundant, experts * (size - 1))
        with expert_parallel(redundant=more) if spread else nullcontext():
            self.experts = FusedMoE(hidden_size=hidden, e_score_correction_bias=bias, **arguments)
        if spread and size > 1:  # the one rank that they are compared with has them in order
            placed = [(turn + step * place) % experts for place in range(experts + more)]
            self.experts.place_experts(placed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


class Conv1D(ColumnParallelLinear):
    """A linear layer whose weight a checkpoint stores as ``[input, output]``."""

    transposed = True


class Layouts(vLLMModule):
    """Layers whose slots are stored in some order; two, if slots have no names of their own."""

    def __init__(self, output: DimLayout, transposed: bool, bias: bool) -> None:
        super().__init__()
        dim = output.at(tensor_parallel_group().size)
        width = dim.size  # a square weight fits as its own transpose
        cls = Conv1D if transposed else ColumnParallelLinear
        self.first = cls(width, width, bias, gather_output=True, output=dim)
        self.first.shard_names = dim.names
        self.first.stored_beside = {"weight": "kernel"}
        self.second = RMSNorm(width)
        if not dim.names:
            self.second = cls(width, width, bias, gather_output=True, output=dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Renamed(vLLMModule):
    """A model below a level that checkpoints lack, or have another name for."""

    weight_aliases = {
        "h": "transformer.h",
        "wte": "transformer.wte",
        "language_model.model": "transformer",
        "ln_f.gain": "transformer.norm.weight",
        "transformer.h.0.w1": "transformer.h.0.gate_proj",
        "transformer.h.0.ln.1": "transformer.norm",
    }
    skipped_weights = {"transformer.h.2": "a layer for training alone", "vision.tower": "text only"}

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.transformer = vLLMModule()
        self.transformer.weight_aliases = {"ln": "norm", "layers": "h"}
        self.transformer.wte = VocabParallelEmbedding(5, 6)
        self.transformer.h = nn.ModuleList(MLP(inner, bias=True, act=SiluAndMul) for _ in range(2))
        self.transformer.norm = RMSNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.transformer.h:
            x = layer(x)
        return self.transformer.norm(x)


def merged(sizes: list[int], bias: bool) -> vLLMModule:
    names = NAMES[: len(sizes)]
    return MergedColumnParallelLinear(5, sizes, bias, gather_output=True, shard_names=names)


def norm(hidden_size: int, layer: bool, bias: bool) -> vLLMModule:
    return LayerNorm(hidden_size, bias=bias) if layer else RMSNorm(hidden_size)


def x_of(width: int) -> Callable[[vLLMModule], tuple[Any, ...]]:
    return lambda module: (torch.randn(4, width),)


def x_like_weight(module: vLLMModule) -> tuple[Any, ...]:
    """Return an input with as many features as the layer's weight takes."""
    (expected, *_) = module.expected_weights().values()
    return (torch.randn(4, expected.shape[-1]).to(expected.dtype),)


def fits(block: tuple[int, int], inner: int, size: int) -> bool:
    """Tell whether the edges of the MLP's slots, and of the ranks' shards, fall between blocks."""
    part = inner // size
    last_may_be_partial = size == 1
    return part % block[0] == 0 and (last_may_be_partial or part % block[1] == 0)


def moe_takes(size: int, spread: bool, intermediate_size: int, **arguments: Any) -> bool:
    return spread or intermediate_size % size == 0


def is_cut_evenly(layout: DimLayout, size: int) -> bool:
    """Tell whether ranks keep whole heads, and whole groups or a part of one."""
    parts = [min(slot.most_parts, size) for slot in layout.slots]
    for slot, count in zip(layout.slots, parts, strict=True):
        if (
            size % count
            or slot.padded % count
            or (slot.pairs and slot.padded // count % slot.pairs)
        ):
            return False
    if layout.groups in (None, 1):
        return True
    for rank in range(size):
        groups = []  # of each slot, how much of each group
        for slot, count in zip(layout.slots, parts, strict=True):
            part, share = slot.size // count, slot.size // layout.groups
            kept = range(rank * count // size * part, (rank * count // size + 1) * part)
            groups.append(Counter(feature // share for feature in kept))
        shares = [slot.size // layout.groups for slot in layout.slots]
        whole = [set(each.values()) == {n} for each, n in zip(groups, shares, strict=True)]
        same = len({frozenset(each) for each in groups}) == 1
        if not (all(whole) and same) and any(len(each) > 1 for each in groups):
            return False
    return True


def kv_are_shared(size: int, layout: HeadLayout, **arguments: Any) -> bool:
    heads, kv_heads, _ = layout
    return heads % size == 0 and max(kv_heads, size) % min(kv_heads, size) == 0


def every_token(module: vLLMModule) -> tuple[Any, ...]:
    (table, *_) = module.expected_weights().values()
    return (torch.arange(table.shape[0]),)


def x_of_layouts(module: vLLMModule) -> tuple[Any, ...]:
    return (torch.randn(4, module.first.output.size),)


def quantized_mlp(schemes: st.SearchStrategy[Scheme]) -> Subject:
    """Return an MLP with all of its layers quantized by one of ``schemes``."""
    arguments = {"scheme": schemes, "inner": features(), "bias": st.booleans(), "act": SiluAndMul}

    def takes(size: int, scheme: Scheme, inner: int, **others: Any) -> bool:
        blocks = scheme.strategy == "block"
        return inner % size == 0 and (not blocks or fits(scheme.block, inner, size))

    return Subject(quantized(MLP), arguments, x_of(6), takes=takes)


def mamba2(heads: tuple[int, int], **arguments: Any) -> vLLMModule:
    groups, each = heads
    return Mamba2Mixer(6, groups * each, n_groups=groups, **arguments)


def groups_are_cut(size: int, heads: tuple[int, int], **arguments: Any) -> bool:
    groups, each = heads
    return (groups % size == 0 or size % groups == 0) and groups * each % size == 0


def heads_are_cut(size: int, num_key_heads: int, values_per_key: int, **arguments: Any) -> bool:
    values = num_key_heads * values_per_key
    return (num_key_heads % size == 0 or size % num_key_heads == 0) and values % size == 0


def gated_delta_net(num_key_heads: int, values_per_key: int, **arguments: Any) -> vLLMModule:
    return GatedDeltaNet(6, num_key_heads, num_key_heads * values_per_key, **arguments)


MAMBA2: Mapping[str, Any] = {
    "heads": st.tuples(features(), st.integers(1, 2)) | st.tuples(st.integers(1, 2), features()),
    "head_dim": st.integers(1, 3),
    "state_size": st.integers(1, 3),
    "conv_kernel": st.integers(2, 4),
    "bias": st.booleans(),
    "conv_bias": st.booleans(),
}
EXPERTS: Mapping[str, Any] = {
    "spread": st.booleans(),
    "hidden": st.sampled_from([4, 6]),
    "intermediate_size": features(1),
    "correction": st.booleans(),
    "num_experts": st.sampled_from([2, 4, 6]),
    "top_k": st.integers(1, 2),
    "use_grouped_topk": st.booleans(),
    "num_expert_group": 2,
    "topk_group": 2,
    "scoring_func": st.sampled_from(["softmax", "sigmoid"]),
    "bias": st.booleans(),
    "shard_names": st.sampled_from([None, ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down")]),
    "transposed": st.booleans(),
    "turn": st.integers(0, 5),
    "step": st.sampled_from([1, -1]),
    "redundant": st.sampled_from([0, 0, 1, 3]),
}
LAYOUTS: Mapping[str, Any] = {
    "output": dim_layouts(padded=False),
    "transposed": st.booleans(),
    "bias": st.booleans(),
}

_SIZES = {
    "input_size": features(),
    "output_size": features(),
    "bias": st.booleans(),
    "params_dtype": dtypes(),
}
_TABLE = {
    "num_embeddings": vocabularies(),
    "embedding_dim": features(1),
    "padding_size": st.sampled_from([1, 8, 64]),
}

LAYERS: dict[str, Subject] = {
    "replicated": Subject(ReplicatedLinear, _SIZES, x_like_weight, (ReplicatedLinear,)),
    "column": Subject(
        ColumnParallelLinear,
        _SIZES | {"gather_output": True},
        x_like_weight,
        (ColumnParallelLinear,),
        lambda size, output_size, **arguments: output_size % size == 0,
    ),
    "merged": Subject(
        merged,
        {"sizes": st.lists(features(), min_size=1, max_size=3), "bias": st.booleans()},
        x_of(5),
        (MergedColumnParallelLinear,),
        lambda size, sizes, **arguments: all(features % size == 0 for features in sizes),
    ),
    "row": Subject(
        RowParallelLinear,
        _SIZES | {"input_is_parallel": False},
        x_like_weight,
        (RowParallelLinear,),
        lambda size, input_size, **arguments: input_size % size == 0,
    ),
    "norm": Subject(
        norm,
        {"hidden_size": features(), "layer": st.booleans(), "bias": st.booleans()},
        x_like_weight,
        (RMSNorm, LayerNorm),
    ),
    "embedding": Subject(VocabParallelEmbedding, _TABLE, every_token, (VocabParallelEmbedding,)),
    "vocabulary": Subject(
        Vocabulary,
        {
            "vocab": vocabularies(),
            "padding_size": st.sampled_from([1, 8, 64]),
            "tied": st.booleans(),
            "bias": st.booleans(),
        },
        every_token,
        (ParallelLMHead,),
    ),
    "attention": Subject(
        Attend,
        {
            "layout": head_layouts(),
            "bias": st.booleans(),
            "norm": st.sampled_from(["", "all heads", "each head"]),
        },
        x_of(6),
        (QKVParallelLinear, Attention, RotaryEmbedding, ShardedRMSNorm, PerHeadLayerNorm),
        kv_are_shared,
    ),
    "encoder": Subject(
        Encode,
        {"layout": head_layouts(), "bias": st.booleans()},
        x_of(6),
        (EncoderAttention, LayerNorm),
        lambda size, layout, **arguments: layout.heads % size == 0,
    ),
    "latent attention": Subject(
        AttendToLatents,
        {
            "heads": features(),
            "nope": st.integers(1, 3),
            "v": st.integers(1, 3),
            "apart": st.booleans(),
        },
        x_of(6),
        (MLAAttention, MLAHeadProjection, MLAUpProjection, MergedReplicatedLinear),
        lambda size, heads, **arguments: heads % size == 0,
    ),
    "mamba2": Subject(
        mamba2,
        MAMBA2 | {"norm": st.booleans(), "norm_before_gate": st.booleans()},
        x_of(6),
        (Mamba2Mixer, GroupedGatedRMSNorm, RecurrentLayer, DecayingLayer, CausalConv1d),
        groups_are_cut,
    ),
    "quantized mamba2": Subject(
        quantized(mamba2),
        MAMBA2 | {"scheme": ONLINE["fp8_per_channel"]},
        x_of(6),
        takes=groups_are_cut,
    ),
    "gated delta net": Subject(
        gated_delta_net,
        {
            "num_key_heads": features(),
            "values_per_key": st.integers(1, 4),
            "key_dim": st.integers(1, 3),
            "value_dim": st.integers(1, 3),
            "conv_kernel": st.integers(2, 4),
            "stored": st.sampled_from(["by_head", "by_kind", "apart"]),
            "negative_eigenvalues": st.booleans(),
        },
        x_of(6),
        (GatedDeltaNet, GatedRMSNorm),
        heads_are_cut,
    ),
    "mlp": Subject(
        MLP,
        {"inner": features(), "bias": st.booleans(), "act": st.sampled_from(ACTIVATIONS)},
        x_of(6),
        ACTIVATIONS,
        lambda size, inner, **arguments: inner % size == 0,
    ),
    "derived": Subject(
        Derived,
        {"width": features(1), "tied": st.booleans()},
        lambda module: (torch.randn(4, module.first.weight.shape[0]),),
    ),
    "quantized while loading": quantized_mlp(ONLINE_SCHEMES),
    "stored quantized": quantized_mlp(STORED_SCHEMES),
    "packed": Subject(
        packed.PackedMLP,
        {"method": packed.STORED, "inner": packed.INNER, "bias": st.booleans()},
        packed.x_of,
        takes=packed.takes,
    ),
    "packed while loading": Subject(
        packed.PackedMLP,
        {"method": packed.ONLINE, "inner": packed.INNER, "bias": st.booleans()},
        packed.x_of,
        takes=packed.takes,
    ),
    "packed by bitsandbytes": Subject(
        packed.PackedMLP,
        {"method": packed.BITSANDBYTES, "inner": packed.INNER, "bias": st.booleans()},
        packed.x_of,
        takes=packed.takes_blocks,
    ),
    "experts packed by bitsandbytes": Subject(
        packed.PackedExperts,
        {"method": packed.BITSANDBYTES_EXPERTS, "inner": packed.INNER, "together": False},
        packed.x_of,
        takes=packed.takes_blocks,
    ),
    "packed experts": Subject(
        packed.PackedExperts,
        {
            "method": packed.STORED | packed.ONLINE,
            "inner": packed.INNER,
            "together": st.booleans(),
        },
        packed.x_of,
        takes=packed.takes,
    ),
    "quantized to NF4 while loading": Subject(
        quantized(MLP),
        {
            "scheme": OnlineNF4Method(2),
            "inner": st.sampled_from([8, 16, 24]),
            "bias": st.booleans(),
            "act": SiluAndMul,
        },
        x_of(6),
        takes=lambda size, inner, **arguments: inner % (2 * size) == 0,
    ),
    "experts": Subject(
        Experts,
        EXPERTS | {"interleaved": st.booleans()},
        lambda module: (torch.randn(4, module.gate.weight.shape[1]),),
        (FusedMoE, Router),
        moe_takes,
    ),
    "quantized experts": Subject(
        quantized(Experts),
        EXPERTS | {"scheme": ONLINE_SCHEMES | STORED_SCHEMES, "interleaved": st.booleans()},
        lambda module: (torch.randn(4, module.gate.weight.shape[1]),),
        takes=moe_takes,
    ),
    "layouts": Subject(
        Layouts,
        LAYOUTS,
        x_of_layouts,
        takes=lambda size, output, **arguments: is_cut_evenly(output, size),
    ),
    "layouts quantized while loading": Subject(
        quantized(Layouts),
        LAYOUTS | {"scheme": ONLINE_SCHEMES},
        x_of_layouts,
        takes=lambda size, output, **arguments: is_cut_evenly(output, size),
    ),
    "renamed": Subject(
        Renamed, {"inner": features()}, x_of(6), takes=lambda size, inner: inner % size == 0
    ),
    "named": Subject(
        Named, {"inner": features()}, x_of(6), takes=lambda size, inner: inner % size == 0
    ),
    "plain": Subject(
        Plain,
        {"width": features(1)},
        lambda module: (torch.randn(4, module.offset.shape[0]),),
    ),
}


def parameter_subject(cls: type[BasevLLMParameter]) -> Subject:
    """Return a layer that has a parameter of class ``cls``."""
    return Subject(Held, {"layout": parameter_layouts(cls)}, None)


PARAMETERS: dict[str, Subject] = {
    cls.__name__: parameter_subject(cls) for cls in parameter_classes()
}


def tokens_of(model: Any) -> tuple[Any, ...]:
    positions = torch.arange(5)
    return positions * 7919 % model.config.vocab_size, positions


MODELS: dict[str, Subject] = {
    # Some classes have several architectures.
    model.__name__: Subject(model, {"config": model_configs(model)}, tokens_of)
    for model in dict.fromkeys(model_class([name]) for name in architectures())
}


def deep(name: str) -> dict[str, Any]:
    """Return arguments that draw a model of several layers, for several stages."""
    tied = st.just(True) if name == "LlamaForCausalLM" else st.booleans()
    entries = {"num_hidden_layers": st.integers(3, 5), "tie_word_embeddings": tied}
    return {"config": model_configs(name, **entries)}


def one_stage(name: str, at: int, config: Any) -> vLLMModule:
    """Return one of three pipeline stages of a model: the first, second or last."""
    model: Any = model_class([name])(config)
    divide(model, PipelineStage(at, 3))
    return model


def passed_on(model: Any) -> tuple[Any, ...]:
    """Return the inputs of a stage: those of the model, or what the stage before passes on."""
    if not model.model.layers[0].held_elsewhere:
        return tokens_of(model)
    states = torch.randn(2, 5, model.config.hidden_size, dtype=torch.get_default_dtype())
    return tuple(states), torch.arange(5)


_DIVIDED = {"a tied model": "LlamaForCausalLM", "a hybrid with experts": "Qwen3NextForCausalLM"}
STAGES: dict[str, Subject] = {
    **{
        f"{what} in depth": Subject(model_class([name]), deep(name), tokens_of)
        for what, name in _DIVIDED.items()
    },
    **{
        f"a stage of {what}": Subject(
            partial(one_stage, name), deep(name) | {"at": st.integers(0, 2)}, passed_on
        )
        for what, name in _DIVIDED.items()
    },
}

SUBJECTS = LAYERS | PARAMETERS | MODELS | STAGES


def large(name: str) -> bool:
    """Tell whether a subject is a model or quantized, and so takes longer than the others."""
    return name in MODELS | STAGES or any(word in name for word in ("quantized", "packed"))
