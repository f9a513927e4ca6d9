"""Measures the engine without HTTP: throughput with all prompts at once, and the latency of one batch.

Uses the public `LLM`, as scripts do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from msgspec import structs

from tokserve.base.errors import RequestError, StartError
from tokserve.bench import datasets
from tokserve.bench.datasets import Conversation, DatasetSpec
from tokserve.bench.report import Outcome, spread, totals
from tokserve.client.results import RequestOutput
from tokserve.features.offline.llm import LLM
from tokserve.protocol.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """A run: `dataset` all at once, then `latency_iters` times its first `batch_size` prompts."""

    model: str
    options: dict[str, Any]
    dataset: DatasetSpec
    n: int = 1
    temperature: float = 0.0
    ignore_eos: bool = True
    logprobs: int | None = None
    warmup: int = 1
    batch_size: int = 1
    latency_iters: int = 5
    percentiles: Sequence[float] = (50.0, 90.0, 95.0, 99.0)
    progress: bool = True


def offline(run: Offline) -> dict[str, Any]:
    """Start an engine and measure it; raises StartError."""
    run.dataset.check()
    if run.n < 1 or run.warmup < 0 or run.batch_size < 1 or run.latency_iters < 0:
        raise StartError("--n and --batch-size must be at least 1, --warmup and --latency-iters at least 0")
    if run.n > 1 and run.temperature == 0.0:
        raise StartError("--n above 1 needs --temperature above 0: all samples would be equal")
    conversations = datasets.make(run.dataset)
    began = time.perf_counter()
    with LLM(run.model, **run.options) as llm:
        started, kernels = time.perf_counter() - began, llm.ready.facts.get("kernels")
        try:
            if run.warmup:
                _generate(llm, run, datasets.make(replace(run.dataset, count=run.warmup), stream=1), progress=False)
            outputs, duration = _generate(llm, run, conversations, progress=run.progress)
            latencies = _latencies(llm, run)
        except RequestError as error:
            raise StartError(str(error)) from None
    facts = _facts(run, started) | {"kernels": kernels}
    row = facts | totals([_outcome(output, duration) for output in outputs], duration)
    row |= spread("latency", latencies, run.percentiles)
    return row


def _generate(
    llm: LLM, run: Offline, conversations: Sequence[Conversation], *, progress: bool
) -> tuple[list[RequestOutput], float]:
    turns = [conversation.turns[0] for conversation in conversations]
    common = SamplingParams(
        temperature=run.temperature, ignore_eos=run.ignore_eos, n=run.n, logprobs=run.logprobs, detokenize=False
    )
    params = [structs.replace(common, max_tokens=turn.output_len) for turn in turns]
    began = time.perf_counter()
    outputs = llm.generate([turn.prompt for turn in turns], params, use_tqdm=progress)
    return outputs, time.perf_counter() - began


def _latencies(llm: LLM, run: Offline) -> list[float]:
    """Seconds per batch; the prompts differ each time, so that no prefix is cached."""
    spec = replace(run.dataset, count=run.batch_size)
    return [_generate(llm, run, datasets.make(spec, stream=2 + i), progress=False)[1] for i in range(run.latency_iters)]


def _outcome(output: RequestOutput, duration: float) -> Outcome:
    failed = next((c.message or "error" for c in output.outputs if c.finish_reason == "error"), None)
    return Outcome(
        start=0.0,
        end=duration,
        input_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
        output_tokens=sum(len(c.token_ids) for c in output.outputs),
        finish_reasons=[c.finish_reason or "" for c in output.outputs],
        error=failed,
    )


def _facts(run: Offline, started: float) -> dict[str, Any]:
    """The options of the run, for the result."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model_id": run.model,
        "engine_options": {name: value for name, value in run.options.items() if not name.endswith("api_key")},
        "start_seconds": started,
        **run.dataset.facts(),
        "n": run.n,
        "temperature": run.temperature,
        "ignore_eos": run.ignore_eos,
        "logprobs": run.logprobs,
        "batch_size": run.batch_size,
    }
