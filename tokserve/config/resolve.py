"""Resolves the options: replaces "auto" and None by values; `option_checks` refuses combinations that cannot be served.

No option changes afterwards.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from pathlib import Path
from typing import Any

import msgspec

from tokserve import checkpoint
from tokserve.base import cgroups, gpus
from tokserve.base.cpu_list import cpu_list
from tokserve.base.errors import StartError
from tokserve.base.rooms import contributions
from tokserve.checkpoint.architectures import encoder_family, first_position, is_base, is_classifier
from tokserve.checkpoint.end_token import end_token_id
from tokserve.config import (
    DEFAULT_BLOCK_SIZE,
    Config,
    LoraConfig,
    MediaConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    ServerConfig,
)
from tokserve.config.engine_config import are_gpus_visible
from tokserve.config.option_checks import check_encoder, check_options, is_local, is_open
from tokserve.config.room_options import refuse_absent_rooms
from tokserve.protocol.params import VLLM_LOGPROBS_MODES

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
GPU_BLOCK_SIZE = 64
LONGEST_CONTEXT = 1 << 25  # tokens: limits the size of tables with a row per position
ASSUMED_CONTEXT = 2048  # tokens, of a config.json that does not say
POSITIONS = ("max_position_embeddings", "n_positions")  # the latter in config.json of GPT-2, GPT-J and their kin
QUANTIZATIONS_AT_LOAD = ("int8", "int4", "fp8", "none")
KEY_VARIABLES = ("TOKSERVE_API_KEY", "VLLM_API_KEY")
OPEN = "host %s: other machines can send requests without a key; --api-key KEY (or TOKSERVE_API_KEY) asks for one"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def resolve(config: Config) -> Config:
    """The configuration with every "auto" and None that has a value replaced by it.  Reads config.json and
    generation_config.json of the checkpoint.  Raises StartError."""
    refuse_absent_rooms(config)
    model, server = config.model, config.server
    directory = checkpoint.locate(model.model, weights=model.load_format != "dummy")
    device = _device(config.runtime.device)
    model = _with_images(model, config.media)
    hf = checkpoint.hf_config(directory) | (model.hf_overrides or {})
    generation = checkpoint.read_json(directory, "generation_config.json") or {}
    names, tokenizer = config.server.served_model_name or [model.model], _tokenizer(config)
    replace, both_ways = msgspec.structs.replace, encoder_family(hf) is not None
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
            tokenizer=tokenizer,
            dtype=_dtype(model.dtype, hf),
            quantization=_quantization(model.quantization, hf),
            max_model_len=max_model_len,
            eos_token_ids=_eos(model.eos_token_ids, hf, generation, Path(tokenizer or directory)),
            runner=_runner(model.runner, directory, hf),
            logprobs_mode=VLLM_LOGPROBS_MODES.get(model.logprobs_mode, model.logprobs_mode),
        ),
        scheduler=scheduler,
        cache=replace(
            config.cache,
            block_size=config.cache.block_size or (GPU_BLOCK_SIZE if device == "cuda" else DEFAULT_BLOCK_SIZE),
            enable_prefix_caching=config.cache.enable_prefix_caching and not both_ways,
            shorten_context=_or(config.cache.shorten_context, model.max_model_len is None),
        ),
        lora=_adapters(config.lora),
        weights=replace(config.weights, allowed_weight_dirs=_with(config.weights.allowed_weight_dirs, directory)),
        kv=replace(config.kv, kv_events_config=_kv_events(config)),
        runtime=replace(
            config.runtime, device=device, cpu_threads=_cpu_threads(config.runtime, config.parallel, device)
        ),
        server=replace(
            server,
            served_model_name=names,
            api_key=_keys(server),
            # by default if only this machine can connect
            ui=server.uds is not None or is_local(server.host) if server.ui is None else server.ui,
            allowed_hosts=_allowed_hosts(server),
        ),
    )
    check_options(resolved)
    for _, check_room in contributions("check"):
        check_room(resolved)
    if both_ways:
        check_encoder(resolved)
    _warn(resolved)
    return resolved


def _warn(resolved: Config) -> None:
    """Say what serves and may not be meant."""
    if is_open(resolved):
        logger.warning(OPEN, resolved.server.host)


def _or(given: bool | None, default: bool) -> bool:
    return default if given is None else given


def _keys(server: ServerConfig) -> list[str]:
    """The API keys of the options and of the environment.  Raises StartError for an empty one."""
    keys = list(server.api_key or [])
    keys += [os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)]
    for name, values in (("api_key", keys), ("admin_api_key", server.admin_api_key or [])):
        if any(not key for key in values):
            raise StartError(f"option {name}: must not be empty")
    return keys


def _adapters(lora: LoraConfig) -> LoraConfig:
    """The adapters of the start as directories, those with hub names downloaded.  Raises StartError."""
    if not lora.lora_modules:
        return lora
    located = [f"{name}={checkpoint.locate_adapter(path)}" for name, path in lora.modules()]
    return msgspec.structs.replace(lora, lora_modules=located)


def _with_images(model: ModelConfig, media: MediaConfig) -> ModelConfig:
    """The model's options without the vision tower where none is to be served."""
    media.max_images()  # raises StartError
    if not media.language_model_only:
        return model
    return msgspec.structs.replace(model, hf_overrides=(model.hf_overrides or {}) | {"vision_config": None})


def model_name(config: Config) -> str:
    """The name of a resolved configuration's model for people."""
    return checkpoint.given_name(config.model.model)


