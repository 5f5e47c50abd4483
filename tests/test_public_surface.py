"""The names and signatures that users write. A change of them belongs in CHANGELOG.md."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vllm_module
from vllm_module import layers

Run = Callable[..., subprocess.CompletedProcess[str]]  # run_with_torch of conftest.py
PUBLIC = [
    "LLM",
    "AsyncLLM",
    "BasevLLMParameter",
    "BeamSearchParams",
    "CompletionOutput",
    "DeviceConfig",
    "EngineArgs",
    "LoRARequest",
    "LoadConfig",
    "ModelConfig",
    "PoolingParams",
    "QuantizationConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeightLoadError",
    "get_model",
    "register_model",
    "register_source",
    "tensor_parallel",
    "vLLMModule",
]

SIGNATURES = """
get_model(*, model_config, load_config=None, device_config=None)
register_model(architecture, model)
register_source(scheme, opener)
tensor_parallel(*, rank=None, size=None, group=None)
vLLMModule.load_weights(self, weights)
vLLMModule.update_weights(self, weights)
vLLMModule.plan_weights(self, weights)
vLLMModule.sleep(self)
vLLMModule.process_weights_after_loading(self)
LLM(model, *, revision=None, dtype='auto', quantization=None, max_model_len=None,
    hf_overrides=None, model_code=None, download_dir=None, hf_token=None,
    enable_expert_parallel=False, num_redundant_experts=0, model_impl='auto',
    trust_remote_code=False, tokenizer=None, tokenizer_revision=None, skip_tokenizer_init=False,
    chat_template=None, seed=0, max_logprobs=20, generation_config='auto',
    override_generation_config=None, device='auto', load_format=None, load_config=None, **engine)
LLM.from_engine_args(engine_args)
LLM.get_tokenizer(self)
LLM.get_default_sampling_params(self)
LLM.generate(self, prompts, sampling_params=None, use_tqdm=True, *, lora_request=None,
    tokenization_kwargs=None, **options)
LLM.chat(self, messages, sampling_params=None, use_tqdm=True, *, chat_template=None,
    add_generation_prompt=True, continue_final_message=False, tools=None,
    chat_template_kwargs=None, chat_template_content_format='auto', lora_request=None,
    tokenization_kwargs=None, **options)
LLM.load_adapter(self, name, path)
LLM.unload_adapter(self, name)
LLM.update_adapter(self, name, weights)
LLM.list_adapters(self)
LLM.beam_search(self, prompts, params, *, use_tqdm=False, **options)
LLM.get_metrics(self)
LLM.stream(self, prompt, sampling_params=None)
LLM.embed(self, prompts, *, normalize=True, pooling=None, truncate=False, use_tqdm=True,
    pooling_params=None, tokenization_kwargs=None, **options)
LLM.encode(self, prompts, pooling_params=None, *, pooling_task=None, truncate=False,
    use_tqdm=True, tokenization_kwargs=None, **options)
LLM.classify(self, prompts, *, pooling_params=None, truncate=False, use_tqdm=True,
    tokenization_kwargs=None, **options)
LLM.score(self, data_1, data_2, /, *, pooling_params=None, truncate=False, use_tqdm=True,
    tokenization_kwargs=None, **options)
LLM.rerank(self, query, documents, *, top_n=None, **options)
LLM.apply_model(self, func)
LLM.reset_prefix_cache(self, reset_running_requests=False, reset_connector=False)
LLM.update_weights(self, weights, *, digests=None, weight_version=None)
LLM.sleep(self, level=1, **options)
LLM.wake_up(self, tags=None)
LLM.collective_rpc(self, method, timeout=None, args=(), kwargs=None)
LLM.reload_weights(self)
LLM.layout(self, source=None)
LLM.close(self)
AsyncLLM(model, *, max_waiting=1024, **arguments)
AsyncLLM.generate(self, prompt, sampling_params=None, request_id=None, *, every_token=True)
AsyncLLM.serve(self, prompts, sampling_params=None, request_id=None, *, every_token=False)
AsyncLLM.call(self, function)
AsyncLLM.abort(self, request_id)
AsyncLLM.pause(self, mode='abort', *, clear_cache=True)
AsyncLLM.resume(self)
AsyncLLM.update_weights(self, weights, *, digests=None, weight_version=None)
AsyncLLM.sleep(self, level=1, mode='abort')
AsyncLLM.wake_up(self, tags=None)
AsyncLLM.reset_prefix_cache(self, reset_running_requests=False, reset_connector=False)
AsyncLLM.collective_rpc(self, method, timeout=None, args=(), kwargs=None)
AsyncLLM.embed(self, prompts, **options)
AsyncLLM.check_health(self)
AsyncLLM.close(self)
SamplingParams(*positional, n=1, presence_penalty=0.0, frequency_penalty=0.0,
    repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None,
    stop=<factory>, stop_token_ids=<factory>, ignore_eos=False, max_tokens=16, min_tokens=0,
    logprobs=None, prompt_logprobs=None, detokenize=True, skip_special_tokens=True,
    spaces_between_special_tokens=True, include_stop_str_in_output=False, logit_bias=None,
    allowed_token_ids=None, structured_outputs=None, extra_args=None, bad_words=<factory>)
