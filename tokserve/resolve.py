"""Resolves the options: replaces "auto" and None by values, and refuses combinations that cannot be served.

No option changes afterwards.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import math
import os
from pathlib import Path
from typing import Any

import msgspec

from tokserve import checkpoint, encoders
from tokserve.classifier import is_base, is_classifier
from tokserve.config import (
    BACKENDS,
    DEFAULT_BLOCK_SIZE,
    PACKING,
    Config,
    MediaConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    ServerConfig,
)
from tokserve.cpu_list import cpu_list, cpus_by_node
from tokserve.errors import StartError
from tokserve.params import VLLM_LOGPROBS_MODES

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
GPU_BLOCK_SIZE = 64
LONGEST_CONTEXT = 1 << 25  # tokens: limits the size of tables with a row per position
ASSUMED_CONTEXT = 2048  # tokens, of a config.json that does not say
POSITIONS = ("max_position_embeddings", "n_positions")  # the latter in config.json of GPT-2, GPT-J and their kin
QUANTIZATIONS_AT_LOAD = ("int8", "int4", "fp8", "none")
KEY_VARIABLES = ("TOKSERVE_API_KEY", "VLLM_API_KEY")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
GPU_FILE = Path("/dev/nvidiactl")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def resolve(config: Config) -> Config:
    """The configuration with every "auto" and None that has a value replaced by it.

    Reads config.json and generation_config.json of the checkpoint.  Raises StartError.
    """
    model = config.model
    directory = checkpoint.locate(model.model, weights=model.load_format != "dummy")
    device = _device(config.runtime.device)
    model = _with_images(model, config.media, device)
    hf = checkpoint.hf_config(directory) | (model.hf_overrides or {})
    generation = checkpoint.read_json(directory, "generation_config.json") or {}
    names = config.server.served_model_name or [model.model]
    keys = list(config.server.api_key or [])
    keys += [os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)]
    for name, values in (("api_key", keys), ("admin_api_key", config.server.admin_api_key or [])):
        if any(not key for key in values):
            raise StartError(f"option {name}: must not be empty")
    replace, both_ways = msgspec.structs.replace, encoders.family(hf) is not None
    max_model_len = _max_model_len(model.max_model_len, hf)
    if model.max_model_len is None:
        max_model_len = min(max_model_len, _sentence_length(directory) or max_model_len)
    scheduler = config.scheduler.on_a_gpu() if device == "cuda" else config.scheduler.resolved()
    if both_ways and config.scheduler.max_num_batched_tokens is None:  # a prompt is computed in one step
        scheduler = replace(scheduler, max_num_batched_tokens=max(scheduler.token_budget, max_model_len))
    resolved = replace(
        config,
        model=replace(
            model,
            model=str(directory),
            tokenizer=_tokenizer(config),
            dtype=_dtype(model.dtype, hf),
            quantization=_quantization(model.quantization, hf),
            max_model_len=max_model_len,
            eos_token_ids=_eos(model.eos_token_ids, hf, generation),
            runner=_runner(model.runner, directory, hf),
            logprobs_mode=VLLM_LOGPROBS_MODES.get(model.logprobs_mode, model.logprobs_mode),
        ),
        scheduler=scheduler,
        cache=replace(
            config.cache,
            block_size=config.cache.block_size or _block_size(device),
            enable_prefix_caching=config.cache.enable_prefix_caching and not both_ways,
        ),
        kv=replace(config.kv, kv_events_config=_kv_events(config)),
        runtime=replace(
            config.runtime, device=device, cpu_threads=_cpu_threads(config.runtime, config.parallel, device)
        ),
        server=replace(
            config.server,
            served_model_name=names,
            api_key=keys,
            ui=_ui(config.server),
            allowed_hosts=_allowed_hosts(config.server),
        ),
    )
    _check(resolved)
    if both_ways:
        _check_encoder(resolved)
    return resolved


def _with_images(model: ModelConfig, media: MediaConfig, device: str) -> ModelConfig:
    """The model's options without the vision tower where none is to be served."""
    media.max_images()  # raises StartError
    if not media.language_model_only and device != "cuda":
        return model
    return msgspec.structs.replace(model, hf_overrides=(model.hf_overrides or {}) | {"vision_config": None})


def model_name(config: Config) -> str:
    """The name of a resolved configuration's model for people."""
    return checkpoint.given_name(config.model.model)


