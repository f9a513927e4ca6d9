"""What vLLM's options mean here that tokserve does not have under that name.

Command lines and arguments that were written for vLLM start this server if they ask for nothing that would change a
result: an option is another's name, has no effect, or is refused with the way to have the same here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal

from tokserve.base.errors import StartError
from tokserve.config.parsers import REASONING_SYNONYMS, TOOL_SYNONYMS

Arity = Literal["flag", "value", "values"]


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option of vLLM's.  `same_as`: its name here.  `instead`: why any value but the `harmless` ones is refused.
    With neither it has no effect."""

    arity: Arity = "value"
    same_as: str = ""
    instead: str = ""
    harmless: tuple[Any, ...] = ()


SAME = {
    "device_memory_utilization": ForeignOption(same_as="gpu_memory_utilization"),
    "enable_log_requests": ForeignOption("flag", same_as="log_requests"),
    "guided_decoding_disable_additional_properties": ForeignOption("flag", same_as="structured_outputs_closed"),
    "guided_decoding_disable_any_whitespace": ForeignOption("flag", same_as="structured_outputs_compact"),
    "max_num_queued_reqs": ForeignOption(same_as="max_queued_requests"),
    "max_num_queued_tokens": ForeignOption(same_as="max_queued_tokens"),
    "skip_tokenizer_init": ForeignOption("flag", same_as="tokens_only"),
}
FLAGS = [
    "aggregate_engine_logging",
    "allow_deprecated_quantization",
    "async_scheduling",
    "cohere_is_reasoning_model",
    "cudagraph_metrics",
    "dcp_q_replicate",
    "disable_async_output_proc",
    "disable_cascade_attn",
    "disable_chunked_mm_input",
    "disable_custom_all_reduce",
    "disable_frontend_multiprocessing",
    "disable_hybrid_kv_cache_manager",
    "disable_log_requests",
    "disable_log_stats",
    "disable_nccl_for_dp_synchronization",
    "disable_uvicorn_access_log",
    "enable_batch_sharded_sampling",
    "enable_chunked_prefill",
    "enable_cumem_allocator",
    "enable_dbo",
    "enable_ep_weight_filter",
    "enable_eplb",
    "enable_expert_parallel",
    "enable_flash_late_interaction",
    "enable_flashinfer_autotune",
    "enable_hc_sp",
    "enable_layerwise_nvtx_tracing",
    "enable_log_deltas",
    "enable_log_outputs",
    "enable_logging_iteration_details",
    "enable_mamba_shared_prefix_checkpoint",
    "enable_mfu_metrics",
    "enable_mixed_moe_lora_format",
    "enable_mm_processor_stats",
    "enable_nccl_comm_suspend",
    "enable_offline_docs",
    "enable_prompt_tokens_details",
    "enable_reasoning",
    "enable_scale_out",
    "enable_server_load_tracking",
    "enable_shm_tensor_arena",
    "enable_sleep_mode",
    "enable_tokenizer_info_endpoint",
    "engine_use_ray",
    "fail_on_environ_validation",
    "fully_sharded_loras",
    "guided_decoding_disable_fallback",
    "jit_monitor_verbose",
    "kv_cache_metrics",
    "kv_sharing_fast_prefill",
    "log_error_stack",
    "long_prefill_token_threshold_adaptive",
    "mm_device_do_normalize",
    "monokernel",
    "multi_step_stream_outputs",
    "numa_bind",
    "ray_workers_use_nsight",
    "scheduler_reserve_full_isl",
    "skip_mm_profiling",
    "sleep_mode_offload_cudagraph",
    "specialize_active_lora",
    "swa_bounded_replay",
    "trust_remote_code",
    "use_fp64_gumbel",
    "use_replayssm",
    "use_tqdm_on_load",
    "use_v2_block_manager",
]
VALUES = [
    "additional_config",
    "all2all_backend",
    "attention_backend",
    "attention_config",
    "cohere_format",
    "collect_detailed_traces",
    "compilation_config",
    "cp_kv_cache_interleave_size",
    "cpu_distributed_timeout_seconds",
    "cpu_offload_gb",
    "cuda_graph_sizes",
    "custom_histogram_buckets",
    "data_parallel_supervisor_port",
    "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold",
    "dcp_comm_backend",
    "dcp_kv_cache_interleave_size",
    "disable_access_log_for_endpoints",
    "distributed_timeout_seconds",
    "dp_supervisor_probe_failure_threshold",
    "dp_supervisor_probe_interval_s",
    "dp_supervisor_probe_timeout_s",
    "dp_sync_interval",
    "ec_manager_config",
    "elastic_ep_max_dp_size",
    "eplb_config",
    "expert_placement_strategy",
    "fingerprint_mode",
    "gdn_prefill_backend",
    "guided_decoding_backend",
    "h11_max_header_count",
    "h11_max_incomplete_event_size",
    "ir_op_priority",
    "jit_monitor_mode",
    "kda_decode_backend",
    "kda_prefill_backend",
    "kernel_config",
    "kv_cache_metrics_sample",
    "linear_backend",
    "log_config_file",
    "logging_config",
    "long_prefill_token_threshold",
    "lora_extra_vocab_size",
    "mamba_backend",
    "mamba_block_size",
    "mamba_cache_mode",
    "mamba_cache_philox_rounds",
    "mamba_config",
    "mamba_ssu_algorithm",
    "max_context_len_to_capture",
    "max_cpu_loras",
    "max_cudagraph_capture_size",
    "max_log_len",
    "max_long_partial_prefills",
    "max_lora_cls_labels",
    "max_num_active_seqs",
    "max_num_partial_prefills",
    "max_num_scheduled_tokens",
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path",
    "mm_encoder_tp_mode",
    "mm_hasher_algorithm",
    "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_processor_device",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",
    "model_loader_extra_config",
    "moe_backend",
    "num_lookahead_slots",
    "num_scheduler_steps",
    "offload_backend",
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "optimization_level",
    "performance_mode",
    "prefill_schedule_interval",
    "prefix_cache_retention_interval",
    "prefix_caching_hash_algo",
    "prefix_match_unit",
    "pt_load_map_location",
    "renderer_num_workers",
    "replayssm_buffer_len",
    "safetensors_load_strategy",
    "safetensors_prefetch_block_size",
    "safetensors_prefetch_num_threads",
    "scheduler_delay_factor",
    "show_hidden_metrics_for_version",
    "sleep_mode_backend",
    "sparse_indexer_topk_backend",
    "sse_keep_alive_interval",
    "stream_interval",
    "swap_space",
    "ubatch_size",
    "uvicorn_log_level",
    "video_pruning_method",
    "video_pruning_rate",
    "watchdog_config",
    "watermark",
]
LISTS = [
    "cpu_offload_params",
    "cudagraph_capture_sizes",
    "ignore_patterns",
    "numa_bind_cpus",
    "numa_bind_nodes",
    "offload_params",
    "sleep_preserve_parameter_names",
]
HUB = "download the model first and name its directory"
TEMPLATE = "how contents are shown follows from the chat template"
RANKS = "-dp N starts all engines, on the nodes of a Ray cluster with -dpb ray"
OVERRIDES = "use --hf-overrides"
DRAFTS = "use --speculative-config"
CODE = "no code is loaded"
REFUSED = {
    "anthropic_disabled_thinking_effort": ForeignOption(instead="the template decides", harmless=("auto",)),
    "aux_output_config": ForeignOption(instead="see --enable-return-routed-experts"),
    "calculate_kv_scales": ForeignOption("flag", instead="scales are the checkpoint's", harmless=(False,)),
    "chat_template_content_format": ForeignOption(instead=TEMPLATE, harmless=("auto",)),
    "code_revision": ForeignOption(instead=CODE),
    "config_format": ForeignOption(instead="config.json is read", harmless=("auto", "hf")),
    "convert": ForeignOption(instead="use --runner", harmless=("auto", "none")),
    "data_parallel_address": ForeignOption(instead=RANKS),
    "data_parallel_external_lb": ForeignOption("flag", instead=RANKS, harmless=(False,)),
    "data_parallel_hybrid_lb": ForeignOption("flag", instead=RANKS, harmless=(False,)),
    "data_parallel_multi_port_external_lb": ForeignOption("flag", instead=RANKS, harmless=(False,)),
    "data_parallel_rank": ForeignOption(instead=RANKS),
    "data_parallel_rpc_port": ForeignOption(instead=RANKS),
    "data_parallel_size_local": ForeignOption(instead=RANKS),
    "data_parallel_start_rank": ForeignOption(instead=RANKS),
    "decode_context_parallel_size": ForeignOption(instead="contexts are not divided", harmless=("1", 1)),
    "default_mm_loras": ForeignOption(instead="requests name their adapter"),
    "device_ids": ForeignOption("values", instead="set CUDA_VISIBLE_DEVICES"),
    "diffusion_config": ForeignOption(instead="tokens are generated one after the other"),
    "disable_fastapi_docs": ForeignOption("flag", instead="a proxy in front can hide /docs", harmless=(False,)),
    "disable_sliding_window": ForeignOption("flag", instead="use --max-model-len", harmless=(False,)),
    "download_dir": ForeignOption(instead="set HF_HOME"),
    "ec_transfer_config": ForeignOption(instead="encoders serve in the engine"),
    "enable_elastic_ep": ForeignOption("flag", instead=RANKS, harmless=(False,)),
    "enable_fault_tolerance": ForeignOption("flag", instead="use --restart-engine", harmless=(False,)),
    "enable_mamba_cache_stochastic_rounding": ForeignOption("flag", instead="states are float32", harmless=(False,)),
    "enable_mm_embeds": ForeignOption("flag", instead="send images", harmless=(False,)),
    "enable_moe_shared_loras": ForeignOption("flag", instead="an adapter's own modules are used", harmless=(False,)),
    "enable_prompt_embeds": ForeignOption("flag", instead="prompts are text or token ids", harmless=(False,)),
    "enable_ssl_refresh": ForeignOption("flag", instead="restart the server", harmless=(False,)),
    "enable_tower_connector_lora": ForeignOption(
        "flag", instead="an adapter's own modules are used", harmless=(False,)
    ),
    "enable_trace_replay": ForeignOption("flag", instead="send the ids in the prompt", harmless=(False,)),
    "engram_config": ForeignOption(instead="there are no such models"),
    "exclude_tools_when_tool_choice_none": ForeignOption("flag", instead="leave tools out", harmless=(False,)),
    "fault_tolerance_config": ForeignOption(instead="use --restart-engine"),
    "fingerprint_value": ForeignOption(instead="system_fingerprint follows from the options"),
    "grpc_port": ForeignOption(instead="there is HTTP alone"),
    "hf_config_path": ForeignOption(instead=OVERRIDES),
    "hf_token": ForeignOption(instead="set HF_TOKEN"),
    "interleave_mm_strings": ForeignOption("flag", instead=TEMPLATE, harmless=(False,)),
    "io_processor_plugin": ForeignOption(instead=CODE),
    "kv_cache_dtype_skip_layers": ForeignOption("values", instead="all layers have one type"),
    "limit_concurrency": ForeignOption(instead="use --max-queued-requests"),
    "logits_processors": ForeignOption("values", instead=CODE),
    "lora_dtype": ForeignOption(instead="adapters have the model's dtype", harmless=("auto",)),
    "lora_target_modules": ForeignOption("values", instead="an adapter's own modules are used"),
    "mamba_cache_dtype": ForeignOption(instead="states are float32", harmless=("auto", "float32")),
    "mamba_ssm_cache_dtype": ForeignOption(instead="states are float32", harmless=("auto", "float32")),
    "media_io_kwargs": ForeignOption(instead="use --mm-processor-kwargs"),
    "middleware": ForeignOption(instead=CODE),
    "mm_encoder_fp8_scale_path": ForeignOption(instead="encoders have the model's dtype"),
    "mm_encoder_only": ForeignOption("flag", instead="encoders serve in the engine", harmless=(False,)),
    "model_class_overrides": ForeignOption(instead=OVERRIDES),
    "model_weights": ForeignOption(instead="weights are in the model's directory", harmless=("",)),
    "num_gpu_blocks_override": ForeignOption(instead="use --kv-cache-memory-bytes"),
    "num_speculative_tokens": ForeignOption(instead=DRAFTS),
    "prefill_context_parallel_size": ForeignOption(instead="contexts are not divided", harmless=("1", 1)),
    "quantization_config": ForeignOption(instead="use --quantization"),
    "reasoning_config": ForeignOption(instead="use --reasoning-parser"),
    "reasoning_effort_map": ForeignOption(instead="send the effort that the template knows"),
    "reasoning_parser_plugin": ForeignOption(instead=CODE),
    "response_role": ForeignOption(instead="answers are the assistant's", harmless=("assistant",)),
    "revision": ForeignOption(instead=HUB),
    "rope_scaling": ForeignOption(instead=OVERRIDES),
    "rope_theta": ForeignOption(instead=OVERRIDES),
    "scheduler_cls": ForeignOption(instead=CODE),
    "speculative_model": ForeignOption(instead=DRAFTS),
    "ssl_cert_reqs": ForeignOption(instead="--ssl-ca-certs requires certificates of clients", harmless=("2", 2)),
    "ssl_ciphers": ForeignOption(instead="OpenSSL's defaults are used"),
    "task": ForeignOption(instead="use --runner", harmless=("auto", "generate")),
    "tokenizer_mode": ForeignOption(instead="tokenizer.json is read", harmless=("auto", "hf", "fast")),
    "tokenizer_revision": ForeignOption(instead=HUB),
    "tool_server": ForeignOption(instead="tools are the client's"),
    "tool_strict_level": ForeignOption(instead="tools are strict one by one", harmless=("auto",)),
    "trust_request_mm_kwargs": ForeignOption("flag", instead="use --mm-processor-kwargs", harmless=(False,)),
    "watermark_config": ForeignOption(instead="outputs are not watermarked"),
    "worker_cls": ForeignOption(instead="see --worker-extension-cls"),
    "worker_use_ray": ForeignOption("flag", instead="use --distributed-executor-backend ray", harmless=(False,)),
}
OBJECTS: dict[str, dict[str, ForeignOption]] = {  # options that are JSON objects: what their keys mean
    "structured_outputs_config": {
        "backend": ForeignOption(
            instead="one library compiles all forms",
            harmless=("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"),
        ),
        "disable_additional_properties": ForeignOption(same_as="structured_outputs_closed"),
        "disable_any_whitespace": ForeignOption(same_as="structured_outputs_compact"),
        "enable_in_reasoning": ForeignOption(instead="forms are of the answer", harmless=(False,)),
        "reasoning_parser": ForeignOption(same_as="reasoning_parser"),
        "reasoning_parser_plugin": ForeignOption(instead=CODE),
    },
}
OPTIONS: dict[str, ForeignOption] = (
    SAME
    | dict.fromkeys(FLAGS, ForeignOption("flag"))
    | dict.fromkeys(VALUES, ForeignOption())
    | dict.fromkeys(LISTS, ForeignOption("values"))
    | REFUSED
)
SYNONYMS: dict[str, dict[str, str]] = {  # of values; parsers of one format have several names
    "reasoning_parser": REASONING_SYNONYMS,
    "tool_call_parser": TOOL_SYNONYMS,
    "distributed_executor_backend": {"uni": "mp"},
    "dtype": {"half": "float16", "float": "float32"},
    "generation_config": {"vllm": "none"},
    "model_impl": {"vllm": "tokserve"},
    "quantization": {"gptq_marlin": "gptq", "awq_marlin": "awq"},
    "log_level": {name.upper(): name for name in ("debug", "info", "warning", "error")},
}


