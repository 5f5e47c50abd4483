"""Arguments of vLLM that have no effect here: accepted values, and the errors for others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm_module.base.messages import shorten, unknown_name

# Values that ask for what happens here anyway; ... stands for any value. None is always accepted.
Accepted = Mapping[str, tuple[Any, ...]]

LLM_ARGUMENTS: dict[str, tuple[Any, ...]] = {
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
    "disable_custom_all_reduce": (...,),
    "disable_log_stats": (...,),
    "disable_sliding_window": (False,),
    "enable_chunked_prefill": (True,),
    "enable_lora": (False, True),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (...,),
    "hf_config_path": (),
    "ignore_patterns": ([], ["original/**/*"]),
    "kv_events_config": (),
    "kv_transfer_config": (),
    "limit_mm_per_prompt": ({},),
    "logits_processors": ([],),
    "max_parallel_loading_workers": (...,),
    "max_seq_len_to_capture": (...,),
    "mm_processor_kwargs": ({},),
    "model_loader_extra_config": ({},),
    "num_gpu_blocks_override": (),
    "num_lookahead_slots": (0,),
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
    "task": ("auto", "generate", "embed", "classify", "score"),
    "tokenizer_mode": ("auto", "hf"),
    "use_v2_block_manager": (...,),
    "worker_cls": ("auto",),
}

# The other arguments of vLLM's EngineArgs (0.32), about features that are missing here, with the
# default that is accepted besides None.
_DEFAULTS: tuple[tuple[Any, str], ...] = (
    (
        {},
        "additional_config aux_output_config ec_manager_config eplb_config fault_tolerance_config "
        "ir_op_priority kernel_config mamba_config media_io_kwargs model_class_overrides",
    ),
    (
        False,
        "aggregate_engine_logging allow_deprecated_quantization cudagraph_metrics "
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb "
        "disable_chunked_mm_input enable_cumem_allocator enable_dbo enable_elastic_ep "
        "enable_ep_weight_filter enable_fault_tolerance enable_hc_sp "
        "enable_layerwise_nvtx_tracing enable_logging_iteration_details "
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint "
        "enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds "
        "enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend "
        "enable_shm_tensor_arena enable_tower_connector_lora enable_trace_replay "
        "fail_on_environ_validation fully_sharded_loras interleave_mm_strings jit_monitor_verbose "
        "kv_cache_metrics kv_sharing_fast_prefill language_model_only "
        "long_prefill_token_threshold_adaptive mm_encoder_only numa_bind ray_workers_use_nsight "
        "return_sampling_mask skip_mm_profiling sleep_mode_offload_cudagraph "
        "specialize_active_lora tokens_only use_fp64_gumbel use_replayssm",
    ),
    ("allgather_reducescatter", "all2all_backend"),
    (
        None,
        "collect_detailed_traces cp_kv_cache_interleave_size cpu_distributed_timeout_seconds "
        "cudagraph_capture_sizes custom_histogram_buckets data_parallel_size_local "
        "data_parallel_start_rank dcp_comm_backend dcp_q_replicate default_mm_loras device_ids "
        "diffusion_config disable_cascade_attn disable_hybrid_kv_cache_manager "
        "disable_nccl_for_dp_synchronization distributed_timeout_seconds ec_transfer_config "
        "elastic_ep_max_dp_size enable_batch_sharded_sampling enable_flashinfer_autotune "
        "engram_config gdn_prefill_backend io_processor_plugin kda_decode_backend "
        "kda_prefill_backend kv_offloading_size log_config_file log_level logging_config "
        "lora_target_modules mamba_block_size mamba_ssu_algorithm "
        "max_cudagraph_capture_size max_lora_cls_labels max_num_active_seqs max_num_queued_reqs "
        "max_num_queued_tokens max_num_scheduled_tokens mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "numa_bind_cpus numa_bind_nodes offload_params otlp_traces_endpoint prefix_match_unit "
        "reasoning_config reasoning_parser_plugin safetensors_load_strategy scheduler_cls "
        "show_hidden_metrics_for_version spec_method spec_model spec_tokens video_pruning_rate "
        "watermark_config weight_transfer_config",
    ),
    ([], "cpu_offload_params kv_cache_dtype_skip_layers sleep_preserve_parameter_names"),
    ("mp", "data_parallel_backend"),
    (32, "dbo_decode_token_threshold"),
    (512, "dbo_prefill_token_threshold"),
    (
        1,
        "dcp_kv_cache_interleave_size decode_context_parallel_size nnodes "
        "offload_num_in_group offload_prefetch_step prefill_context_parallel_size "
        "prefill_schedule_interval renderer_num_workers stream_interval",
    ),
    (16, "dp_sync_interval replayssm_buffer_len"),
    ("linear", "expert_placement_strategy"),
    ("warn", "jit_monitor_mode"),
    (0.01, "kv_cache_metrics_sample"),
    ("native", "kv_offloading_backend"),
    (
        "auto",
        "linear_backend lora_dtype mamba_cache_dtype mamba_ssm_cache_dtype mm_processor_device "
        "moe_backend offload_backend sparse_indexer_topk_backend",
    ),
    (
        0,
        "long_prefill_token_threshold mamba_cache_philox_rounds mm_ipc_gpu_memory_gb node_rank "
        "offload_group_size prefix_cache_retention_interval shutdown_timeout ubatch_size",
    ),
    ("triton", "mamba_backend"),
    ("none", "mamba_cache_mode per_request_spec_decode_metrics"),
    ("127.0.0.1", "master_addr"),
    (29501, "master_port"),
    (True, "mm_device_do_normalize scheduler_reserve_full_isl swa_bounded_replay use_tqdm_on_load"),
    (1.5, "mm_encoder_fp8_scale_save_margin"),
    ("weights", "mm_encoder_tp_mode"),
    ("blake3", "mm_hasher_algorithm"),
    (4, "mm_processor_cache_gb"),
    ("lru", "mm_processor_cache_type"),
    (128, "mm_shm_cache_max_object_size_mb"),
    ("direct_rpc", "mm_tensor_ipc"),
    ("", "model_weights reasoning_parser"),
    (2, "optimization_level"),
    ("balanced", "performance_mode"),
    ("sha256", "prefix_caching_hash_algo"),
    ("cpu", "pt_load_map_location"),
    (16777216, "safetensors_prefetch_block_size"),
    (8, "safetensors_prefetch_num_threads"),
    ("evs", "video_pruning_method"),
    (0.0, "watermark"),
)
LLM_ARGUMENTS |= {name: (value,) for value, names in _DEFAULTS for name in names.split()}

# The first value is vLLM's default, which is used where none is given.
SAMPLING_ARGUMENTS: Accepted = {
    "best_of": (None, 1),
    "early_stopping": (False,),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "length_penalty": (1,),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "output_kind": (0, 2),
    "output_text_buffer_length": (0,),
    "prompt_logprob_start": (None,),
    "prompt_logprob_token_ids": (None, []),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (False, ...),
    "skip_reading_prefix_cache": (None, False),
    "stream_interval": (None, 1),
    "thinking_token_budget": (None, -1),
    "trace_decode_token_ids": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False,),
    "watermarking": (None, False),
}

REQUEST_ARGUMENTS: Accepted = {
    "chat_template": (),
    "concurrency_limit": (...,),
    "lora_request": ([],),
    "mm_processor_kwargs": ({},),
    "pooling_params": (),
    "priority": (0,),
}

TOKENIZATION_ARGUMENTS: Accepted = {
    "needs_detokenization": (...,),
    "pad_prompt_tokens": (),
    "padding": (False, "do_not_pad"),
}


def known_arguments(
    what: str, given: Mapping[str, Any], own: Collection[str], accepted: Accepted
) -> dict[str, Any]:
    """Return the arguments that are among ``own``, and drop those with an ``accepted`` value.

    Raises ``ValueError`` for any other value, which is not supported here, and for an unknown name.
    """
    known = {}
    for name, value in given.items():
        if name in own:
            known[name] = value
        elif name in accepted:
            values = accepted[name]
            if value is not None and ... not in values and not _is_among(value, values):
                listed = " or ".join(repr(each) for each in values if each is not None)
                raise ValueError(
                    f"{what}({name}={shorten(value)}) of vLLM is not supported here: leave it out"
                    + (f", or give {listed}" if listed else "")
                )
        else:
            raise ValueError(f"{what} {unknown_name(name, [*own, *accepted])}")
    return known


def check_type(name: str, value: object, expected: str, *types: type) -> None:
    """Raise ``ValueError`` for a value of another type; a bool does not count as an integer."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{name} should be {expected}, got {shorten(value)}")


def _is_among(value: object, values: Collection[Any]) -> bool:
    """Return whether ``value`` is one of ``values``; arrays, which compare by element, are not."""
    try:
        return value in values
    except Exception:
        return False
