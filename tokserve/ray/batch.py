"""A stage for Ray Data: a data set of prompts becomes one of outputs, by engines in a pool of actors.

Every row is a request of its own, so a row that cannot be served has an `error` and the job goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import ray

from tokserve.base.errors import EngineDead, RequestError, StartError
from tokserve.client.async_llm import AsyncLLM, ChoiceOutput, collect
from tokserve.client.inputs import typed
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.protocol.logprobs import Logprobs
from tokserve.protocol.params import SamplingParams

PROMPTS = ("token_ids", "prompt")  # columns: ids, or text
OUTPUTS = ("output_token_ids", "logprobs", "text", "finish_reason", "error")
INFLIGHT = 4  # requests sent to an engine, as a multiple of those that it runs at once
END_SECONDS = 10.0  # for an engine to end in order
RESTARTS = 3  # within ten minutes, unless `restart_engine` says otherwise


def generate(
    dataset: ray.data.Dataset,
    model: str,
    sampling_params: Mapping[str, Any] | None = None,
    *,
    replicas: int = 1,
    batch_size: int = 64,
    num_gpus: float = 0,
    **options: Any,
) -> ray.data.Dataset:
    """`dataset` with the columns of `Generate` added, by `replicas` engines.  `options`: as for `LLM`.

    `batch_size`: rows that are handed to an engine together; it works on several batches at once.  With `num_gpus` an
    engine reserves as many GPUs, else `cpu_threads` CPUs.  Ray Data shows its progress bar while the result is
    consumed.  Raises StartError, RequestError.
    """
    config = Config.make(model=model, **options)
    if not num_gpus and config.runtime.cpu_threads is None:
        raise StartError("give cpu_threads, the CPUs that Ray reserves for each engine, or num_gpus")
    _params(sampling_params or {})
    reserved: dict[str, Any] = {"num_gpus": num_gpus} if num_gpus else {"num_cpus": config.runtime.cpu_threads}
    return dataset.map_batches(
        Generate,
        fn_constructor_kwargs={"model": model, "sampling_params": sampling_params, **options},
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=replicas),
        **reserved,
    )


class Generate:
    """The class for `Dataset.map_batches`: takes each row's `token_ids`, or `prompt` where it has none, and adds
    `output_token_ids`, `logprobs` (of the output's tokens, if `sampling_params` has `logprobs`, else empty), `text`,
    `finish_reason` and `error`, which is empty for a row that was served.

    A column `sampling_params` (an object, or None) changes those of its row.  Other columns are kept.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, model: str, sampling_params: Mapping[str, Any] | None = None, **options: Any) -> None:
        values = {"restart_engine": RESTARTS, **options}
        self._params = dict(sampling_params or {})
        self._config = resolve(Config.make(model=model, **values))
        self._inflight = asyncio.Semaphore(INFLIGHT * (self._config.scheduler.max_num_seqs or 1))
        self._starting: asyncio.Task[None] | None = None
        self._llm = AsyncLLM.from_config(self._config)

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of rows as columns, with the outputs' columns."""
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.ensure_future(self._llm.start())
        await asyncio.shield(self._starting)
        columns = [batch[name] for name in PROMPTS if name in batch]
        if not columns:
            raise ValueError(f"the data set needs a column {' or '.join(PROMPTS)}, and has {', '.join(batch)}")
        prompts = [next((one for one in row if not _is_missing(one)), None) for row in zip(*columns, strict=True)]
        changes = batch.get("sampling_params", [None] * len(prompts))
        rows = await asyncio.gather(*(self._row(*row) for row in zip(prompts, changes, strict=True)))
        added = {name: _column([row[name] for row in rows]) for name in OUTPUTS}
        return batch | added

    def __del__(self) -> None:
        """End the engine when Ray Data drops this object at the end of a job.  Ray kills the processes of an actor that
        ends, which would look like an engine that died."""
        if self._loop is None or not self._loop.is_running():
            return
        ending = asyncio.run_coroutine_threadsafe(self._llm.close(), self._loop)
        if asyncio._get_running_loop() is not self._loop:
            with suppress(TimeoutError):
                ending.result(END_SECONDS)

    async def _row(self, prompt: Any, changes: Any) -> dict[str, Any]:
        async with self._inflight:
            while True:
                try:
                    return await self._served(prompt, changes)
                except EngineDead as error:
                    if error.code != "engine_restarting":
                        raise  # it was restarted too often, and the job fails with the reason
                    await self._llm.restored()
                except RequestError as error:
                    return _row(error=error.message)

    async def _served(self, prompt: Any, changes: Any) -> dict[str, Any]:
        params = _params(self._params | _changes(changes))
        tokenizer = self._llm.tokenizer
        if not isinstance(prompt, str):
            ids = _ids(prompt)
        elif tokenizer is None:
            raise RequestError("prompts of text need a tokenizer; this engine has none", field="prompt")
        else:
            ids = tokenizer.encode(prompt)
        stream = self._llm.stream(ids, params, text=tokenizer is not None, stream=False)
        (output,) = await collect(stream)
        return _row(output)


def _is_missing(value: Any) -> bool:
    """Whether a row has nothing in a column that others have: None, or NaN."""
    return value is None or (isinstance(value, float | np.floating) and bool(np.isnan(value)))


def _ids(prompt: Any) -> list[int]:
    """Token ids of a row.  Raises RequestError."""
    if prompt is None:
        raise RequestError(f"the row has neither {' nor '.join(PROMPTS)}", field=PROMPTS[0])
    try:
        values = np.asarray(prompt if isinstance(prompt, np.ndarray | list | tuple) else None)
    except ValueError:  # lists in it, of different lengths
        values = np.asarray(None)
    is_whole = values.dtype.kind in "iu" or (values.dtype.kind == "f" and bool(np.all(values == np.floor(values))))
    if values.ndim != 1 or not is_whole:
        raise RequestError("token_ids: must be a list of integers", field=PROMPTS[0])
    return [int(token) for token in values]


def _changes(values: Any) -> dict[str, Any]:
    """A row's own sampling parameters, without those that only other rows have.  Raises RequestError."""
    if _is_missing(values):
        return {}
    if not isinstance(values, Mapping):
        raise RequestError("sampling_params: must be an object", field="sampling_params")
    plain = {
        name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value for name, value in values.items()
    }
    return {name: _as_given(value) for name, value in plain.items() if not _is_missing(value)}


def _as_given(value: Any) -> Any:
    """A whole number as one: beside rows that have none, a column of them becomes one of floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _params(values: Mapping[str, Any]) -> SamplingParams:
    """Raises RequestError."""
    params = typed(SamplingParams, dict(values))
    if params.n != 1:
        raise RequestError("n must be 1 here: repeat the row, with seeds of its own", field="n")
    return params


def _row(output: ChoiceOutput | None = None, error: str = "") -> dict[str, Any]:
    column = output.logprobs if output is not None else None
    return {
        "output_token_ids": np.array(output.token_ids if output else [], np.int32),
        "logprobs": Logprobs.of(column).token_logprobs if column else np.zeros(0, np.float32),
        "text": (output.text or "") if output else "",
        "finish_reason": (output.finish_reason or "") if output else "",
        "error": error,
    }


def _column(values: list[Any]) -> Any:
    """Rows of different lengths as an array of objects."""
    if not isinstance(values[0], np.ndarray):
        return np.array(values, object)
    column = np.empty(len(values), object)
    column[:] = values
    return column
