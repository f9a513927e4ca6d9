"""Start-up: binds the ops, loads the weights, takes the KV cache's memory, warms up and captures steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tokserve import checkpoint, ops
from tokserve.base.errors import NotBuiltIn, StartError
from tokserve.base.memory import gib, give_back
from tokserve.base.rooms import contributions, part
from tokserve.checkpoint.architectures import is_classifier
from tokserve.checkpoint.text_parts import PART_OF
from tokserve.config import Config, ModelConfig, RuntimeConfig
from tokserve.layers.quant import STORED_INTEGERS
from tokserve.models import load as models
from tokserve.models.decoder import Decoder, DecoderSpec
from tokserve.models.registry import decoder_spec, is_known
from tokserve.ops.arithmetic import FMA, CpuKernels, choose_kernels
from tokserve.protocol.column_table import asked_columns
from tokserve.protocol.images import KIND, ImageFormat
from tokserve.protocol.kv_spec import StateSpec
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DRAWN, DeviceFacts, NewRow, StepPlan
from tokserve.runner import device, kvcache
from tokserve.runner.backend import Backend, Draft
from tokserve.runner.device import Accelerator, Device
from tokserve.runner.features import RunnerContext, make_features
from tokserve.runner.host import HostBackend
from tokserve.runner.ranks import ONE, Ranks
from tokserve.runner.runner import Runner

logger = logging.getLogger(__name__)


def load_runner(config: Config, ranks: Ranks = ONE, target: Accelerator | None = None) -> tuple[Runner, DeviceFacts]:
    """A runner that is ready to serve, one of several with `ranks`, on the device `target` if it is not this process's
    own.  Raises StartError."""
    try:
        return _load(config, ranks, target or device.use(config.runtime.device))
    except torch.OutOfMemoryError as error:
        raise StartError(f"the model is too large for the device: {str(error).partition('. ')[0]}") from error


def _load(config: Config, ranks: Ranks, target: Device | Accelerator) -> tuple[Runner, DeviceFacts]:
    runtime = config.runtime
    began = time.perf_counter()
    threads = device.set_threads(runtime.cpu_threads)
    if config.model.quantization == "fp8":
        target.require_float8("quantization")
    cpus = device.bound_cpus(runtime.cpu_bind, threads)
    place = None if target.torch_device.type == runtime.device else target.torch_device
    bound = ops.bind(runtime.device, runtime.ops, threads, cpus=cpus, exact=runtime.exact, place=place)
    kernels = cpu_kernels(bound, _with_arithmetic(config, ranks), config.model.dtype)
    if ranks.samples:
        ranks.broadcast_text("" if kernels is None else kernels.arithmetic)
    if bound["linear"] != "torch":
        device.set_threads(1)  # the compiled ops have their own threads; torch's would fight them for the cores
    model = _model(target, ranks, config)
    _advise(config, model, kernels)
    made = {name: make(config, model) for name, make in contributions("loaded")}
    drafts = (load_draft(config, model, partial(_model, target, ONE)) for _, load_draft in contributions("draft"))
    draft = next((draft for draft in drafts if draft is not None), None)
    speculation = config.speculation.resolved()
    if speculation.draws and draft is None:
        raise StartError(f"option speculative_config: the method {speculation.method} is not part of this installation")
    loaded = time.perf_counter()
    backend = make_backend(target, model, config, draft, ranks)
    images = _images(config, model)
    if images is not None:
        backend.slots.images = images
    runner = Runner(model, backend, config, ranks)
    runner.use(make_features(RunnerContext(config, runner, images, threads, made)))
    with torch.inference_mode():
        for adapter in (-1, 0) if config.lora.enable_lora else (-1,):
            _warm_up(runner, adapter)
        exact = model.exact and backend.is_batch_invariant(model)
        if model.exact:
            backend.capture(model)
        if model.spec.classifier is not None and ranks.samples:
            model.classify(torch.zeros(1, model.spec.hidden, device=target.torch_device))
    give_back()  # loading and warming up leave holes; what a card holds, steps take again
    facts = {
        "ops": bound,
        "threads": threads,
        "kernels": kernels.name if kernels else "none" if bound["linear"] == "torch" else None,
        "arithmetic": kernels.arithmetic if kernels else None,
        "dtype": config.model.dtype,
        "hidden_size": model.spec.hidden,
        "classifies": model.spec.classifier is not None,
        "quantization": model.quantization,
        "quantization_activations": config.model.quantization_activations,
        "exact": exact,
        "routed_bytes": 0 if backend.routed is None else backend.routed.position_bytes,
        "model_impl": model.implementation,
        "load_seconds": round(loaded - began, 3),
        "warm_up_seconds": round(time.perf_counter() - loaded, 3),
        **runner.call("memory", {}),
    }
    for feature in runner.hooks.features:
        feature.on_start(facts)
    kinds = {"embeddings": 4 * model.spec.hidden} | ({} if images is None else {KIND: 0})
    return runner, DeviceFacts(backend.layout, model.spec.vocab, "0", facts, kinds, images, model.reads_both_ways)


def _images(config: Config, model: Decoder) -> ImageFormat | None:
    """What an image is to the model; None: it reads none."""
    if model.tower is None:
        return None
    read_format: Callable[[Config], ImageFormat | None] = part("images", "read_format")
    return read_format(config)


def _model(target: Device | Accelerator, ranks: Ranks, config: Config) -> Decoder:
    options = config.model
    file = checkpoint.single_file(options.model)
    name, types = (options.model, "") if file is None else (file[0], f"{file[1]}; ")
    logger.info("loading %s (%s%s)", name, types, options.dtype)
    directory = checkpoint.locate(options.model, weights=options.load_format != "dummy")
    hf = checkpoint.hf_config(directory) | (options.hf_overrides or {})
    if whole := hf.get(PART_OF):
        logger.warning("of %s the text model alone is served, without images or sound", whole)
    if not hf.get("architectures"):
        hf = part("hf", "with_architecture")(hf)
    if is_classifier(hf):
        hf = part("pooling", "with_token_ids")(Path(options.tokenizer or directory), hf)
    common: dict[str, Any] = {
        "dtype": options.dtype,
        "head_dtype": options.head_dtype,
        "load_format": options.load_format,
        "seed": options.seed,
        "quantization": options.quantization,
        "quantize_lm_head": options.quantize_lm_head,
        "group_size": options.quantization_group_size,
        "quantization_activations": options.quantization_activations,
        "float8_cache": config.cache.kv_cache_dtype != "auto",
        "max_model_len": options.max_model_len,
        "admit": partial(_admit, target, options),
    }
    if is_classifier(hf) and (options.model_impl == "transformers" or not is_known(hf)):
        decoder_spec(hf)  # raises StartError
        raise StartError("option model_impl: transformers is not supported for classifiers")
    if options.model_impl == "transformers" or (options.model_impl == "auto" and not is_known(hf)):
        if ranks.size > 1:
            raise StartError(
                "option tensor_parallel_size or pipeline_parallel_size: a transformers module is not divided"
            )
        decoder: Decoder = part("hf", "load")(directory, hf, **common)
        return decoder
    try:
        decoder_spec(hf)
    except NotBuiltIn as refusal:
        if options.model_impl == "auto" and not is_classifier(hf) and ranks.size == 1:
            return _through_transformers(directory, hf, refusal, common)
        raise
    return models.load_decoder(
        directory,
        hf,
        has_float8=target.has_float8,
        needs_head=options.runner != "pooling",
        group=ranks.group,
        stage=ranks.stage,
        adapt=partial(_with_rooms, config, hf),
        **common,
    )


def _with_rooms(config: Config, hf: Mapping[str, Any], spec: DecoderSpec, names: Collection[str] | None) -> DecoderSpec:
    """The spec with what rooms add."""
    for _, add in contributions("spec"):
        spec = add(config, hf, spec, names)
    return spec


def _admit(target: Device | Accelerator, options: ModelConfig, size: int) -> None:
    """Raise StartError if weights of `size` bytes cannot fit: the system would kill the process while it reads them,
    without a reason in its log.  A device with memory of its own says so itself."""
    if isinstance(target, Accelerator):
        return
    free, limit, owner, remedy = device.memory_bound()
    if size <= free:
        return
    remedies = ["--dtype bfloat16"] if options.dtype == "float32" else []
    remedies += ["--quantization int8 or int4"] if options.quantization is None else []
    raise StartError(
        f"weights of {gib(size)} do not fit into {gib(limit)}, {owner}, of which {gib(limit - free)} are taken: use "
        f"{', '.join([*remedies, remedy])}"
    )


def _through_transformers(
    directory: Path, hf: Mapping[str, Any], refusal: NotBuiltIn, options: dict[str, Any]
) -> Decoder:
    """The model that no spec function reads, for the reason given, if transformers' module can be served."""
    try:
        model: Decoder = part("hf", "load")(directory, hf, **options)
    except StartError as error:
        raise StartError(f"{refusal}; nor is it served by --model-impl transformers: {error}") from None
    logger.warning("the reason: %s", refusal)
    return model