def _runner(runner: str, directory: Path, hf: dict[str, Any]) -> Any:
    classifies = is_classifier(hf)
    if runner == "generate" and classifies:
        raise StartError("option runner: the model is a classifier (config.json: architectures), it makes no tokens")
    if runner == "generate" and encoders.family(hf) is not None:
        raise StartError("option runner: the model reads both ways (config.json: architectures), it makes no tokens")
    if runner == "generate" and is_base(hf):
        raise StartError("option runner: the model has no head for tokens (config.json: architectures)")
    if runner != "auto":
        return runner
    pools = classifies or is_base(hf) or encoders.family(hf) is not None or (directory / "modules.json").is_file()
    return "pooling" if pools else "generate"


def _sentence_length(directory: Path) -> int | None:
    """How many tokens sentence-transformers gives this model at most, if the checkpoint says."""
    if not (directory / "modules.json").is_file():
        return None
    length = (checkpoint.read_json(directory, "sentence_bert_config.json") or {}).get("max_seq_length")
    return length if isinstance(length, int) and length > 1 else None


def _check_encoder(config: Config) -> None:
    """Raise StartError for an option that is of no use to a model that reads both ways."""
    if config.runtime.device != "cpu":
        raise StartError("models that read both ways (config.json: architectures) run on a CPU; give --device cpu")
    if config.lora.enable_lora:
        raise StartError("option enable_lora: a model that reads both ways takes no adapters")
    if config.model.model_impl == "transformers":
        raise StartError("option model_impl: a model that reads both ways is not served by transformers' module")
    budget, length = config.scheduler.token_budget, config.model.max_model_len or 0
    if budget < length:
        raise StartError(
            f"option max_num_batched_tokens: {budget} is less than max_model_len {length}: this model computes a "
            "prompt in one step"
        )


def _tokenizer(config: Config) -> str | None:
    """The directory of a tokenizer other than the model's, if it is needed."""
    name = config.model.tokenizer
    if name is None or config.server.tokens_only:
        return name
    return str(checkpoint.locate(name, weights=False, what="tokenizer"))


def _cpu_threads(runtime: RuntimeConfig, parallel: ParallelConfig, device: str) -> int:
    """The number of an engine's threads: as given, or one for each CPU that they are bound to or that this process may
    use; CPUs are divided equally among the engines.  On the nodes of a Ray cluster they must be given."""
    num_engines, allowed = parallel.data_parallel_size, os.sched_getaffinity(0)
    if (option := parallel.on_ray) is not None:
        if runtime.cpu_bind not in ("auto", "none"):
            raise StartError(f"option cpu_bind: CPUs of another node cannot be named ({option} ray)")
        if device == "cpu" and runtime.cpu_threads is None:
            raise StartError(f"{option} ray needs cpu_threads: the CPUs that each engine gets of the cluster")
        return runtime.cpu_threads or 1
    if runtime.cpu_bind in ("auto", "none"):
        return runtime.cpu_threads or max(1, len(allowed) // num_engines)
    cpus = cpu_list(runtime.cpu_bind)
    if len(set(cpus)) < len(cpus) or not allowed.issuperset(cpus):
        raise StartError(
            f"option cpu_bind: expected different CPUs of those that this process may use, got {runtime.cpu_bind!r}"
        )
    if len(cpus) % num_engines:
        raise StartError(f"option cpu_bind: names {len(cpus)} CPUs for {num_engines} engines (data_parallel_size)")
    count = len(cpus) // num_engines
    if runtime.cpu_threads not in (None, count):
        raise StartError(f"option cpu_bind: names {count} CPUs for {runtime.cpu_threads} threads (cpu_threads)")
    return count


def replica_config(config: Config, rank: int) -> Config:
    """The resolved configuration of one of several engines: its CPUs, and its share of the host's free memory."""
    size, runtime, cache = config.parallel.data_parallel_size, config.runtime, config.cache
    replace = msgspec.structs.replace
    if runtime.device == "cpu" and cache.kv_cache_memory_bytes is None:  # all of them look at the same memory
        cache = replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization / size)
    cpus = [] if config.parallel.on_ray else _replica_cpus(runtime, size)
    if cpus:
        count = len(cpus) // size
        rank_cpus = ",".join(map(str, cpus[rank * count : (rank + 1) * count]))
        runtime = replace(runtime, cpu_bind=rank_cpus)
    kv = config.kv
    if kv.events() is not None:
        kv = replace(kv, kv_events_config=(kv.kv_events_config or {}) | {"data_parallel_rank": rank})
    if kv.kv_transfer_config is not None:
        kv = replace(kv, kv_transfer_config=kv.kv_transfer_config | {"data_parallel_rank": rank})
    return replace(config, cache=cache, runtime=runtime, kv=kv)


