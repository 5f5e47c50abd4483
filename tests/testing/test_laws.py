"""The toolkit as a model author uses it: mistakes are found, shrunk and named."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from vllm_module import vLLMModule
from vllm_module.distributed import tensor_parallel_group
from vllm_module.distributed.groups import PipelineStage
from vllm_module.errors import ShardingError
from vllm_module.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    Positions,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
)
from vllm_module.models.gpt2 import GPT2LMHeadModel
from vllm_module.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
)
from vllm_module.parameters import Dim, ModelWeightParameter
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.testing import (
    LAWS,
    assert_accounting_exact,
    assert_memory_bounded,
    assert_order_independent,
    assert_pure,
    assert_reads_what_it_keeps,
    assert_reload_in_place,
    assert_sharding_equivalent,
    assert_staged,
    features,
    model_configs,
)
from vllm_module.testing.sharding import _resembling


def x(module: vLLMModule) -> tuple[torch.Tensor]:
    return (torch.randn(2, 4),)


class MLP(vLLMModule):
    """A correct MLP, unless a test passes ``wrong``."""

    def __init__(self, inner: int, **wrong: bool) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            4, [inner, inner], bias=False, shard_names=["gate_proj", "up_proj"]
        )
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(inner, 4, bias=False, **wrong)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class WithoutMetadata(LlamaAttention):
    """Attention to all tokens of a step, as if they were one whole sequence."""

    def forward(self, positions, hidden_states, metadata):
        return super().forward(positions, hidden_states, None)


class Counting(LlamaAttention):
    """Attention that counts the tokens of a step instead of taking their positions."""

    def forward(self, positions, hidden_states, metadata):
        counted = Positions(torch.arange(len(hidden_states)))
        return super().forward(counted, hidden_states, metadata)


@pytest.mark.parametrize("attention", [WithoutMetadata, Counting])
def test_a_model_that_is_right_for_one_whole_sequence_alone_is_found(
    attention: type[LlamaAttention],
) -> None:
    """Without a cache it computes what a right model does, on any number of ranks."""
    layer = type("Layer", (LlamaDecoderLayer,), {"attention_class": attention})
    model = type("Model", (LlamaModel,), {"layer_class": layer})
    wrong = type("WrongForCausalLM", (LlamaForCausalLM,), {"model_class": model})
    configs = model_configs(LlamaForCausalLM)
    with pytest.raises(AssertionError, match=r"(?s)WrongForCausalLM computes .*Pass metadata on"):
        assert_sharding_equivalent(wrong, configs)
    assert assert_sharding_equivalent(LlamaForCausalLM, configs) > 0


class ScaledForCausalLM(LlamaForCausalLM):
    """A model of any dtype whose logits have a scale in float32."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            super().__init__(config)
        finally:
            torch.set_default_dtype(before)
        self.scale = nn.Parameter(torch.empty(1, device="meta", dtype=torch.float32))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (super().compute_logits(hidden) * self.scale).to(hidden.dtype)


