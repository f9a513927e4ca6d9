"""Load on a running server: sends requests on schedule, and measures them.

Open loop: with a request rate, requests start at the times of a Poisson process, independent of the server, and TTFT
counts from the scheduled time, so that a slow server cannot hide its queue.  Closed loop: with only a concurrency, a
request starts when the previous one in its lane has ended.  With both, the wait for a free lane counts.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop
from tqdm import tqdm

from tokserve.base.errors import StartError
from tokserve.base.structs import UNREADABLE
from tokserve.bench import datasets
from tokserve.bench.clients import PATHS, BadReply, ConversationHistory, EventLines, ReceivedReply, RequestShape
from tokserve.bench.datasets import Conversation, DatasetSpec, Turn
from tokserve.bench.report import Outcome, cache_hits, details, result

BUFFER = 1 << 20  # limit of bytes of one read from a socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The options of a run."""

    base_url: str
    shape: RequestShape
    dataset: DatasetSpec
    request_rate: float = math.inf  # conversations a second
    max_concurrency: int | None = None
    warmup: int = 1
    goodput: dict[str, float]
    percentiles: Sequence[float]
    api_key: str | None = None
    timeout: float = 3600.0  # seconds a request may take
    save_detailed: bool = False
    progress: bool = True

    @property
    def root(self) -> str:
        """The server's address.  OpenAI's clients call the one with /v1 the base, so either may be given."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    def check(self) -> None:
        """Raise StartError for values out of range or in conflict."""
        shape = self.shape
        if not self.base_url.startswith(("http://", "https://")):
            raise StartError(f"--base-url must begin with http:// or https://, got {self.base_url!r}")
        if not self.request_rate > 0.0:
            raise StartError(f"--request-rate must be above 0, got {self.request_rate}")
        if not 0.0 < self.timeout < math.inf:
            raise StartError(f"--request-timeout must be above 0 and finite, got {self.timeout}")
        if not 0.0 <= shape.temperature < math.inf:
            raise StartError(f"--temperature must be at least 0 and finite, got {shape.temperature}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise StartError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if self.warmup < 0 or shape.n < 1:
            raise StartError("--warmup must be at least 0 and --n at least 1")
        if shape.n > 1 and shape.temperature == 0.0:
            raise StartError("--n above 1 needs --temperature above 0: all samples would be equal")
        if not shape.stream and self.goodput.keys() & {"ttft", "tpot"}:
            raise StartError("--goodput ttft and tpot need --stream: without it only e2el is measured")


class _Facts(msgspec.Struct):
    """What is read of a server's facts."""

    kernels: str | None = None


class _About(msgspec.Struct):
    """What is read of GET /server_info, where there is one."""

    facts: _Facts = msgspec.field(default_factory=_Facts)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Start times in seconds from the first: a Poisson process, or all 0 with an infinite rate."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng([seed, 2]).exponential(1.0 / rate, count)
    gaps[0] = 0.0
    return np.cumsum(gaps).tolist()


class LoadRunner:
    """One run on one HTTP session."""

    def __init__(self, load: Load, session: aiohttp.ClientSession) -> None:
        self._load = load
        self._session = session
        self._url = load.root + PATHS[load.shape.backend]
        self._begun = 0.0
        self.outcomes: list[Outcome] = []

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    async def run(
        self, conversations: Sequence[Conversation], start_times: Sequence[float], lanes: int | None, bar: Any
    ) -> float:
        """Run all conversations; returns the seconds from the first start time to the last reply."""
        self._begun = time.perf_counter()
        self.outcomes = []
        gate = asyncio.Semaphore(lanes or len(conversations))
        open_loop = lanes is None or any(start_times)
        tasks = []
        try:
            for conversation, at in zip(conversations, start_times, strict=True):
                if (wait := at - self._now()) > 0.0:
                    await asyncio.sleep(wait)
                if not open_loop:
                    await gate.acquire()
                    at = self._now()
                tasks.append(asyncio.create_task(self._lane(conversation, at, gate, open_loop, bar)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return max((o.end for o in self.outcomes), default=0.0)

    async def _lane(
        self, conversation: Conversation, start: float, gate: asyncio.Semaphore, acquire: bool, bar: Any
    ) -> None:
        if acquire:
            await gate.acquire()
        try:
            await self._converse(conversation, start, bar)
        finally:
            gate.release()

    async def _converse(self, conversation: Conversation, start: float, bar: Any) -> None:
        """Run a conversation: a later turn starts when the previous one has ended; a failure ends it."""
        history = ConversationHistory(self._load.shape.backend)
        for number, turn in enumerate(conversation.turns):
            outcome, reply = Outcome(start=start if number == 0 else self._now()), ReceivedReply(self._load.shape)
            self.outcomes.append(outcome)
            prompt = history.next_prompt(turn.prompt)
            try:
                await self._request(self._load.shape.body(prompt, turn.output_len), outcome, reply)
                if number + 1 < len(conversation.turns):
                    history.add_reply(reply)
            except (BadReply, aiohttp.ClientError, TimeoutError, OSError) as error:
                outcome.error = str(error) or type(error).__name__
            outcome.end = outcome.end or self._now()
            _fill(outcome, reply, prompt)
            bar.update(1)
            if outcome.error is not None:
                bar.update(len(conversation.turns) - number - 1)
                return

    async def _request(self, body: bytes, outcome: Outcome, reply: ReceivedReply) -> None:
        outcome.sent = self._now()
        async with self._session.post(self._url, data=body) as response:
            if response.status != 200:
                text = (await response.read())[:300].decode(errors="replace")
                raise BadReply(f"HTTP {response.status}: {text}")
            if self._load.shape.stream:
                lines = EventLines()
                async for piece in response.content.iter_any():
                    now = self._now()
                    for payload in lines.feed(piece):
                        reply.take(payload, now)
            else:
                reply.take(await response.read(), self._now())
        outcome.end = self._now()
        reply.check()


def _fill(outcome: Outcome, reply: ReceivedReply, prompt: Any) -> None:
    """Copy the figures of the reply into the outcome."""
    usage = reply.usage
    outcome.output_tokens = reply.output_tokens
    outcome.input_tokens = usage.prompt_tokens if usage else 0
    if reply.shape.backend == "tokens":
        outcome.input_tokens = len(prompt)
    if usage and usage.prompt_tokens_details:
        outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    outcome.finish_reasons = list(reply.finished.values())
    if reply.shape.stream and reply.first is not None:
        outcome.ttft = reply.first - outcome.start
        outcome.tpot = reply.tpot()
        outcome.itl = reply.gaps


def serve(load: Load) -> tuple[dict[str, Any], list[Outcome]]:
    """Run `load`; returns the result under vLLM's names and the outcomes.  Raises StartError."""
    load.check()
    load.dataset.check()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(load))


async def _serve(load: Load) -> tuple[dict[str, Any], list[Outcome]]:
    conversations = datasets.make(load.dataset)
    start_times = arrivals(len(conversations), load.request_rate, load.dataset.seed)
    async with connected(load) as (load, session):
        await _warm_up(load, session)
        run = LoadRunner(load, session)
        total = sum(len(conversation.turns) for conversation in conversations)
        with tqdm(total=total, disable=not load.progress, desc="requests", unit="req") as bar:
            duration = await run.run(conversations, start_times, load.max_concurrency, bar)
        shared = await _shared_by_template(load, session, run.outcomes)
        facts = _facts(load) | {"kernels": await _kernels(load, session)}
    row = facts | result(run.outcomes, duration, load.percentiles, load.goodput) | cache_hits(run.outcomes, shared)
    return row | (details(run.outcomes) if load.save_detailed else {}), run.outcomes


@asynccontextmanager
async def connected(load: Load) -> AsyncIterator[tuple[Load, aiohttp.ClientSession]]:
    """A session with the server, and the load with a model: the first of the server's unless it names one."""
    headers = {"Content-Type": "application/json"}
    if load.api_key:
        headers["Authorization"] = f"Bearer {load.api_key}"
    limits, connector = aiohttp.ClientTimeout(total=load.timeout), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, headers=headers, read_bufsize=BUFFER
    ) as session:
        if not load.shape.model:
            load = replace(load, shape=replace(load.shape, model=await _first_model(load, session)))
        yield load, session