def rank_config(config: Config, rank: int) -> Config:
    """The engine's resolved configuration for one rank, whose machine it shares with `ranks_here` - 1 others.

    Options that only the server needs, its keys above all, are left out.
    """
    replace, parallel, runtime, cache = msgspec.structs.replace, config.parallel, config.runtime, config.cache
    num_ranks = parallel.ranks_here
    if runtime.device == "cpu":
        if cache.kv_cache_memory_bytes is None:  # all ranks look at the same memory
            cache = replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization / num_ranks)
        runtime = replace(runtime, cpu_threads=max(1, (runtime.cpu_threads or num_ranks) // num_ranks))
        if runtime.cpu_bind not in ("auto", "none"):
            cpus, count = cpu_list(runtime.cpu_bind), runtime.cpu_threads or 1
            first = rank % num_ranks * count
            runtime = replace(runtime, cpu_bind=",".join(map(str, cpus[first : first + count])))
        else:
            runtime = replace(runtime, cpu_bind="none")
    server = replace(config.server, api_key=None, admin_api_key=None)
    return replace(config, runtime=runtime, cache=cache, server=server)


def _replica_cpus(runtime: RuntimeConfig, size: int) -> list[int]:
    """The CPUs to bind the threads of all engines to, one after the other; empty: they are not bound.

    Without a list they are bound where one engine's would be: several memory nodes, and a thread for each CPU.
    """
    if runtime.cpu_bind not in ("auto", "none"):
        return cpu_list(runtime.cpu_bind)
    nodes = cpus_by_node()
    if runtime.cpu_bind == "none" or len(nodes) < 2:
        return []
    cpus = [cpu for node in nodes for cpu in node]
    return cpus if (runtime.cpu_threads or 0) * size == len(cpus) else []


def replica_environment(config: Config, rank: int) -> dict[str, str] | None:
    """The environment of one of several engines, in which it sees GPUs that no other has; None: that of this process.

    Raises StartError if there are fewer GPUs than engines.
    """
    if config.runtime.device != "cuda" or config.parallel.on_ray:
        return None
    size, devices = config.parallel.data_parallel_size, os.environ.get(VISIBLE)
    num_ranks = config.parallel.ranks_here
    if devices is None:
        num_files = len([path for path in GPU_FILE.parent.glob("nvidia*") if path.name[6:].isdigit()])
        visible = [str(index) for index in range(num_files)]
    else:
        visible = [name for name in devices.split(",") if name]
    if len(visible) < size * num_ranks:
        number = "a GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
        raise StartError(f"option data_parallel_size: {size} engines need {number} each, and there are {len(visible)}")
    return dict(os.environ) | {VISIBLE: ",".join(visible[rank * num_ranks : (rank + 1) * num_ranks])}


def reserved_devices(runtime: RuntimeConfig) -> dict[str, int]:
    """What an engine with these options reserves on a node of a Ray cluster, by Ray's names.  Raises
    StartError."""
    if runtime.device == "cuda":
        return {"num_cpus": 1, "num_gpus": 1}
    if runtime.cpu_threads is None:
        raise StartError("give cpu_threads, the CPUs that Ray reserves for each engine, or device cuda")
    return {"num_cpus": runtime.cpu_threads}


def reserved_for_rank(config: Config) -> dict[str, float]:
    """What a rank of an engine with this resolved configuration reserves on a node of a Ray cluster, by Ray's names."""
    if config.runtime.device == "cuda":
        return {"CPU": 1, "GPU": 1}
    return {"CPU": rank_config(config, 0).runtime.cpu_threads or 1}


def ray_address() -> str:
    """Where the Ray cluster is; auto: this machine has a node of it."""
    return os.environ.get("RAY_ADDRESS") or "auto"


def _kv_events(config: Config) -> dict[str, Any] | None:
    """The object with what wildcards stand for: the loopback address if only this machine can reach the server."""
    options, server = config.kv.kv_events_config, config.server
    if config.kv.events() is None or not (server.uds or server.host == "localhost" or _is_loopback(server.host)):
        return options
    return {"interface": LOCAL_HOSTS[1]} | (options or {})


def _ui(server: ServerConfig) -> bool:
    """Whether to serve the status page; by default if only this machine can connect."""
    if server.ui is not None:
        return server.ui
    return server.uds is not None or server.host == "localhost" or _is_loopback(server.host)


def _allowed_hosts(server: ServerConfig) -> list[str]:
    """The allowed Host headers.  A web page in a browser of this machine can reach an address that only this machine
    can reach, under the page's name (DNS rebinding)."""
    if server.allowed_hosts is not None:
        if not all(server.allowed_hosts):
            raise StartError("option allowed_hosts: must not be empty")
        return server.allowed_hosts
    if server.uds is None and (server.host == "localhost" or _is_loopback(server.host)):
        return list(dict.fromkeys([*LOCAL_HOSTS, server.host]))
    return ["*"]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_ranks(config: Config) -> None:
    """The options of an engine's ranks, with each other and with what is not divided."""
    parallel, runtime = config.parallel, config.runtime
    if parallel.node_rank >= parallel.nnodes:
        raise StartError(f"option node_rank: must be below nnodes {parallel.nnodes}, got {parallel.node_rank}")
    if parallel.headless != (parallel.node_rank > 0):
        raise StartError("option headless: is for the machines with a node_rank above 0, and for all of them")
    if parallel.num_ranks % parallel.nnodes:
        raise StartError(
            f"option nnodes: {parallel.num_ranks} ranks cannot be divided among {parallel.nnodes} machines"
        )
    if parallel.nnodes > 1 and parallel.data_parallel_size > 1:
        raise StartError("option nnodes: several engines (data_parallel_size) run on one machine")
    is_local = parallel.master_addr == "localhost" or _is_loopback(parallel.master_addr)
    if parallel.nnodes > 1 and parallel.master_key_file is None and not is_local:
        raise StartError("option master_key_file: is needed, as other machines can reach master_addr")
    if parallel.distributed_executor_backend == "ray":
        if parallel.num_ranks == 1:
            raise StartError(
                "option distributed_executor_backend: Ray places ranks, and tensor_parallel_size and "
                "pipeline_parallel_size are 1; data_parallel_backend ray places engines"
            )
        if parallel.nnodes > 1:
            raise StartError("option nnodes: with distributed_executor_backend ray, Ray knows the machines")
    if parallel.num_ranks == 1:
        return
    if parallel.data_parallel_backend == "ray":
        raise StartError(
            "option data_parallel_backend: engines on a Ray cluster have one rank each; with "
            "distributed_executor_backend ray the engines run here and their ranks on the cluster"
        )
    if (method := config.speculation.resolved().method) in ("self", "draft_model"):
        raise StartError(f"option speculative_config: the method {method} is for a model of one rank")
    if runtime.cpu_bind not in ("auto", "none") and (runtime.cpu_threads or 0) % parallel.ranks_here:
        raise StartError(f"option cpu_bind: names {runtime.cpu_threads} CPUs for {parallel.ranks_here} ranks")


def _check(config: Config) -> None:
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
    server = config.server
    if not all(server.served_model_name or []):
        raise StartError("option served_model_name: must not be empty")
    if server.ssl_ca_certs is not None and server.ssl_certfile is None:
        raise StartError("ssl_ca_certs needs ssl_certfile and ssl_keyfile: without them there is no TLS")
    if (server.ssl_keyfile is None) != (server.ssl_certfile is None):
        raise StartError("ssl_keyfile and ssl_certfile must be given together")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(server, name)
        if path is not None and not Path(path).is_file():
            raise StartError(f"option {name}: no file {path!r}")
    weights = config.weights.weight_transfer_config or {}
    if weights.keys() - {"backend", *PACKING} or weights.get("backend", "disk") not in BACKENDS:
        raise StartError(f'option weight_transfer_config: expected {{"backend": one of {", ".join(BACKENDS)}}}')
    for directory in config.weights.allowed_weight_dirs or []:
        if not Path(directory).is_dir():
            raise StartError(f"option allowed_weight_dirs: no directory {directory!r}")
    if server.otlp_traces_endpoint and not server.otlp_traces_endpoint.startswith(("http://", "https://")):
        raise StartError(f"option otlp_traces_endpoint: expected an http URL, got {server.otlp_traces_endpoint!r}")
    if config.parallel.data_parallel_size > 1 and server.api_server_count > 1:
        raise StartError("data_parallel_size above 1 goes with api_server_count 1")
    if config.parallel.data_parallel_backend == "ray" and server.api_server_count > 1:
        raise StartError("data_parallel_backend ray goes with api_server_count 1")
    text = ("chat_template", server.chat_template), ("reasoning_parser", server.reasoning_parser)
    for name, value in (*text, ("enable_auto_tool_choice", server.enable_auto_tool_choice)):
        if server.tokens_only and value:
            raise StartError(f"{name} has no use with tokens_only")


def _device(device: str) -> Any:
    if device != "auto":
        return device
    return "cuda" if GPU_FILE.exists() and importlib.util.find_spec("triton") else "cpu"


def _block_size(device: str) -> int:
    return GPU_BLOCK_SIZE if device == "cuda" else DEFAULT_BLOCK_SIZE


def _dtype(dtype: str, hf: dict[str, Any]) -> Any:
    checkpoint_dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    name = checkpoint_dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise StartError(f"the checkpoint's dtype is {name!r}; choose one with --dtype: {', '.join(DTYPES)}")
    return name


def _quantization(option: Any, hf: dict[str, Any]) -> Any:
    """The option, without the name of the kind that the checkpoint is of.  Raises StartError if it is of another."""
    if option in (None, *QUANTIZATIONS_AT_LOAD):
        return option
    stored = hf.get("quantization_config") or hf.get("compression_config") or {}
    kind = stored.get("quant_method") if isinstance(stored, dict) else None
    if kind != option:
        stated = "is not quantized" if kind is None else f"is of kind {kind}"
        raise StartError(f"option quantization: the checkpoint {stated}, not {option}; leave the option out")
    return None


def _max_model_len(max_model_len: int | None, hf: dict[str, Any]) -> int:
    if max_model_len is not None and max_model_len > LONGEST_CONTEXT:
        raise StartError(f"option max_model_len: must be at most {LONGEST_CONTEXT}, got {max_model_len}")
    name = next((one for one in POSITIONS if hf.get(one) is not None), None)
    if name is None:
        if max_model_len is None and encoders.family(hf) is not None:  # it has a table of positions, or windows
            raise StartError(f"config.json ({_architecture(hf)}) has no max_position_embeddings; give --max-model-len")
        if max_model_len is None:
            logger.warning(
                "config.json (%s) has no max_position_embeddings: contexts of %d tokens are served, or those of "
                "--max-model-len", _architecture(hf), ASSUMED_CONTEXT,
            )  # fmt: skip
        return max_model_len or ASSUMED_CONTEXT
    limit = hf[name]
    if type(limit) is not int or limit < 2:
        raise StartError(f"config.json: {name} must be an integer of at least 2, found {limit!r}")
    limit -= encoders.first_position(hf)
    if max_model_len is None and limit > LONGEST_CONTEXT:
        raise StartError(
            f"config.json's {name} is {limit}, and at most {LONGEST_CONTEXT} can be served; give --max-model-len"
        )
    if max_model_len is not None and max_model_len > max(limit, _stretched(hf)):
        raise StartError(
            f"max_model_len {max_model_len} is above the checkpoint's {name} {limit}; to go beyond it "
            f"give --hf-overrides '{{\"{name}\": {max_model_len}}}' "
            "(and a rope_scaling, if it needs one)"
        )
    return max_model_len or limit


def _stretched(hf: dict[str, Any]) -> float:
    """The positions that yarn makes of those it says the model was trained on; 0 where it does not."""
    for scaling in (hf.get("rope_scaling"), hf.get("rope_parameters")):
        if isinstance(scaling, dict) and "yarn" in (scaling.get("rope_type"), scaling.get("type")):
            numbers = scaling.get("factor"), scaling.get("original_max_position_embeddings")
            return math.prod(one if isinstance(one, int | float) else 0 for one in numbers)
    return 0


def _architecture(hf: dict[str, Any]) -> str:
    names = hf.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, list) and names else "no architecture"


def _eos(eos_token_ids: list[int] | None, hf: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    """The EOS ids, without those of the checkpoint that are outside of the vocabulary: no token has them."""
    size = hf.get("vocab_size")
    beyond = size if isinstance(size, int) else 1 << 31
    if eos_token_ids is not None:
        if wrong := [token for token in eos_token_ids if not 0 <= token < beyond]:
            raise StartError(f"option eos_token_ids: ids are from 0 to {beyond - 1} (vocab_size), got {wrong[0]}")
        return eos_token_ids
    eos_ids: list[int] = []
    for source in (generation.get("eos_token_id"), hf.get("eos_token_id")):
        ids = source if isinstance(source, list) else [] if source is None else [source]
        if not all(type(token) is int for token in ids):
            raise StartError(f"the checkpoint's eos_token_id must be an id or a list of ids, found {source!r}")
        eos_ids += [token for token in ids if token not in eos_ids and 0 <= token < beyond]
    return eos_ids