class OneSequenceForCausalLM(LlamaForCausalLM):
    """A model that is for whole sequences only."""

    def forward(self, ids, positions):
        return super().forward(ids, positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_right_model_computes_batches_in_the_dtype_of_its_weights(dtype: torch.dtype) -> None:
    """A parameter of the model itself comes first, and may have another dtype than its layers."""
    configs = model_configs(LlamaForCausalLM)
    assert assert_sharding_equivalent(ScaledForCausalLM, configs, dtype) > 0


def test_a_model_without_metadata_computes_no_batches() -> None:
    """No engine can call it, and it is loaded and cut as others are."""
    assert assert_sharding_equivalent(OneSequenceForCausalLM, model_configs(LlamaForCausalLM)) > 0


class Stumbling(LlamaAttention):
    """Attention that fails where it is given metadata."""

    def forward(self, positions, hidden_states, metadata):
        return super().forward(positions, hidden_states, metadata and metadata.missing)


def test_a_model_that_fails_in_a_batch_alone_is_named() -> None:
    """The layer is named, and the law is broken: it is no error of the toolkit."""
    layer = type("Layer", (LlamaDecoderLayer,), {"attention_class": Stumbling})
    model = type("Model", (LlamaModel,), {"layer_class": layer})
    wrong = type("WrongForCausalLM", (LlamaForCausalLM,), {"model_class": model})
    with pytest.raises(AssertionError, match=r"0\.self_attn \(Stumbling\) fails: .*missing"):
        assert_sharding_equivalent(wrong, model_configs(LlamaForCausalLM))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("positions", [1, 2, 6])
def test_a_model_of_few_learned_positions_keeps_the_laws(positions: int) -> None:
    """Sequences of the laws have no more tokens than the model has positions."""
    configs = model_configs(GPT2LMHeadModel, max_position_embeddings=st.just(positions))
    for law in (assert_sharding_equivalent, assert_reload_in_place):
        assert law(GPT2LMHeadModel, configs) > 0


class Forgetful(LlamaAttention):
    """Attention with norms of queries and keys, of which it forgets one."""

    def __init__(self, config, rotary_emb, layer_idx):
        super().__init__(config, rotary_emb, layer_idx)
        self.query_norm, self.key_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def forward(self, positions, hidden_states, metadata):
        self.query_norm(torch.ones(1, self.head_dim))
        return super().forward(positions, hidden_states, metadata)


def test_a_weight_that_no_forward_pass_reads_is_found() -> None:
    """It is loaded like all others, so that only what is computed from shows it."""
    layer = type("Layer", (LlamaDecoderLayer,), {"attention_class": Forgetful})
    model = type("Model", (LlamaModel,), {"layer_class": layer})
    wrong = type("WrongForCausalLM", (LlamaForCausalLM,), {"model_class": model})
    unread = r"does not read model\.layers\.0\.self_attn\.key_norm\.weight, though"
    with pytest.raises(AssertionError, match=unread):
        assert_sharding_equivalent(wrong, model_configs(LlamaForCausalLM))


class Tasks(vLLMModule):
    """A norm for each of two tasks, after one that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = RMSNorm(4)
        self.tasks = nn.ModuleDict({"chat": RMSNorm(4), "code": RMSNorm(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tasks["code"](self.first(x))


class Choosing(vLLMModule):
    """Two experts in a list, of which inputs need one, and parts that are for other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Tasks()])
        self.experts = nn.ModuleList(RMSNorm(4) for _ in range(2))
        self.images = RMSNorm(4)
        self.register_buffer("doubled", torch.zeros(4), persistent=False)
        self.before = nn.ModuleList([nn.LayerNorm(4, device="meta")])

    def process_weights_after_loading(self) -> None:
        self.doubled.copy_(2 * self.before[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[1](self.layers[0](x)) * self.doubled + self.before[0].bias


@pytest.mark.usefixtures("few")
def test_a_weight_for_other_inputs_is_no_mistake() -> None:
    """Layers that do not run, parts outside of lists, and weights that a load computes from."""
    assert assert_sharding_equivalent(Choosing, inputs=x) > 0


class Graph(vLLMModule):
    """A sum over neighbours, by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([RMSNorm(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.layers[0](x))


@pytest.mark.usefixtures("few")
def test_a_module_may_compute_from_tensors_without_strides() -> None:
    """What is noted of an operation are the addresses of those that have some."""
    assert assert_sharding_equivalent(Graph, inputs=x) > 0


class Refusing(vLLMModule):
    """A module that refuses two or more ranks, and does not reduce its output."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        size = tensor_parallel_group().size
        if size > 1:
            raise ShardingError(f"{size} ranks cannot")
        self.down_proj = RowParallelLinear(inner, 4, reduce_results=False)


def test_a_module_that_refuses_every_size_is_found() -> None:
    """A module cannot pass the law of sharding by refusing every size."""
    with pytest.raises(AssertionError, match="every tensor-parallel size but 1 was refused"):
        assert_sharding_equivalent(Refusing, inner=features())


class Half(vLLMModule):
    """A module whose constructor changes the process's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.norm = RMSNorm(4)
            self.up = ColumnParallelLinear(4, 24)
            self.down = RowParallelLinear(24, 4)
        finally:
            torch.set_default_dtype(before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x.bfloat16())))


def test_ranks_are_built_one_after_another() -> None:
    """A constructor may set the process's state without affecting other ranks."""
    assert assert_sharding_equivalent(Half, inputs=x) > 0
    assert torch.get_default_dtype() == torch.float32


class Outputs(vLLMModule):
    """A module whose forward returns nested outputs and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 24, gather_output=True)
        self.again = self.up

    def forward(self, x: torch.Tensor, scale: float) -> dict[str, object]:
        y = self.up(x)
        x.zero_()
        masked = y.masked_fill(y > 0, float("-inf"))
        return {"y": [y * scale, (y > 0,)], "none": None, "masked": masked, "empty": y[:0]}


def test_outputs_and_inputs_of_all_kinds_are_compared() -> None:
    """Nested outputs are flattened, and inputs may be given by name."""
    inputs = {"x": torch.randn(2, 4), "scale": 2.0}
    assert assert_sharding_equivalent(Outputs, inputs=lambda module: inputs) > 0


class Unsplit(vLLMModule):
    """A plain linear layer, beside a parallel one."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        up, down = (8, 16), (16, 8)
        self.up = nn.Linear(*up) if first else ColumnParallelLinear(*up)
        self.down = RowParallelLinear(*down) if first else nn.Linear(*down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x))
        return y


@pytest.mark.parametrize(
    ("first", "named"), [(False, r"Unsplit\.down \(Linear\)"), (True, r"down \(RowParallelLinear")]
)
def test_a_module_that_fails_on_several_ranks_is_named(first: bool, named: str) -> None:
    """Torch's words for it name no layer."""
    expected = rf"on one of \d ranks, .*{named}.*: RuntimeError: mat1 and mat2 .*\n.*nn\.Linear"
    with pytest.raises(AssertionError, match=expected):
        assert_sharding_equivalent(Unsplit, first, inputs=lambda _: (torch.ones(2, 8),))


ONE = MLP(4)
MISUSES = {
    "no function": ("inputs must be a function of the module", {"inputs": (torch.ones(4),)}),
    "a tensor": ("inputs must return a tuple", {"inputs": lambda module: torch.ones(4)}),
    "a plain module": ("must return a new vLLMModule", {"build": lambda inner: torch.nn.ReLU()}),
    "an instance": ("one module twice", {"build": lambda inner: ONE}),
    "no weights": ("SiluAndMul expects no weights", {"build": lambda inner: SiluAndMul()}),
}


@pytest.mark.parametrize(("message", "wrong"), MISUSES.values(), ids=MISUSES)
def test_a_misuse_is_told_in_words(message: str, wrong: dict[str, object]) -> None:
    """The message says which argument is wrong and what to pass."""
    with pytest.raises((TypeError, ValueError), match=message):
        assert_sharding_equivalent(**{"build": MLP, "inner": 4, "inputs": x} | wrong)


def test_random_forwards_are_called_so() -> None:
    """A forward that gives different outputs twice is reported as such."""

    class Noisy(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(())

    with pytest.raises(AssertionError, match="called twice, the unsharded module's output 0"):
        assert_sharding_equivalent(Noisy, inner=4, inputs=x)


def test_laws_and_modules_draw_cases_of_their_own() -> None:
    """Each law and module draws its own cases, and keeps its own failures."""
    drawn: dict[str, list[int]] = {"one": [], "other": []}

    def building(name: str):
        def build(inner: int) -> MLP:
            drawn[name].append(inner)
            return MLP(inner)

        build.__qualname__ = name
        return build

    for name in drawn:
        assert_reads_what_it_keeps(
            building(name), inner=st.integers(1, 10**6).map(lambda n: n % 50 + 1)
        )
    assert drawn["one"] != drawn["other"]
    assert len(set(drawn["one"])) > 6


@pytest.fixture
def few() -> Iterator[None]:
    """Three cases for each law."""
    before = settings.get_current_profile_name()
    settings.register_profile("few", settings.get_profile(before), max_examples=3)
    settings.load_profile("few")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("law", LAWS)
def test_a_right_module_keeps_the_law(law) -> None:
    """A correct module passes, and the law returns the number of cases tried."""
    assert law(MLP, inner=features(), inputs=x) == 3


def test_a_forgotten_reduction_is_found_and_made_small() -> None:
    """Outputs that differ are reported with the smallest failing size."""
    with pytest.raises(AssertionError, match="rank 0 of 2: output 0 differs by") as failed:
        assert_sharding_equivalent(MLP, inner=features(), reduce_results=False, inputs=x)
    notes = "\n".join(failed.value.__notes__)
    assert "Draw 1 (inner): 2" in notes
    assert "Draw 2 (tensor-parallel size): 2" in notes


class RankZero(vLLMModule):
    """A layer whose parameter always has rank 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        group = ColumnParallelLinear(1, size).tp_group
        self.weight = ModelWeightParameter(
            Dim.cut(size, group.size), Dim.whole(2), tp_rank=0, tp_size=group.size,
            dtype=torch.float32,
        )  # fmt: skip


def test_a_wrong_rank_is_found_and_the_parameter_named() -> None:
    """The shapes are right and the values are wrong: reassembled, they are not the checkpoint."""
    with pytest.raises(AssertionError, match="weight over 2 ranks, put together, is not"):
        assert_sharding_equivalent(RankZero, size=features())


class QuantizedFirst(vLLMModule):
    """A right layer that is quantized while it is loaded, before one with a wrong rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.right = ColumnParallelLinear(4, size, bias=False)
        self.right.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
        self.wrong = RankZero(size)


def test_a_wrong_rank_is_found_behind_quantized_weights() -> None:
    """Each tensor is compared, also after those that a conversion changes."""
    with pytest.raises(AssertionError, match=r"wrong\.weight over 2 ranks, put together, is not"):
        assert_sharding_equivalent(QuantizedFirst, size=features())


class Uneven(vLLMModule):
    """A module that some ranks cannot build."""

    def __init__(self) -> None:
        super().__init__()
        group = ColumnParallelLinear(1, 840).tp_group
        self.layer = ColumnParallelLinear(2, 840 + group.rank)


def test_ranks_that_disagree_about_a_size_are_found() -> None:
    """Every rank refuses a size, or none does."""
    with pytest.raises(AssertionError, match="ranks refuses"):
        assert_sharding_equivalent(Uneven)


class Careless(RMSNorm):
    """A norm whose load_weights ignores unknown names."""

    def load_weights(self, weights):
        return super().load_weights([(n, w) for n, w in weights if n == "weight"])


def test_an_override_that_passes_over_names_is_found() -> None:
    """Every name that the checkpoint has is accounted for."""
    found = r"unexpected: reported \[\]|a damaged checkpoint was loaded anew"
    with pytest.raises(AssertionError, match=found):
        assert_accounting_exact(Careless, hidden_size=features())


class Moving(RMSNorm):
    """A norm that takes other memory when it is loaded again, as a stream or with all at once."""

    def __init__(self, streamed: bool) -> None:
        super().__init__(4)
        self.streamed = streamed

    def load_weights(self, weights):
        again = not self.weight.is_meta
        loaded = super().load_weights(weights)
        if again and isinstance(weights, Iterator) == self.streamed:
            self.weight.data = self.weight.data.clone()
        return loaded


@pytest.mark.parametrize("streamed", [True, False])
def test_a_reload_that_moves_tensors_is_found(streamed: bool) -> None:
    """Whichever way the weights are given."""
    with pytest.raises(AssertionError, match=r"weight moved after a (second )?reload"):
        assert_reload_in_place(Moving, streamed, inputs=x)


class Remembering(vLLMModule):
    """A scale by the mean of a weight, as it was when the module first ran."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"))
        self.mean: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = float(self.weight.mean())
        return x * self.mean


def test_what_a_forward_pass_keeps_of_weights_is_found() -> None:
    """The weights of an update are in place, and outputs are still those of the weights before."""
    with pytest.raises(AssertionError, match=r"(?s)after an update, output 0 .*in place"):
        assert_reload_in_place(Remembering, width=4, inputs=x)
    assert assert_reload_in_place(RMSNorm, 4, inputs=x) > 0


class Doubling(vLLMModule):
    """A scale that is computed of a weight anew, in other memory, after each load."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"))
        self.doubled: torch.Tensor | None = None
        self.before: list[torch.Tensor | None] = []  # memory that is not given to another tensor

    def process_weights_after_loading(self) -> None:
        self.before.append(self.doubled)
        self.doubled = self.weight.detach() * 2