StructuredOutputsParams(*, json=None, regex=None, choice=None, grammar=None, json_object=None)
PoolingParams(use_activation=None, dimensions=None)
layout.layout_of_state_dict(state_dict, group=None, names=None)
weights.find_changes(old, new)
weights.write_update(path, weights, *, version, after=None, digests=False)
weights.open_update(path)
BeamSearchParams(beam_width, max_tokens, ignore_eos=False, temperature=0.0, length_penalty=1.0,
    include_stop_str_in_output=False, skip_special_tokens=True)
"""

LAYERS = """
Attention(num_heads, head_size, scale=None, num_kv_heads=None, sliding_window=None,
    softcap=None, alibi_slopes=None)
AttentionMetadata(slot_mapping, block_tables, context_lens, query_start_loc, max_query_len, *,
    state_slots=None)
CausalConv1d(channels, width, bias, silu=True)
ColumnParallelLinear(input_size, output_size, bias=True, gather_output=False,
    skip_bias_add=False, params_dtype=None, *, output=None)
DecayingLayer(heads)
EncoderAttention(num_heads, head_size, scale=None)
FusedMoE(num_experts, top_k, hidden_size, intermediate_size, params_dtype=None, renormalize=True,
    use_grouped_topk=False, num_expert_group=None, topk_group=None, scoring_func='softmax',
    e_score_correction_bias=None, routed_scaling_factor=1.0, activation='silu', bias=False,
    apply_router_weight_on_input=False, *, shard_names=('gate_proj', 'up_proj', 'down_proj'),
    block=None, transposed=False, interleaved=False, packed=True)
GatedDeltaNet(hidden_size, num_key_heads, num_value_heads, key_dim, value_dim, conv_kernel=4,
    eps=1e-06, stored='by_head', negative_eigenvalues=False)
GatedRMSNorm(hidden_size, eps=1e-06, params_dtype=None, weight_offset=None)
GeluAndMul(approximate='none')
GroupedGatedRMSNorm(hidden_size, groups, eps, norm_before_gate=False)
LayerNorm(hidden_size, eps=1e-05, bias=True, params_dtype=None)
MLAAttention(num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, scale=None)
MLAHeadProjection(kv_lora_rank, num_heads, head_dim, transposed_product=False, params_dtype=None)
MLAUpProjection(kv_lora_rank, num_heads, qk_nope_head_dim, v_head_dim, params_dtype=None)
Mamba2Mixer(hidden_size, num_heads, head_dim, n_groups, state_size, conv_kernel=4, eps=1e-05,
    bias=False, conv_bias=True, norm=True, norm_before_gate=False, time_step_limit=(0.0, inf))
MergedColumnParallelLinear(input_size, output_sizes, bias=True, gather_output=False,
    skip_bias_add=False, params_dtype=None, *, shard_names)
MergedReplicatedLinear(input_size, output_sizes, bias=True, skip_bias_add=False, params_dtype=None,
    *, shard_names)
ParallelLMHead(num_embeddings, embedding_dim, bias=False, params_dtype=None, padding_size=64)
PerHeadLayerNorm(slot, head_size, eps=1e-05, params_dtype=None)
Positions(tensor)
QKVParallelLinear(hidden_size, head_size, total_num_heads, total_num_kv_heads=None, bias=True,
    skip_bias_add=False, params_dtype=None, *, shard_names=('q_proj', 'k_proj', 'v_proj'),
    stored_rotary_pairs=False, groups=None)