async def _first_model(load: Load, session: aiohttp.ClientSession) -> str:
    """The first model that the server lists.  Raises StartError."""
    url = load.root + "/v1/models"
    try:
        async with session.get(url) as response:
            raw = await response.read()
            if response.status != 200:
                raise StartError(f"{url} answered HTTP {response.status}: {raw[:300].decode(errors='replace')}")
    except aiohttp.ClientConnectorSSLError as error:
        raise StartError(f"cannot reach {url}: {error.strerror or error}; does the server speak http?") from None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error) or "no answer in time"
        raise StartError(f"cannot reach {url}: {why}; is a server running there? --base-url names another") from None
    try:
        return str(msgspec.json.decode(raw)["data"][0]["id"])
    except (*UNREADABLE, KeyError, IndexError, TypeError):
        raise StartError(f"{url} lists no model; name one with --model") from None


async def _kernels(load: Load, session: aiohttp.ClientSession) -> str | None:
    """The kernels of a tokserve server, "none" if it has none; None if it does not say."""
    try:
        async with session.get(load.root + "/server_info") as response:
            return msgspec.json.decode(await response.read(), type=_About).facts.kernels
    except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE):
        return None


async def _warm_up(load: Load, session: aiohttp.ClientSession) -> None:
    """Send requests that are not counted, with other prompts; the first failure ends the benchmark."""
    if load.warmup == 0:
        return
    conversations = datasets.make(replace(load.dataset, count=load.warmup, turns=1), stream=1)
    run = LoadRunner(load, session)
    with tqdm(disable=True) as bar:
        await run.run(conversations, [0.0] * len(conversations), load.max_concurrency, bar)
    if failed := [o.error for o in run.outcomes if o.error is not None]:
        raise StartError(f"warming up failed: {failed[0]}")


async def _shared_by_template(load: Load, session: aiohttp.ClientSession, outcomes: Sequence[Outcome]) -> int:
    """Cached prompt tokens that all chats share, measured with one new chat.  The request follows the run, so it
    affects no figure.  0 where no template is applied or nothing was cached."""
    if load.shape.backend != "openai-chat" or not any(outcome.cached_tokens for outcome in outcomes):
        return 0
    run = LoadRunner(load, session)
    with tqdm(disable=True) as bar:
        await run.run([Conversation([Turn(secrets.token_hex(16), 1)])], [0.0], None, bar)
    return max(outcome.cached_tokens for outcome in run.outcomes)


def _facts(load: Load) -> dict[str, Any]:
    """The options of the run, for the result."""
    shape = load.shape
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "base_url": load.base_url,
        "backend": shape.backend,
        "model_id": shape.model,
        **load.dataset.facts(),
        "turns": load.dataset.turns,
        "n": shape.n,
        "stream": shape.stream,
        "logprobs": shape.logprobs,
        "temperature": shape.temperature,
        "ignore_eos": shape.ignore_eos,
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "max_concurrency": load.max_concurrency,
        "goodput": load.goodput or None,
    }