def test_an_attribute_that_is_computed_in_other_memory_is_found() -> None:
    """A captured CUDA graph would read the tensor that a load has replaced."""
    with pytest.raises(AssertionError, match="doubled moved after a reload"):
        assert_reload_in_place(Doubling, width=4)


class Sparse(RMSNorm):
    """A norm with a constant that has no address."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.constant = torch.eye(width).to_sparse()


def test_an_attribute_without_an_address_does_not_move() -> None:
    """A sparse tensor is in the memory of others, and has no pointer of its own."""
    assert assert_reload_in_place(Sparse, 4, inputs=x) > 0


class Hoarding(RMSNorm):
    """A norm that keeps the tensors it was given."""

    def load_weights(self, weights):
        self.kept = [*getattr(self, "kept", []), *weights]
        return super().load_weights(self.kept[-1:])


class Pair(vLLMModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = Hoarding(width), Hoarding(width)


def test_an_override_that_keeps_tensors_is_found() -> None:
    """Streamed tensors must be released."""
    with pytest.raises(AssertionError, match="2 streamed tensors are held at a time"):
        assert_memory_bounded(Pair, width=4)


class PlusOne(RMSNorm):
    """A norm whose checkpoint stores its weight minus one."""

    def load_weights(self, weights):
        return super().load_weights((name, self.read(weight) + 1) for name, weight in weights)

    @staticmethod
    def read(weight):
        return weight if isinstance(weight, torch.Tensor) else weight.read()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("law", [assert_sharding_equivalent, assert_order_independent, assert_pure])
def test_an_override_that_transforms_keeps_the_laws(law) -> None:
    """A load_weights may transform values, as long as ranks and orders agree."""
    assert law(PlusOne, 4, inputs=x) > 0


CONSTANTS = {
    "torch's random state": lambda: torch.manual_seed(5),
    "garbage collection": gc.disable,
    "torch's threads": lambda: torch.set_num_threads(3),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("was_set", [False, True])
@pytest.mark.parametrize("setting", CONSTANTS)
def test_a_setting_that_a_load_sets_is_found_whatever_it_was(setting: str, was_set: bool) -> None:
    """An earlier load of the process may have set it; the law leaves all settings as they were."""

    class Setting(RMSNorm):
        def process_weights_after_loading(self) -> None:
            CONSTANTS[setting]()

    def settings_now() -> tuple[object, ...]:
        state = torch.get_rng_state().tolist()
        return (
            state, gc.isenabled(), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.get_default_dtype(),
        )  # fmt: skip

    state, threads, dtype = torch.get_rng_state(), torch.get_num_threads(), torch.float32
    try:
        if was_set:
            CONSTANTS[setting]()
        before = settings_now()
        with pytest.raises(AssertionError, match=rf"loading changed {setting}(\n|$)"):
            assert_pure(Setting, 4)
        assert settings_now() == before
    finally:
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        gc.enable()


class Streaming(MLP):
    """It gives the next load_weights a generator, or a list of the same."""

    as_list = False

    def load_weights(self, weights):
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        renamed = ((name.replace("fc1", "up"), weight) for name, weight in pairs)
        return super().load_weights(list(renamed) if self.as_list else renamed)


@pytest.mark.usefixtures("few")
def test_an_override_that_makes_a_stream_of_a_collection_is_told_so() -> None:
    """Such a module writes before it knows whether the checkpoint fits; a list is checked first."""
    with pytest.raises(AssertionError, match=r"pass a collection on as a list, not as a generator"):
        assert_accounting_exact(Streaming, 8, inputs=x)

    class Listing(Streaming):
        as_list = True

    assert assert_accounting_exact(Listing, 8, inputs=x) > 0


class Blind(RMSNorm):
    """A norm that expects tensors and never handles."""

    def load_weights(self, weights):
        return super().load_weights((name, weight + 1) for name, weight in weights)


def test_an_override_that_does_not_know_handles_is_found() -> None:
    """Weights of a file are handles until they are read."""
    with pytest.raises(TypeError, match="FileHandle"):
        assert_order_independent(Blind, 4)


def test_a_forward_without_inputs_is_asked_for_them() -> None:
    """The arguments of forward are known for language models alone."""
    with pytest.raises(ValueError, match="MLP is no causal language model: pass the arguments"):
        assert_sharding_equivalent(MLP, inner=4)


def test_names_that_resemble_another() -> None:
    """One component more or less, or another one in the place of each."""
    first = {"aa", "", "as", "xa", "A", "0a", " a", "b", "d"}
    second = {"bb", "", "bs", "xb", "B", "0b", " b", "a", "d"}
    assert _resembling("a.b", ["a.b", "d.a"]) == {
        "a.b.", ".a.b", "a.b.b", "a", "b", *(f"{each}.b" for each in first),
        *(f"a.{each}" for each in second),
    }  # fmt: skip


@pytest.mark.usefixtures("few")
def test_values_may_stand_where_strategies_may() -> None:
    """A value that is no strategy is passed to build unchanged."""
    assert assert_sharding_equivalent(MLP, 8, inputs=x) > 0
    assert assert_sharding_equivalent(MLP, st.just(8), inputs=x) > 0


@pytest.mark.usefixtures("few")
def test_settings_say_how_many_cases() -> None:
    """The number of cases comes from Hypothesis' current profile."""
    assert assert_pure(MLP, inner=features(), inputs=x) == 3


