"""Refuses resolved options that cannot be served together, or that name what is not there."""

from __future__ import annotations

import ipaddress
import os
import re

from tokserve.base.errors import StartError
from tokserve.config import BACKENDS, PACKING, Config, CorsConfig, parsers
from tokserve.config.cors import ANY

HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, 5.6.2
OF_TEXT = (  # options of routes with text
    "chat_template",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "reasoning_parser",
    "tool_call_parser",
)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")  # RFC 6454, 6.2


def check_options(config: Config) -> None:
    """Raise StartError for options that cannot be served together, or name what is not there."""
    _check_ranks(config)
    model = config.model
    config.profiler.resolved()
    config.kv.events()
    config.kv.store()
    transfer = config.kv.transfer()
    if transfer is not None:
        transfer.key()
    config.speculation.resolved()
    if model.quantize_lm_head and model.head_dtype != "auto":
        raise StartError("quantize_lm_head and head_dtype exclude each other")
    if model.quantization_activations and (model.quantization in ("fp8", "none") or config.runtime.device != "cpu"):
        raise StartError("quantization_activations is for integer weights on a CPU")
    runtime = config.runtime
    for name, value in (("cpu_arithmetic", runtime.cpu_arithmetic != "auto"), ("cpu_kernels", runtime.cpu_kernels)):
        if value and runtime.device != "cpu":
            raise StartError(f"option {name} is for a CPU, and the device is {runtime.device}")
    if config.cache.kv_cache_dtype != "auto" and config.runtime.device == "cpu":
        raise StartError(f"kv_cache_dtype {config.cache.kv_cache_dtype} needs a GPU; on a CPU leave it at auto")
    if model.max_model_len is not None and model.max_model_len < 2:
        raise StartError("option max_model_len: must be at least 2, for a token of prompt and one of output")
    if config.lora.modules() and not config.lora.enable_lora:
        raise StartError("lora_modules needs enable_lora")
    _check_server(config)


def _check_server(config: Config) -> None:
    """The options of the HTTP server, of the weights that it may take, and of the processes that share its port."""
    server, tls, logs = config.server, config.tls, config.logs
    if not all(server.served_model_name or []):
        raise StartError("option served_model_name: must not be empty")
    if not server.host:
        raise StartError("option host: must not be empty; 0.0.0.0 stands for all addresses of this machine")
    if server.uds == "":
        raise StartError("option uds: must not be empty")
    if server.client_header is not None and not HEADER_NAME.fullmatch(server.client_header):
        raise StartError(f"option client_header: {server.client_header!r} is not the name of a header")
    if tls.ssl_ca_certs is not None and tls.ssl_certfile is None:
        raise StartError("ssl_ca_certs needs ssl_certfile and ssl_keyfile: without them there is no TLS")
    if (tls.ssl_keyfile is None) != (tls.ssl_certfile is None):
        raise StartError("ssl_keyfile and ssl_certfile must be given together")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(tls, name)
        if path is not None and not os.path.isfile(path):  # False for a name that is too long
            raise StartError(f"option {name}: no file {path!r}")
    _check_cors(config.cors)
    weights = config.weights.weight_transfer_config or {}
    if weights.keys() - {"backend", *PACKING} or weights.get("backend", "disk") not in BACKENDS:
        raise StartError(f'option weight_transfer_config: expected {{"backend": one of {", ".join(BACKENDS)}}}')
    for directory in config.weights.allowed_weight_dirs or []:
        if not os.path.isdir(directory):
            raise StartError(f"option allowed_weight_dirs: no directory {directory!r}")
    if logs.otlp_traces_endpoint and not logs.otlp_traces_endpoint.startswith(("http://", "https://")):
        raise StartError(f"option otlp_traces_endpoint: expected an http URL, got {logs.otlp_traces_endpoint!r}")
    if config.parallel.data_parallel_size > 1 and server.api_server_count > 1:
        raise StartError("data_parallel_size above 1 requires api_server_count 1")
    if config.parallel.data_parallel_backend == "ray" and server.api_server_count > 1:
        raise StartError("data_parallel_backend ray requires api_server_count 1")
    if server.tool_parser_plugin is None:  # whose names are known when it is loaded
        parsers.check_parsers(server.tool_call_parser, server.reasoning_parser)
    for name in OF_TEXT if server.tokens_only else ():
        if (value := getattr(server, name)) and value not in ("auto", "none"):
            raise StartError(f"{name} has no effect with tokens_only: leave it out")