def make_backend(
    target: Device | Accelerator, model: Decoder, config: Config, draft: Draft | None = None, ranks: Ranks = ONE
) -> Backend:
    max_model_len = config.model.max_model_len
    assert max_model_len is not None, "the configuration is not resolved"
    specs = kvcache.cache_specs(model.kv_specs(), config.cache)
    if draft is not None and draft.first_layer:
        specs += kvcache.cache_specs(draft.model.kv_specs(), config.cache)
    if any(spec.dtype == kvcache.FLOAT8 for spec in specs):
        target.require_float8("kv_cache_dtype")
    if ranks.stage.count > 1:
        if any(isinstance(spec, StateSpec) for spec in specs):
            raise StartError("option pipeline_parallel_size: models with recurrent states have one stage")
        if config.model.enable_return_routed_experts:
            raise StartError("option enable_return_routed_experts: needs all layers in one stage")
    if isinstance(target, Accelerator):
        if config.model.enable_return_routed_experts:
            raise StartError("option enable_return_routed_experts is for the CPU; this device does not have it yet")
        backend: Backend = part("gpu", "backend")(target, specs, config, max_model_len, model, draft, ranks)
        return backend
    return HostBackend(target, specs, config, max_model_len, model.spec, draft, ranks)


def _with_arithmetic(config: Config, ranks: Ranks) -> RuntimeConfig:
    """What the sampling rank has measured to be the fastest holds for all: norms and routers are computed by each."""
    if ranks.samples or not (arithmetic := ranks.broadcast_text("")):
        return config.runtime
    return msgspec.structs.replace(config.runtime, cpu_arithmetic=arithmetic)