RMSNorm(hidden_size, eps=1e-06, params_dtype=None, weight_offset=None)
RecurrentLayer()
ReplicatedLinear(input_size, output_size, bias=True, skip_bias_add=False, params_dtype=None, *,
    output=None)
RotaryEmbedding(head_size, max_position, base=10000.0, scaling=None, rotary_dim=None,
    is_neox_style=True, max_model_len=None)
Router(hidden_size, num_experts, bias=False, params_dtype=None, *, e_score_correction_bias=False)
RowParallelLinear(input_size, output_size, bias=True, input_is_parallel=True,
    skip_bias_add=False, params_dtype=None, reduce_results=True)
ShardedRMSNorm(slot, eps=1e-06, params_dtype=None, weight_offset=None)
SiluAndMul()
SwigluOAIAndMul(alpha=1.702, limit=7.0)
VocabParallelEmbedding(num_embeddings, embedding_dim, params_dtype=None, padding_size=64)
add_up_projections(module, kv_lora_rank, num_heads, qk_nope_head_dim, v_head_dim, *, apart)
fuse(model)
get_act(name)
get_act_and_mul(name)
layer_kind(config, layer)
layer_sliding_window(config, layer)
"""


def frozen(signatures: str) -> dict[str, str]:
    """Return the parameters by name; an indented line continues the one before."""
    lines = signatures.strip().replace("\n    ", " ").splitlines()
    return {name: f"({rest}" for name, _, rest in (line.partition("(") for line in lines)}


def parameters(function: Callable[..., Any]) -> str:
    """Return the names and defaults of a signature, without its types."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def test_public_names_are_frozen() -> None:
    """The package exports these names and no other."""
    assert vllm_module.__all__ == PUBLIC
    assert sorted(layers.__all__) == sorted(frozen(LAYERS))


@pytest.mark.parametrize("path", frozen(SIGNATURES))
def test_signatures_are_frozen(path: str) -> None:
    """Parameter names, their order and defaults stay as users wrote them."""
    name, _, method = path.partition(".")
    function = getattr(vllm_module, name)
    if method:
        function = getattr(function, method)
    assert parameters(function) == frozen(SIGNATURES)[path]


@pytest.mark.parametrize("name", frozen(LAYERS))
def test_layers_signatures_are_frozen(name: str) -> None:
    """A model author's constructor calls keep working."""
    assert parameters(getattr(layers, name)) == frozen(LAYERS)[name]


def test_import_is_light(run_with_torch: Run) -> None:
    """Nothing is imported that only text, downloads or commands need, nor torch's compiler."""
    heavy = ("huggingface_hub", "rich", "tokenizers", "transformers", "typer")
    code = f"""
import sys, vllm_module
print(*(name for name in {heavy} if name in sys.modules))
from vllm_module import LLM, get_model, layers
assert "vllm_module.kernels.matmul.gguf_codebooks" in sys.modules
print(*(name for name in ("torch._dynamo", "transformers") if name in sys.modules))
"""
    done = run_with_torch(code)
    assert (done.stdout.split(), done.returncode) == ([], 0), done.stderr


def test_quantizing_per_tensor_imports_no_compiler(run_with_torch: Run) -> None:
    """That import takes seconds; it kept the first model alive until a garbage collection."""
    code = """
import sys, torch
from vllm_module.layers import MergedColumnParallelLinear
from vllm_module.quantization import ONLINE, EightBitMethod
layer = MergedColumnParallelLinear(4, [3, 5], bias=False, shard_names=["gate", "up"])
layer.quantize(EightBitMethod(ONLINE["fp8_per_tensor"]))
layer.load_weights({f"{name}.weight": torch.ones(n, 4) for name, n in (("gate", 3), ("up", 5))})
print("torch._dynamo" in sys.modules)
"""
    assert run_with_torch(code).stdout.split() == ["False"]


@pytest.mark.parametrize("package", ["vllm_module", "vllm_module.weights"])
def test_lazy_names_are_those_that_type_checkers_see(package: str) -> None:
    """The names of a package are the same when it runs and under TYPE_CHECKING, from one module."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (declared,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {
        alias.name: node.module
        for node in declared.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (table,) = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    assert ast.literal_eval(table) == homes
    assert sorted(module.__all__) == sorted(homes.keys() - {"__version__"})
    assert set(homes) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'get_modle'"):
        _ = module.get_modle


def test_version() -> None:
    """The package's version is the installed one."""
    assert vllm_module.__version__ == importlib.metadata.version("vllm-module")
