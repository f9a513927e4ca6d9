"""One device at work: loads the model, keeps its tables, and turns each `StepPlan` into a `StepResult`.

Runs what it is told and decides nothing: who runs, who is preempted and when a request ends are the
engine's.  Knows no text, no messages and no HTTP.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokserve import checkpoint, device, ops
from tokserve.config import (
    DEFAULT_BLOCK_SIZE,
    CacheConfig,
    LoraConfig,
    ModelConfig,
    RuntimeConfig,
    SchedulerConfig,
    WeightsConfig,
)
from tokserve.errors import NotFound, RequestError, StartError
from tokserve.kv_spec import KVLayout, KVSpec
from tokserve.layers.batch import ForwardBatch, Pages
from tokserve.models import load
from tokserve.models.checksums import checksums
from tokserve.models.decoder import Decoder
from tokserve.ops.arithmetic import CpuKernels, choose_kernels
from tokserve.params import SamplingParams
from tokserve.plan import DeviceFacts, Int32, LogprobRows, Masks, NewRow, StepPlan, StepResult
from tokserve.runner import exactness, extension, kvcache
from tokserve.runner.flights import Flight, sampled
from tokserve.runner.graphs import Graphs, prompt_buckets, prompt_rows
from tokserve.runner.logits import Rows
from tokserve.runner.lora import LoraTables
from tokserve.runner.records import Records
from tokserve.runner.sampler import Drawing, Sampler, join
from tokserve.runner.slots import Int64, Slots
from tokserve.runner.staging import StagedSlots
from tokserve.runner.weight_sync import WeightSync

logger = logging.getLogger(__name__)

WARM_UPS: tuple[dict[str, Any], ...] = (  # requests' parameters; all but the first only compile kernels
    {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 1,
        "prompt_logprobs": 1,
    },
    {"temperature": 0.0},
    {"temperature": 0.5},
    *(
        {"temperature": 0.5, "logprobs": k, "logprobs_mode": mode} | filtered
        for k, mode, filtered in product((0, 5, 20), ("raw", "temperature"), ({}, {"top_k": 5}))
    ),
)  # fmt: skip
PROMPT_LOGITS_BYTES = 32 << 20  # logits of prompt tokens are made in chunks of about this size


class Runner:
    """Call `load` once, then `execute` for every plan, in order, from one thread; `background` from another one."""

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        runtime: RuntimeConfig,
        weights: WeightsConfig | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        self._config = model
        self._cache_config = cache
        self._scheduler_config = scheduler
        self._runtime_config = runtime
        self._weight_version = "0"
        self._weights_config = weights or WeightsConfig()
        self._lora_config = lora or LoraConfig()
        self._lora: LoraTables | None = None
        self._no_autograd = torch.inference_mode()
        self._graphs: Graphs | Records | None = None
        self._has_weights = True
        self._flights: deque[tuple[Flight, Int64]] = deque()  # not in the host's table yet, with their generations

    def load(self) -> DeviceFacts:
        """Bind ops, load the weights, reserve the KV cache and run once.  Raises StartError."""
        try:
            return self._load()
        except torch.OutOfMemoryError as error:
            raise StartError(f"the model is too large for the device: {str(error).partition('. ')[0]}") from error

    def _load(self) -> DeviceFacts:
        config, runtime = self._config, self._runtime_config
        began = time.perf_counter()
        threads = device.set_threads(runtime.cpu_threads)
        self._device = device.use(runtime.device)
        if config.quantization == "fp8":
            self._device.require_float8("quantization")
        cpus = device.bound_cpus(runtime.cpu_bind, threads)
        bound = ops.bind(runtime.device, runtime.ops, threads, cpus=cpus, exact=runtime.exact)
        kernels = cpu_kernels(bound, runtime, config.dtype)
        if bound["linear"] != "torch":
            device.set_threads(1)  # the compiled ops have their own threads; torch's would fight them for the cores
        directory = checkpoint.locate(config.model, weights=config.load_format != "dummy")
        hf = checkpoint.hf_config(directory) | (config.hf_overrides or {})
        self._model = load.load(
            directory, hf, dtype=config.dtype, head_dtype=config.head_dtype,
            load_format=config.load_format, seed=config.seed, max_model_len=config.max_model_len,
            quantization=config.quantization, quantize_lm_head=config.quantize_lm_head,
            has_float8=self._device.has_float8, float8_cache=self._cache_config.kv_cache_dtype != "auto",
        )  # fmt: skip
        if self._lora_config.enable_lora:
            self._lora = LoraTables(self._lora_config, self._model, self._weights_config.allowed_weight_dirs)
            self._lora.attach(self._model)
        loaded = time.perf_counter()
        self._sync = WeightSync(self._weights_config, self._blank, lambda: self._memory()["weight_bytes"], self._device)
        self._extension = extension.make(self._weights_config.worker_extension_cls, self)
        self._allocate()
        with self._no_autograd:
            self._warm_up()
            if self._lora is not None:
                self._warm_up(adapter=0)
            exact = self._is_exact()
            self._record()
        device.give_back_memory()  # loading and warming up leave holes; what a card holds, steps take again
        facts = {
            "ops": bound,
            "threads": threads,
            "kernels": kernels.name if kernels else None,
            "arithmetic": kernels.arithmetic if kernels else None,
            "dtype": config.dtype,
            "quantization": self._model.quantization,
            "exact": exact,
            "load_seconds": round(loaded - began, 3),
            "warm_up_seconds": round(time.perf_counter() - loaded, 3),
            **self._memory(),
        }
        return DeviceFacts(self._layout, self._vocab_size, self._weight_version, facts)

    def _allocate(self) -> None:
        max_num_seqs, max_model_len = self._scheduler_config.max_num_seqs, self._config.max_model_len
        assert max_model_len is not None, "the configuration is not resolved"
        specs = kvcache.kept(self._model.kv_specs(), self._cache_config)
        if any(spec.dtype == kvcache.FLOAT8 for spec in specs):
            self._device.require_float8("kv_cache_dtype")
        self._vocab_size = self._model.spec.vocab
        self._chunk = max(16, min(256, PROMPT_LOGITS_BYTES // (4 * self._vocab_size)))
        activations = self._measure(specs) if self._device.staged else 0
        self._layout = kvcache.layout(
            specs, self._cache_config, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
            free_bytes=max(0, self._device.free_memory() - activations), bounded=not self._device.staged,
        )  # fmt: skip
        if not self._device.staged:
            self._slots = Slots(max_num_seqs, max_model_len, self._layout.block_size)
        else:
            self._slots = self._staged = StagedSlots(
                self._device, max_num_seqs, max_model_len, self._layout.block_size, self._layout.num_blocks
            )
        self._reserve()
        self._sampler = Sampler(self._slots, self._vocab_size, self._config.logprobs_mode, self._device)

    def _reserve(self) -> None:
        """The memory of the KV cache; on a device of its own a page more, for padding."""
        if self._device.staged:
            self._kv = kvcache.allocate_on(self._device.torch_device, self._layout, spare=1)
        else:
            self._kv = kvcache.allocate(self._layout)

    def _measure(self, specs: tuple[KVSpec, ...]) -> int:
        """Bytes that the largest steps take beside weights and cache: of all tokens in a prompt and a token a row.

        What graphs take is theirs alone and counts again, and so does what they leave for the sampler.
        """
        block_size = self._cache_config.block_size or DEFAULT_BLOCK_SIZE
        most, tokens, model = self._scheduler_config.max_num_seqs, self._most_tokens(), self._model
        width = -(-len(model.rope_table) // block_size)
        kv = kvcache.allocate_on(self._device.torch_device, KVLayout(specs, 1, block_size))
        prompt, decode = _in_one_page(tokens, 1, width, kv), _in_one_page(most, most, width, kv)
        ends = decode.input_ids
        with self._no_autograd:
            one = self._device.peak(lambda: model.logits(model.forward(prompt).index_select(0, ends)) * 1.0)
            other = self._device.peak(lambda: self._decode_logits(decode) * 1.0)
            if self._runtime_config.enforce_eager:
                return one + other
            sizes = prompt_buckets(tokens)
            small = [_in_one_page(size, prompt_rows(size, most), width, kv) for size in sizes[-1:]]
            graphs = max([other, *(self._device.peak(partial(model.forward, batch)) for batch in small)])
        logits, hidden = 4 * most * self._vocab_size, sum(sizes[-1:]) * model.spec.hidden * model.dtype.itemsize
        return one + other + graphs + logits + hidden

    def _most_tokens(self) -> int:
        """Tokens that a step can have in one prompt."""
        return min(self._scheduler_config.max_num_batched_tokens, len(self._model.rope_table))

    def _record(self) -> None:
        """Decode steps to be repeated, where that is wanted."""
        if self._runtime_config.enforce_eager:
            return
        step = self._decode_logits
        if not self._device.staged:
            self._graphs = Records(self._slots, self._kv, step, self._model.row_bytes())
            return
        most = self._scheduler_config.max_num_seqs
        try:
            self._graphs = Graphs(
                self._device, self._staged, self._kv, most=most, most_tokens=self._most_tokens(), decode=step,
                prompts=self._model.forward, adapters=self._lora is not None,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"no memory is left to record graphs of up to {most} rows; lower --gpu-memory-utilization or "
                "--max-num-seqs, or give --enforce-eager"
            ) from error

    def _is_exact(self) -> bool:
        """Whether rows stand alone: asked of the kernels, where they are not the CPU's own."""
        if not self._device.staged:
            return True
        if not self._runtime_config.exact:
            return False
        unequal = exactness.unequal_products(self._model)
        if unequal:
            logger.error("rows of these products depend on the batch, so answers do too: %s", ", ".join(unequal))
        return not unequal

    def _decode_logits(self, batch: ForwardBatch) -> Tensor:
        return self._model.logits(self._model.forward(batch))

    def _warm_up(self, adapter: int = -1) -> None:
        """A prompt and a token through every path, so that the first request is not slower than others."""
        for asked in WARM_UPS if self._device.staged else WARM_UPS[:1]:
            self._try_out(SamplingParams(**asked), adapter)

    def _try_out(self, params: SamplingParams, adapter: int) -> None:
        layout = self._layout
        length = max(1, min(layout.block_size + 1, len(self._slots.tokens[0]) - 2))
        row = NewRow(0, "warm-up", np.zeros(length, np.int32), length, params, 0, (), adapter)
        blocks = list(range(-(-(length + 1) // layout.block_size)))[: layout.num_blocks]
        column = np.ones(1, np.int32)
        sample = np.ones(1, np.bool_)
        self._step(StepPlan(0, 0 * column, length * column, 0 * column, sample, [row], [(0, 0, blocks)]))
        if length + 1 < len(self._slots.tokens[0]):
            self._step(StepPlan(0, 0 * column, column, length * column, sample))
        self._sampler.leave(row.slot)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Flight:
        """Begin a step; a device that works on its own has it done later."""
        with self._no_autograd:
            return self._step(plan)

    def _step(self, plan: StepPlan) -> Flight:
        self._update(plan)
        slots, lengths = sampled(plan)
        if len(plan.slots) == 0:
            return Flight(plan, slots, lengths, None, {})
        self._settle(wait=self._sampler.looks_back(plan.slots))
        graph = self._graphs.fitting(plan) if self._graphs else None
        logits: Tensor | None
        prompt_logprobs: dict[int, LogprobRows] = {}
        if graph is not None:
            logits = graph.run(plan)
        else:
            hidden = self._forward(plan)
            if self._sampler.scoring:
                prompt_logprobs = self._score(plan, hidden)
            logits = self._last_logits(plan, hidden)
        drawing = self._draw(slots, lengths, logits, plan.masks)
        flight = Flight(plan, slots, lengths, drawing, prompt_logprobs)
        if self._device.staged:
            self._flights.append((flight, self._slots.generation(slots)))
        else:
            self._slots.tokens[slots, lengths] = flight.result().token_ids
        return flight

    def _forward(self, plan: StepPlan) -> Tensor:  # [T, H], or [n, H] of the ends
        """Hidden states of the plan's tokens, or of those that draw where no others are asked for."""
        graph = self._graphs.fitting_prompts(plan) if isinstance(self._graphs, Graphs) else None
        if graph is not None:
            return graph.run(plan)
        batch = self._slots.build(plan, self._kv)
        batch.logits_rows = None if self._sampler.scoring else self._slots.ends(plan, batch)
        return self._model.forward(batch)

    def _settle(self, *, wait: bool) -> None:
        """Write what the device has drawn into the host's table; of steps that may still run only if it must `wait`."""
        while len(self._flights) > (0 if wait else self._scheduler_config.depth - 1):
            flight, generation = self._flights.popleft()
            self._slots.learn(flight.slots, flight.lengths, generation, flight.result().token_ids)

    def _update(self, plan: StepPlan) -> None:
        """Bring the tables up to date.  What a request leaves in its slot, the next one overwrites."""
        for slot in plan.done:
            self._sampler.leave(slot)
        for row in plan.new:
            self._slots.enter(row)
            self._sampler.enter(row)
        for slot, first, blocks in plan.blocks:
            self._slots.extend(slot, first, blocks)

    def _last_logits(self, plan: StepPlan, hidden: Tensor) -> Tensor | None:  # [T or n, H] -> [n, V]
        """Logits of the rows that end their request's known tokens; None if there are none."""
        count = np.count_nonzero(plan.samples)
        if count == 0:
            return None
        if count < hidden.shape[0]:
            hidden = hidden.index_select(0, self._slots.last(plan))
        return self._model.logits(hidden)

    def _draw(self, slots: Int32, lengths: Int64, logits: Tensor | None, masks: Masks | None) -> Drawing | None:
        """Tokens for those rows; a device that has tables of its own keeps them for the next step."""
        if logits is None:
            return None
        drawing = self._sampler.begin(logits, Rows(slots, lengths, self._slots.prompt_lens[slots]), masks)
        self._slots.keep(drawing.token_ids)
        return drawing

    def _score(self, plan: StepPlan, hidden: Tensor) -> dict[int, LogprobRows]:
        """Plan row -> logprobs of the prompt tokens that its positions predict, as far as they are asked for."""
        found = {}
        ends = np.cumsum(plan.num_tokens)
        for row in self._sampler.scored_rows(plan.slots).tolist():
            slot, start, count = int(plan.slots[row]), int(plan.num_computed[row]), int(plan.num_tokens[row])
            first, last = self._sampler.scored_range(slot, start, start + count)
            if first >= last:
                continue
            shift = int(ends[row]) - count - start - 1  # prompt token j is predicted by hidden row j + shift
            parts = []
            for j in range(first, last, self._chunk):
                logits = self._model.logits(hidden[j + shift : min(j + self._chunk, last) + shift])
                parts.append(self._sampler.score(logits, slot, j))
            found[row] = join(parts)
        return found

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """An admin verb by name, between two steps."""
        verbs: dict[str, Callable[..., Any]] = {
            "memory": self._memory,
            "release": self._release,
            "place_adapter": lambda slot: self._adapters.place(slot),
            "restore": self._restore,
            "commit_update": self._commit,
            "collective_rpc": self._collective_rpc,
            "apply_model": self._apply_model,
        }
        if method not in verbs:
            raise NotFound(f"the runner has no method {method!r}")
        return verbs[method](**args)

    def background(self, method: str, args: dict[str, Any]) -> Any:
        """A verb that may take long, in a thread of its own, beside the steps."""
        verbs: dict[str, Callable[..., Any]] = {
            "init_weight_transfer": self._sync.init,
            "shutdown_weight_transfer": self._sync.shutdown,
            "begin_update": self._sync.begin,
            "receive_update": self._sync.receive,
            "feed_update": self._sync.feed,
            "finish_update": self._sync.finish,
            "is_same_update": lambda: self._sync.is_same(self._model),
            "abort_update": self._sync.abort,
            "forget_weights": self._sync.forget,
            "checksums": lambda: checksums(self._model),
            "checkpoint_checksums": self._checkpoint_checksums,
            "read_adapter": lambda **args: self._adapters.read(**args),
        }
        return verbs[method](**args)

    def _checkpoint_checksums(self) -> dict[str, Any]:
        spec = self._model.spec
        digests, aliases = self._model.provenance.checksums(spec.renames, tied=spec.tied)
        return {"checkpoint": digests, "tied": aliases}

    def interrupt(self) -> None:
        """From any thread: make what waits for a trainer fail, a meeting or a transfer."""
        self._sync.interrupt()

    @property
    def model(self) -> Decoder:
        """The model with the weights that serve."""
        return self._model

    @property
    def _adapters(self) -> LoraTables:
        if self._lora is None:
            raise RequestError("this server runs without --enable-lora")
        return self._lora

    def _blank(self) -> Decoder:
        """A model like the one that serves, with its adapters, without weights."""
        blank = self._model.blank()
        if self._lora is not None:
            self._lora.attach(blank)
        return blank

    def _commit(self) -> None:
        scales, self._model = self._model.kv_scales(), self._sync.take(self._model)
        kvcache.rescale(self._kv, scales, self._model.kv_scales())
        self._has_weights = True
        self._record_again()

    def _record_again(self) -> None:
        """Graphs name the memory of weights and pages: after a change of either they are made anew."""
        self._graphs = None
        if self._has_weights and self._kv:
            with self._no_autograd:
                self._record()

    def _release(self, tags: list[str]) -> None:
        """Give back the memory of the KV cache or of the weights; what was there is lost."""
        if "kv_cache" in tags:
            self._kv = []
        if "weights" in tags:
            self._model = self._blank()
            self._has_weights = False
        self._graphs = None
        self._device.give_back_memory()

    def _restore(self, tags: list[str]) -> None:
        if "kv_cache" in tags and not self._kv:
            self._reserve()
            self._record_again()

    def _collective_rpc(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return extension.call(self._extension, method, args, kwargs)
        finally:
            self._distrust_records()

    def _apply_model(self, function: str) -> Any:
        try:
            return extension.plain(extension.named(function)(self._model))
        finally:
            self._distrust_records()

    def _distrust_records(self) -> None:
        """Foreign code may have replaced tensors that recorded steps read."""
        if not self._device.staged:  # where recording takes seconds, foreign code has to copy into the tensors
            self._record_again()

    def _memory(self) -> dict[str, int]:
        """Bytes by use."""
        kept = self._model.parameters_by_name().values()
        weights = sum(math.prod(parameter.shape) * parameter.dtype.itemsize for parameter in kept)
        found = {"weight_bytes": weights, "kv_bytes": self._layout.bytes()}
        return found if self._lora is None else found | {"lora_bytes": self._lora.num_bytes()}


def cpu_kernels(bound: dict[str, str], runtime: RuntimeConfig, dtype: str) -> CpuKernels | None:
    """The compiled kernels that serve, None if all ops are references.  Raises StartError."""
    if "cpp" in bound.values():
        kernels = choose_kernels(dtype, runtime.cpu_arithmetic, runtime.cpu_kernels)
        logger.info("cpu kernels: %s", kernels)
        return kernels
    if runtime.cpu_arithmetic != "auto" or runtime.cpu_kernels is not None:
        raise StartError("options cpu_arithmetic and cpu_kernels need the compiled kernels, which are not in use")
    return None


def _in_one_page(tokens: int, rows: int, width: int, kv: Pages) -> ForwardBatch:
    """A batch to find out what a step takes: a token a row, the last row has what is left, all keys in page 0."""
    home = kv[0][0].device
    zeros, query_start = torch.zeros(tokens, dtype=torch.int64, device=home), torch.arange(rows + 1, device=home).int()
    query_start[-1] = tokens
    tables = torch.zeros(rows, width, dtype=torch.int32, device=home)
    return ForwardBatch(zeros, zeros, query_start, query_start.diff(), tables, zeros, kv)
