"""Arguments of vLLM that mean nothing here: which values of them are accepted, and what is said."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm_module.config import unknown_name
from vllm_module.messages import shorten

# The values that ask for what happens here anyway; ... stands for any value. None is one always.
Accepted = Mapping[str, tuple[Any, ...]]

LLM_ARGUMENTS: Accepted = {
    "allowed_local_media_path": ("",),
    "allowed_media_domains": ([],),
    "attention_backend": (),
    "attention_config": ({},),
    "calculate_kv_scales": (False,),
    "code_revision": (),
    "compilation_config": ({},),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": (...,),
    "disable_log_stats": (...,),
    "disable_sliding_window": (False,),
    "distributed_executor_backend": ("mp", "uni"),
    "enable_chunked_prefill": (True,),
    "enable_eplb": (False,),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "enable_return_routed_experts": (False,),
    "enable_sleep_mode": (...,),
    "hf_config_path": (),
    "ignore_patterns": ([],),
    "kv_events_config": (),
    "kv_transfer_config": (),
    "limit_mm_per_prompt": ({},),
    "logits_processors": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "max_parallel_loading_workers": (...,),
    "max_seq_len_to_capture": (...,),
    "mm_processor_kwargs": ({},),
    "model_impl": ("auto", "vllm"),
    "model_loader_extra_config": ({},),
    "num_gpu_blocks_override": (),
    "num_lookahead_slots": (0,),
    "override_generation_config": ({},),
    "pipeline_parallel_size": (1,),
    "pooler_config": (),
    "preemption_mode": ("recompute",),
    "profiler_config": ({},),
    "quantization_config": (),
    "rope_scaling": (),
    "rope_theta": (),
    "runner": ("auto", "generate", "pooling"),
    "scheduling_policy": ("fcfs",),
    "served_model_name": (...,),
    "speculative_config": (),
    "structured_outputs_config": ({},),
    "task": ("auto", "generate", "embed"),
    "tokenizer_mode": ("auto", "hf"),
    "use_v2_block_manager": (...,),
    "worker_cls": ("auto",),
    "worker_extension_cls": ("",),
}

SAMPLING_ARGUMENTS: Accepted = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "guided_decoding": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "output_kind": (0, 2),
    "prompt_logprob_start": (),
    "prompt_logprob_token_ids": ([],),
    "repetition_detection": (),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (...,),
    "skip_reading_prefix_cache": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "trace_decode_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def known_arguments(
    what: str, given: Mapping[str, Any], own: Collection[str], accepted: Accepted
) -> dict[str, Any]:
    """Return the arguments that are among ``own``; leave out those with an ``accepted`` value.

    Raises ``ValueError`` for another value, which is not supported here, and for an unknown name.
    """
    known = {}
    for name, value in given.items():
        if name in own:
            known[name] = value
        elif name in accepted:
            values = accepted[name]
            if value is not None and ... not in values and not _is_among(value, values):
                listed = " or ".join(map(repr, values))
                raise ValueError(
                    f"{what}({name}={shorten(value)}) of vLLM is not supported here: leave it out"
                    + (f", or give {listed}" if listed else "")
                )
        else:
            raise ValueError(f"{what} {unknown_name(name, [*own, *accepted])}")
    return known


def check_type(name: str, value: object, expected: str, *types: type) -> None:
    """Raise ``ValueError`` for a value of another type; a bool is no integer."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{name} should be {expected}, got {shorten(value)}")


def _is_among(value: object, values: Collection[Any]) -> bool:
    """Tell whether ``value`` is one of ``values``; arrays, which compare by element, are not."""
    try:
        return value in values
    except Exception:
        return False