def _warm_up(runner: Runner, adapter: int) -> None:
    """A prompt and a token through every path, so that the first request is not slower than others."""
    layout = runner.backend.layout
    max_tokens = runner.backend.slots.tokens.shape[1] - 1
    length = max(1, min(layout.block_size + 1, max_tokens - 1))
    blocks = list(range(-(-(length + 1) // layout.block_size)))[: layout.num_blocks]
    one, zero, none = np.ones(1, np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32)
    for options in runner.backend.warm_ups:
        params, prompt = SamplingParams(**options), np.zeros(length, np.int32)
        row = NewRow(0, "warm-up", prompt, length, params, 0, (), adapter, columns=tuple(asked_columns(params)))
        runner.execute(StepPlan(0, zero, length * one, zero, zero, one, none, [row], [(0, 0, blocks)]))
        if length < max_tokens:
            runner.execute(StepPlan(0, zero, one, length * one, zero, one, none))
        if runner.hooks.draw and length + 1 < max_tokens and length + 1 < layout.block_size * len(blocks):
            drawn = np.full(1, DRAWN, np.int32)
            runner.execute(StepPlan(0, zero, 2 * one, length * one, one, 2 * one, drawn))
    runner.execute(StepPlan(0, none, none, none, none, none, none, freed=[0]))


def _advise(config: Config, model: Decoder, kernels: CpuKernels | None) -> None:
    """Log what would be faster on a CPU: weights that stay as they are stored are converted again at each step."""
    if kernels is None or model.quantization not in ("int4", STORED_INTEGERS):
        return
    if model.quantization == STORED_INTEGERS and model.spec.format.name == "float8":
        logger.info(
            "float8 weights take a byte each: where memory is not short, --quantization none has the same bits, and "
            "decodes faster on few cores (docs/quantization.md)"
        )
    elif kernels.arithmetic == FMA and config.model.quantization_activations is None:
        logger.info(
            "activations are not rounded: --quantization-activations int8 is faster on this processor, "
            "and changes logprobs slightly (docs/quantization.md)"
        )


def cpu_kernels(bound: dict[str, str], runtime: RuntimeConfig, dtype: str) -> CpuKernels | None:
    """The compiled kernels that serve, None if all ops are references.  Raises StartError."""
    if "cpp" in bound.values():
        kernels = choose_kernels(dtype, runtime.cpu_arithmetic, runtime.cpu_kernels)
        logger.info("cpu kernels: %s", kernels)
        return kernels
    if runtime.cpu_arithmetic != "auto" or runtime.cpu_kernels is not None:
        raise StartError("options cpu_arithmetic and cpu_kernels need the compiled kernels, which are not in use")
    return None