def _runner(runner: str, directory: Path, hf: dict[str, Any]) -> Any:
    classifies = is_classifier(hf)
    if runner == "generate" and classifies:
        raise StartError("option runner: the model is a classifier and cannot generate; use pooling")
    if runner == "generate" and encoder_family(hf) is not None:
        raise StartError("option runner: the model is a bidirectional encoder and cannot generate; use pooling")
    if runner == "generate" and is_base(hf):
        raise StartError("option runner: the checkpoint has no language-model head and cannot generate; use pooling")
    if runner != "auto":
        return runner
    pools = classifies or is_base(hf) or encoder_family(hf) is not None or (directory / "modules.json").is_file()
    return "pooling" if pools else "generate"


def _sentence_length(directory: Path) -> int | None:
    """How many tokens sentence-transformers gives this model at most, if the checkpoint says."""
    if not (directory / "modules.json").is_file():
        return None
    length = (checkpoint.read_json(directory, "sentence_bert_config.json") or {}).get("max_seq_length")
    return length if isinstance(length, int) and length > 1 else None


def _tokenizer(config: Config) -> str | None:
    """The directory of a tokenizer other than the model's, if it is needed."""
    name = config.model.tokenizer
    if name is None or config.server.tokens_only:
        return name
    return str(checkpoint.locate(name, weights=False, what="tokenizer"))


def _cpu_threads(runtime: RuntimeConfig, parallel: ParallelConfig, device: str) -> int:
    """The number of an engine's threads: as given, or one for each CPU that they are bound to or that this process may
    use within its quota; CPUs are divided equally among the engines.  On a Ray cluster they must be given."""
    num_engines, allowed = parallel.data_parallel_size, os.sched_getaffinity(0)
    usable = cgroups.usable_cpus()
    if (option := parallel.on_ray) is not None:
        if runtime.cpu_bind not in ("auto", "none"):
            raise StartError(f"option cpu_bind: CPUs of another node cannot be named ({option} ray)")
        if device == "cpu" and runtime.cpu_threads is None:
            raise StartError(f"{option} ray needs cpu_threads: the CPUs that each engine gets of the cluster")
        return runtime.cpu_threads or 1
    if runtime.cpu_bind in ("auto", "none"):
        if runtime.cpu_threads is None and usable < len(allowed):
            logger.info("a quota of processor time (cgroup) leaves %d of %d CPUs for threads", usable, len(allowed))
        return runtime.cpu_threads or max(1, usable // num_engines)
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


def _kv_events(config: Config) -> dict[str, Any] | None:
    """The object with what wildcards stand for: the loopback address if only this machine can reach the server."""
    options, server = config.kv.kv_events_config, config.server
    if config.kv.events() is None or not (server.uds or is_local(server.host)):
        return options
    return {"interface": LOCAL_HOSTS[1]} | (options or {})


def _allowed_hosts(server: ServerConfig) -> list[str]:
    """The allowed Host headers.  A web page in a browser of this machine can reach an address that only this machine
    can reach, under the page's name (DNS rebinding)."""
    if server.allowed_hosts is not None:
        if not all(server.allowed_hosts):
            raise StartError("option allowed_hosts: must not be empty")
        return server.allowed_hosts
    if server.uds is None and is_local(server.host):
        return list(dict.fromkeys([*LOCAL_HOSTS, server.host]))
    return ["*"]


def _with(directories: list[str] | None, served: Path) -> list[str] | None:
    """The directories that weights may be read from, that of the served model among them: it can be reloaded."""
    return None if directories is None else list(dict.fromkeys([*directories, str(served)]))


def _device(device: str) -> Any:
    if device != "auto":
        return device
    if not gpus.count_nvidia_gpus():
        if gpus.has_amd_gpu():
            logger.warning("this machine has an AMD GPU, which is not supported: serving on the CPU")
        return "cpu"
    if not importlib.util.find_spec("triton"):
        logger.warning("this machine has a GPU, but Triton is not installed (pip install triton): serving on the CPU")
        return "cpu"
    return "cuda" if are_gpus_visible() else "cpu"


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
        if max_model_len is None and encoder_family(hf) is not None:  # it has a table of positions, or windows
            raise StartError(f"config.json ({_architecture(hf)}) has no max_position_embeddings; give --max-model-len")
        if max_model_len is None:
            logger.warning(
                "config.json (%s) has no max_position_embeddings: contexts of %d tokens are served, or those of "
                "--max-model-len",
                _architecture(hf),
                ASSUMED_CONTEXT,
            )
        return max_model_len or ASSUMED_CONTEXT
    limit = hf[name]
    if type(limit) is not int or limit < 2:
        raise StartError(f"config.json: {name} must be an integer of at least 2, found {limit!r}")
    limit -= first_position(hf)
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


def _eos(eos_token_ids: list[int] | None, hf: dict[str, Any], generation: dict[str, Any], tokenizer: Path) -> list[int]:
    """The EOS ids: all that the checkpoint and its tokenizer name, but none outside of the vocabulary."""
    size = hf.get("vocab_size")
    beyond = size if isinstance(size, int) else 1 << 31
    if eos_token_ids is not None:
        if wrong := [token for token in eos_token_ids if not 0 <= token < beyond]:
            raise StartError(f"option eos_token_ids: ids are from 0 to {beyond - 1} (vocab_size), got {wrong[0]}")
        return eos_token_ids
    eos_ids: list[int] = []
    for source in (generation.get("eos_token_id"), hf.get("eos_token_id"), end_token_id(tokenizer)):
        ids = source if isinstance(source, list) else [] if source is None else [source]
        if not all(type(token) is int for token in ids):
            raise StartError(f"the checkpoint's eos_token_id must be an id or a list of ids, found {source!r}")
        eos_ids += [token for token in ids if token not in eos_ids and 0 <= token < beyond]
    return eos_ids
