"""What vLLM's options mean here that tokserve does not have under that name.

Command lines and arguments that were written for vLLM start this server if they ask for nothing that would change a
result: an option is another's name, has no effect, or is refused with the way to have the same here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokserve.errors import StartError

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
    "max_num_queued_reqs": ForeignOption(same_as="max_queued_requests"),
    "max_num_queued_tokens": ForeignOption(same_as="max_queued_tokens"),
    "skip_tokenizer_init": ForeignOption("flag", same_as="tokens_only"),
}
FLAGS = [
    "aggregate_engine_logging", "async_scheduling", "cudagraph_metrics", "disable_async_output_proc",
    "disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce",
    "disable_frontend_multiprocessing", "disable_hybrid_kv_cache_manager", "disable_log_requests",
    "disable_log_stats", "disable_nccl_for_dp_synchronization", "disable_uvicorn_access_log",
    "enable_batch_sharded_sampling", "enable_chunked_prefill", "enable_cumem_allocator", "enable_dbo", "enable_eplb",
    "enable_expert_parallel", "enable_flash_late_interaction", "enable_layerwise_nvtx_tracing", "enable_log_deltas",
    "enable_log_outputs", "enable_logging_iteration_details", "enable_mfu_metrics", "enable_nccl_comm_suspend",
    "enable_offline_docs", "enable_prompt_tokens_details", "enable_reasoning", 
    "enable_scale_out", "enable_server_load_tracking", "enable_sleep_mode", "enable_tokenizer_info_endpoint",
    "engine_use_ray", "fail_on_environ_validation", "fully_sharded_loras", "jit_monitor_verbose", "kv_cache_metrics",
    "log_error_stack", "multi_step_stream_outputs", "numa_bind", "ray_workers_use_nsight",
    "scheduler_reserve_full_isl", "skip_mm_profiling", "specialize_active_lora", "trust_remote_code",
    "use_tqdm_on_load", "use_v2_block_manager",
]  # fmt: skip
VALUES = [
    "all2all_backend", "attention_backend", "attention_config", "collect_detailed_traces", "compilation_config",
    "cpu_distributed_timeout_seconds", "cpu_offload_gb", "cuda_graph_sizes", "custom_histogram_buckets",
    "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "disable_access_log_for_endpoints",
    "distributed_timeout_seconds", "eplb_config", "expert_placement_strategy", "guided_decoding_backend",
    "h11_max_header_count", "h11_max_incomplete_event_size", "jit_monitor_mode", "kv_cache_metrics_sample",
    "log_config_file", "logging_config", "long_prefill_token_threshold", "lora_extra_vocab_size", "mamba_backend",
    "mamba_block_size", "mamba_cache_mode", "max_context_len_to_capture", "max_cpu_loras", "max_log_len",
    "max_long_partial_prefills", "max_num_partial_prefills", "max_parallel_loading_workers", "max_seq_len_to_capture",
    "mm_encoder_attn_backend", "mm_encoder_tp_mode", "mm_hasher_algorithm", "mm_processor_cache_gb",
    "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "model_loader_extra_config",
    "num_lookahead_slots", "num_scheduler_steps", "offload_backend", "optimization_level", "prefix_caching_hash_algo",
    "pt_load_map_location", "renderer_num_workers", "safetensors_load_strategy", "scheduler_delay_factor",
    "show_hidden_metrics_for_version", "sse_keep_alive_interval", "stream_interval", "swap_space",
    "uvicorn_log_level",
]  # fmt: skip
LISTS = ["cpu_offload_params", "ignore_patterns", "numa_bind_cpus", "numa_bind_nodes", "offload_params"]
HUB = "download the model first and name its directory"
TEMPLATE = "how contents are shown follows from the chat template"
RANKS = "-dp N starts all engines, on the nodes of a Ray cluster with -dpb ray"
OVERRIDES = "use --hf-overrides"
DRAFTS = "use --speculative-config"
CODE = "no code is loaded"
REFUSED = {
    "calculate_kv_scales": ForeignOption("flag", instead="scales are the checkpoint's", harmless=(False,)),
    "chat_template_content_format": ForeignOption(instead=TEMPLATE, harmless=("auto",)),
    "code_revision": ForeignOption(instead=CODE),
    "config_format": ForeignOption(instead="config.json is read", harmless=("auto", "hf")),
    "convert": ForeignOption(instead="use --runner", harmless=("auto", "none")),
    "data_parallel_address": ForeignOption(instead=RANKS),
    "data_parallel_external_lb": ForeignOption("flag", instead=RANKS, harmless=(False,)),
    "data_parallel_hybrid_lb": ForeignOption("flag", instead=RANKS, harmless=(False,)),
    "data_parallel_rank": ForeignOption(instead=RANKS),
    "data_parallel_rpc_port": ForeignOption(instead=RANKS),
    "data_parallel_size_local": ForeignOption(instead=RANKS),
    "data_parallel_start_rank": ForeignOption(instead=RANKS),
    "decode_context_parallel_size": ForeignOption(instead="contexts are not divided", harmless=("1", 1)),
    "disable_fastapi_docs": ForeignOption("flag", instead="a proxy in front can hide /docs", harmless=(False,)),
    "disable_sliding_window": ForeignOption("flag", instead="use --max-model-len", harmless=(False,)),
    "download_dir": ForeignOption(instead="set HF_HOME"),
    "enable_mm_embeds": ForeignOption("flag", instead="send images", harmless=(False,)),
    "enable_prompt_embeds": ForeignOption("flag", instead="prompts are text or token ids", harmless=(False,)),
    "enable_ssl_refresh": ForeignOption("flag", instead="restart the server", harmless=(False,)),
    "exclude_tools_when_tool_choice_none": ForeignOption("flag", instead="leave tools out", harmless=(False,)),
    "hf_config_path": ForeignOption(instead=OVERRIDES),
    "hf_token": ForeignOption(instead="set HF_TOKEN"),
    "kv_cache_dtype_skip_layers": ForeignOption("values", instead="all layers have one type"),
    "limit_concurrency": ForeignOption(instead="use --max-queued-requests"),
    "logits_processors": ForeignOption("values", instead=CODE),
    "lora_dtype": ForeignOption(instead="adapters have the model's dtype", harmless=("auto",)),
    "lora_target_modules": ForeignOption("values", instead="an adapter's own modules are used"),
    "mamba_cache_dtype": ForeignOption(instead="states are float32", harmless=("auto", "float32")),
    "mamba_ssm_cache_dtype": ForeignOption(instead="states are float32", harmless=("auto", "float32")),
    "media_io_kwargs": ForeignOption(instead="use --mm-processor-kwargs"),
    "middleware": ForeignOption(instead=CODE),
    "mm_encoder_only": ForeignOption("flag", instead="encoders serve in the engine", harmless=(False,)),
    "num_gpu_blocks_override": ForeignOption(instead="use --kv-cache-memory-bytes"),
    "num_speculative_tokens": ForeignOption(instead=DRAFTS),
    "prefill_context_parallel_size": ForeignOption(instead="contexts are not divided", harmless=("1", 1)),
    "quantization_config": ForeignOption(instead="use --quantization"),
    "reasoning_parser_plugin": ForeignOption(instead=CODE),
    "response_role": ForeignOption(instead="answers are the assistant's", harmless=("assistant",)),
    "revision": ForeignOption(instead=HUB),
    "rope_scaling": ForeignOption(instead=OVERRIDES),
    "rope_theta": ForeignOption(instead=OVERRIDES),
    "scheduler_cls": ForeignOption(instead=CODE),
    "speculative_model": ForeignOption(instead=DRAFTS),
    "ssl_cert_reqs": ForeignOption(instead="--ssl-ca-certs requires certificates of clients", harmless=("2", 2)),
    "ssl_ciphers": ForeignOption(instead="OpenSSL's defaults are used"),
    "structured_outputs_config": ForeignOption(instead="see --structured-outputs-closed, --grammar-cache-bytes"),
    "task": ForeignOption(instead="use --runner", harmless=("auto", "generate")),
    "tokenizer_mode": ForeignOption(instead="tokenizer.json is read", harmless=("auto", "hf", "fast")),
    "tokenizer_revision": ForeignOption(instead=HUB),
    "tool_parser_plugin": ForeignOption(instead=CODE),
    "tool_server": ForeignOption(instead="tools are the client's"),
    "worker_cls": ForeignOption(instead="see --worker-extension-cls"),
    "worker_use_ray": ForeignOption("flag", instead="use --distributed-executor-backend ray", harmless=(False,)),
}
OPTIONS: dict[str, ForeignOption] = (
    SAME
    | dict.fromkeys(FLAGS, ForeignOption("flag"))
    | dict.fromkeys(VALUES, ForeignOption())
    | dict.fromkeys(LISTS, ForeignOption("values"))
    | REFUSED
)
SYNONYMS: dict[str, dict[str, str]] = {  # of values
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
    for name, value in values.items():
        option = OPTIONS.get(name)
        if option is None:
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


def flags() -> Iterator[tuple[str, Arity]]:
    """Name and arity of every option of vLLM's that is not one of ours."""
    return ((name, option.arity) for name, option in OPTIONS.items())
