"""Start-up: binds the ops, loads the weights, takes the KV cache's memory, warms up and captures steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tokserve import checkpoint, ops
from tokserve.base.errors import NotBuiltIn, StartError
from tokserve.base.memory import gib, give_back
from tokserve.config import Config, KVStorePlan, ModelConfig, RuntimeConfig
from tokserve.families.quantization.methods import WNA16
from tokserve.features.images.vision import image_format
from tokserve.features.kv.kv_copies import KVCopies
from tokserve.features.kv.kv_identity import identity_parts
from tokserve.features.lora.adapter_slots import LoraTables
from tokserve.features.pooling.classifier import is_classifier, with_token_ids
from tokserve.features.pooling.encoder_model import Encoder
from tokserve.features.ranks.collectives import EngineStore
from tokserve.features.ranks.ranks import ONE, Ranks, join
from tokserve.features.speculation.quantized_copy import QuantizedCopy
from tokserve.gpu.cuda import CudaBackend
from tokserve.models import load as models
from tokserve.models.decoder import Decoder
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
from tokserve.runner.runner import Runner

logger = logging.getLogger(__name__)


def load(config: Config, ranks: Ranks = ONE) -> tuple[Runner, DeviceFacts]:
    """A runner that is ready to serve, one of several with `ranks`.  Raises StartError."""
    try:
        return _load(config, ranks)
    except torch.OutOfMemoryError as error:
        raise StartError(f"the model is too large for the device: {str(error).partition('. ')[0]}") from error


def _load(config: Config, ranks: Ranks) -> tuple[Runner, DeviceFacts]:
    runtime = config.runtime
    began = time.perf_counter()
    threads = device.set_threads(runtime.cpu_threads)
    target = device.use(runtime.device)
    if config.model.quantization == "fp8":
        target.require_float8("quantization")
    cpus = device.bound_cpus(runtime.cpu_bind, threads)
    bound = ops.bind(runtime.device, runtime.ops, threads, cpus=cpus, exact=runtime.exact)
    kernels = cpu_kernels(bound, _with_arithmetic(config, ranks), config.model.dtype)
    if ranks.samples:
        ranks.broadcast_text("" if kernels is None else kernels.arithmetic)
    if bound["linear"] != "torch":
        device.set_threads(1)  # the compiled ops have their own threads; torch's would fight them for the cores
    model = _model(config, target, ranks)
    _advise(config, model, kernels)
    lora = LoraTables(config.lora, model, config.weights) if config.lora.enable_lora else None
    if lora is not None:
        lora.attach(model)
    draft = _draft(config, target, model)
    if draft is not None and draft.copy is not None and lora is not None:
        lora.attach(draft.model)
    loaded = time.perf_counter()
    backend = make_backend(target, model, config, draft, ranks)
    images = _images(config, model)
    if images is not None:
        backend.slots.images = images
    runner = Runner(
        model, backend, config, lora, make_features(RunnerContext(config, model, backend, images, threads)), ranks
    )
    with torch.inference_mode():
        for adapter in (-1,) if lora is None else (-1, 0):
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
    runner.copies = _copies(runner, config, facts)
    kinds = {"embeddings": 4 * model.spec.hidden} | ({} if images is None else {KIND: 0})
    whole = isinstance(model, Encoder)
    return runner, DeviceFacts(backend.layout, model.spec.vocab, "0", facts, kinds, images, whole)


def _copies(runner: Runner, config: Config, facts: dict[str, Any]) -> KVCopies | None:
    """What keeps KV blocks besides the KV cache, if something does; its size is added to `facts`."""
    plan = config.kv.store()
    if plan is None:
        return None
    if not isinstance(runner.model, Decoder) or runner.model.implementation != "tokserve":
        raise StartError("option kv_offloading_size: not with --model-impl transformers")
    if not config.cache.enable_prefix_caching:
        raise StartError("option kv_offloading_size: needs enable_prefix_caching")
    if runner.backend.routed is not None:
        raise StartError("options kv_offloading_size and enable_return_routed_experts exclude each other")
    layout = runner.backend.layout
    if any(spec.dtype == kvcache.FLOAT8 for spec in layout.specs):
        raise StartError("option kv_offloading_size: a KV cache of float8 is not supported")
    if (ranks := runner.ranks).size > 1:  # each keeps its part of the blocks
        directory = plan.directory and str(Path(plan.directory) / f"rank{ranks.rank}")
        memory, disk = (number // ranks.size for number in (plan.memory_bytes, plan.disk_bytes))
        plan = KVStorePlan(memory_bytes=memory, directory=directory, disk_bytes=disk)
    copies = KVCopies(plan, runner.backend, lambda: identity_parts(runner.model, layout, config, facts))
    facts |= {"kv_store_slots": copies.num_slots, "kv_block_bytes": copies.slot_bytes}
    return copies


def _images(config: Config, model: Decoder) -> ImageFormat | None:
    """What an image is to the model; None: it reads none."""
    if model.tower is None:
        return None
    directory = Path(config.model.model)
    return image_format(directory, checkpoint.hf_config(directory) | (config.model.hf_overrides or {}))


def _model(config: Config, target: Device | Accelerator, ranks: Ranks) -> Decoder:
    options = config.model
    file = checkpoint.gguf_file(options.model)
    name, types = (options.model, "") if file is None else (file[0], f"{file[1]}; ")
    logger.info("loading %s (%s%s)", name, types, options.dtype)
    directory = checkpoint.locate(options.model, weights=options.load_format != "dummy")
    hf = checkpoint.hf_config(directory) | (options.hf_overrides or {})
    if not hf.get("architectures"):
        hf = import_module("tokserve.families.hf.config").with_architecture(hf)
    hf = with_token_ids(Path(options.tokenizer or directory), hf)
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
        raise StartError("option model_impl: a classifier is not served by transformers' module")
    if options.model_impl == "transformers" or (options.model_impl == "auto" and not is_known(hf)):
        if ranks.size > 1:
            raise StartError(
                "option tensor_parallel_size or pipeline_parallel_size: a transformers module is not divided"
            )
        return import_module("tokserve.families.hf.load").load(directory, hf, **common)
    try:
        decoder_spec(hf)
    except NotBuiltIn as refusal:
        if options.model_impl == "auto" and not is_classifier(hf) and ranks.size == 1:
            return _through_transformers(directory, hf, refusal, common)
        raise
    return models.load(
        directory,
        hf,
        has_float8=target.has_float8,
        needs_head=options.runner != "pooling",
        group=ranks.group,
        stage=ranks.stage,
        **common,
    )


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
        model: Decoder = import_module("tokserve.families.hf.load").load(directory, hf, **options)
    except StartError as error:
        raise StartError(f"{refusal}; nor is it served by --model-impl transformers: {error}") from None
    logger.warning("the reason: %s", refusal)
    return model


def _draft(config: Config, target: Device | Accelerator, model: Decoder) -> Draft | None:
    plan = config.speculation.resolved()
    if plan.method == "self":
        copy = QuantizedCopy(model, plan.quantization or "int8")
        return Draft(copy.decoder, 0, copy)
    if plan.method != "draft_model":
        return None
    options = msgspec.structs.replace(
        config.model,
        model=plan.model,
        quantization=plan.quantization,
        quantize_lm_head=plan.quantization is not None,
        head_dtype="auto",
        hf_overrides=None,
        model_impl="auto",
    )
    second = _model(msgspec.structs.replace(config, model=options), target, ONE)
    if second.spec.vocab != model.spec.vocab:
        raise StartError(
            f"option speculative_config: the draft model's vocabulary has {second.spec.vocab} tokens, and the model's "
            f"{model.spec.vocab}: they must be the same"
        )
    return Draft(second, len(model.kv_specs()))


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
        return CudaBackend(target, specs, config, max_model_len, model, draft, ranks)
    return HostBackend(target, specs, config, max_model_len, model.spec, draft, ranks)


def join_ranks(
    rank: int,
    tensor: int,
    stages: int,
    put: Callable[[str, bytes], None],
    get: Callable[[str], bytes],
    kind: str,
    address: str,
) -> Ranks:
    """Meet the other ranks, which put values under keys that this one can get, and the other way round."""
    target = device.use(kind)
    store, nccl = EngineStore(put, get), isinstance(target, Accelerator)
    return join(rank, tensor, stages, store, target.torch_device, address, nccl=nccl)


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
        if runner.draft_model is not None and length + 1 < max_tokens and length + 1 < layout.block_size * len(blocks):
            drawn = np.full(1, DRAWN, np.int32)
            runner.execute(StepPlan(0, zero, 2 * one, length * one, one, 2 * one, drawn))
    runner.execute(StepPlan(0, none, none, none, none, none, none, freed=[0]))


def _advise(config: Config, model: Decoder, kernels: CpuKernels | None) -> None:
    """Log what would be faster: where float32 is multiplied, integers of 4 bits are converted to it first."""
    rounds = config.model.quantization_activations is not None
    if kernels is not None and kernels.arithmetic == FMA and model.quantization in ("int4", WNA16.name) and not rounds:
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