def test_without_hypothesis_the_extra_is_named() -> None:
    """Without the extra, the error names it."""
    code = "import sys; sys.modules['hypothesis'] = None; import vllm_module.testing"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert "pip install 'hypothesis>=6.100'" in result.stderr


class Deep(vLLMModule):
    """A module with nothing but layers, which pipeline stages may share."""

    divided_layers = "layers"

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(RMSNorm(2) for _ in range(count))


@pytest.mark.usefixtures("few")
def test_stages_may_differ_by_a_layer() -> None:
    """Four stages have 2, 1, 2 and 1 of six layers: the last has no more than the others."""
    sizes = [len(PipelineStage(rank, 4).layers(6)) for rank in range(4)]
    assert sizes == [2, 1, 2, 1]
    assert_staged(Deep, count=st.just(6))


@pytest.mark.parametrize(("count", "first"), [(4, 3), (4, 1), (5, 2), (6, 4), (6, 2)])
def test_a_stage_with_too_many_layers_is_found(
    count: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages differ by one layer at most, and the last, with the head, has not the more."""
    right = PipelineStage.layers

    def layers(stage: PipelineStage, of: int) -> range:
        if (stage.size, of) != (2, count):
            return right(stage, of)
        return range(first, count) if stage.rank else range(first)

    monkeypatch.setattr(PipelineStage, "layers", layers)  # the fault that is to be found
    with pytest.raises(AssertionError, match=rf"stages have \[{first}, {count - first}\] layers"):
        assert_staged(Deep, count=st.just(count))