def _check_cors(cors: CorsConfig) -> None:
    """Origins are as browsers send them: a path or a slash at the end would match none."""
    if cors.allowed_origins is None:
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(cors, name):
                raise StartError(f"option {name} needs allowed_origins")
    for origin in cors.allowed_origins or []:
        if origin not in (ANY, "null") and not ORIGIN.fullmatch(origin):
            raise StartError(
                f"option allowed_origins: {origin!r} is not an origin: http://HOST:PORT without a path, or *"
            )


def _check_ranks(config: Config) -> None:
    """The options of an engine's ranks, with each other and with what is not divided."""
    parallel, runtime = config.parallel, config.runtime
    if parallel.node_rank >= parallel.nnodes:
        raise StartError(f"option node_rank: must be below nnodes {parallel.nnodes}, got {parallel.node_rank}")
    if parallel.headless != (parallel.node_rank > 0):
        raise StartError("option headless: must be given on the machines with a node_rank above 0, and only there")
    if parallel.num_ranks % parallel.nnodes:
        raise StartError(
            f"option nnodes: {parallel.num_ranks} ranks cannot be divided among {parallel.nnodes} machines"
        )
    if parallel.nnodes > 1 and parallel.data_parallel_size > 1:
        raise StartError("option nnodes: must be 1 with data_parallel_size above 1: several engines run on one machine")
    if parallel.nnodes > 1 and parallel.master_key_file is None and not is_local(parallel.master_addr):
        raise StartError("option master_key_file: is required, because other machines can reach master_addr")
    if parallel.distributed_executor_backend == "ray":
        if parallel.num_ranks == 1:
            raise StartError(
                "option distributed_executor_backend: Ray places ranks, and tensor_parallel_size and "
                "pipeline_parallel_size are 1; data_parallel_backend ray places engines"
            )
        if parallel.nnodes > 1:
            raise StartError("option nnodes: Ray chooses the machines (distributed_executor_backend ray): leave it out")
    if parallel.num_ranks == 1:
        return
    if parallel.data_parallel_backend == "ray":
        raise StartError(
            "option data_parallel_backend: engines on a Ray cluster have one rank each; with "
            "distributed_executor_backend ray the engines run here and their ranks on the cluster"
        )
    if (speculation := config.speculation.resolved()).draws:
        raise StartError(f"option speculative_config: the method {speculation.method} is for a model of one rank")
    if runtime.cpu_bind not in ("auto", "none") and (runtime.cpu_threads or 0) % parallel.ranks_here:
        raise StartError(f"option cpu_bind: names {runtime.cpu_threads} CPUs for {parallel.ranks_here} ranks")


def check_encoder(config: Config) -> None:
    """Raise StartError for an option that is of no use to a model that reads both ways."""
    if config.lora.enable_lora:
        raise StartError("option enable_lora: adapters are not supported for a bidirectional encoder")
    if config.model.model_impl == "transformers":
        raise StartError("option model_impl: transformers is not supported for a bidirectional encoder")
    budget, length = config.scheduler.token_budget, config.model.max_model_len or 0
    if budget < length:
        raise StartError(
            f"option max_num_batched_tokens: {budget} is less than max_model_len {length}: this model computes a "
            "prompt in one step"
        )


def is_open(config: Config) -> bool:
    """Whether clients on other machines need neither a key nor a certificate."""
    server = config.server
    return not (server.uds or is_local(server.host) or server.api_key or config.tls.ssl_ca_certs)


def is_local(host: str) -> bool:
    """Whether a host is one that only its own machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