def own_value(name: str, value: Any) -> Any:
    """The value of the option `name` as it is spelled here."""
    return SYNONYMS.get(name, {}).get(value, value) if isinstance(value, str) else value


def own_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options by their names and values here, and the names of those that have no effect.  Raises StartError."""
    known: dict[str, Any] = {}
    without: list[str] = []
    for name, value, option in _each_option(values):
        if option is None:
            if value is not None or name not in known:
                known[name] = own_value(name, value)
        elif value is None:
            continue
        elif option.same_as:
            if values.get(option.same_as) not in (None, value):
                raise StartError(f"options {name} and {option.same_as} are the same, and their values differ")
            known[option.same_as] = value
        elif option.instead and value not in option.harmless:
            raise StartError(f"option {name} is not supported: {option.instead}")
        else:
            without.append(name)
    return known, without


def _each_option(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, ForeignOption | None]]:
    """Name, value and meaning of each option, and of each key of those that are objects."""
    for name, value in values.items():
        if name not in OBJECTS:
            yield name, value, OPTIONS.get(name)
            continue
        for key, inner in _entries(name, value).items():
            if key not in OBJECTS[name]:
                raise StartError(f"option {name}: unknown key {key!r}; keys are {', '.join(OBJECTS[name])}")
            if inner not in (None, ""):
                yield f"{name}.{key}", inner, OBJECTS[name][key]


def _entries(name: str, value: Any) -> dict[str, Any]:
    """The entries of an object, which may be JSON text or, as in Python, a dataclass.  Raises StartError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise StartError(f"option {name}: not JSON: {error}") from None
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if not isinstance(value, Mapping | None):
        raise StartError(f"option {name}: must be an object, got {value!r}")
    return dict(value or {})


def flags() -> Iterator[tuple[str, Arity]]:
    """Name and arity of every option of vLLM's that is not one of ours."""
    yield from ((name, option.arity) for name, option in OPTIONS.items())
    yield from ((name, "value") for name in OBJECTS)
