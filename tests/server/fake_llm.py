"""An AsyncLLM with scripted tokens and a byte-level tokenizer, and an ASGI caller that can hang up.

`FakeLLM` keeps the client's contract (deltas, aborts, the engine's death) without an engine; the checks of its
inputs and the `text` classes are the real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tokserve.client.async_llm import AsyncLLM
from tokserve.client.inputs import Inputs, Order, Prepared, bare_id
from tokserve.client.outputs import ChoiceOutput, Logprobs, StepStats, join_logprobs
from tokserve.config import Config
from tokserve.errors import Conflict, EngineDead, RequestError
from tokserve.messages import Ready, Status, unpack_ids
from tokserve.params import SamplingParams
from tokserve.server.app import build_app
from tokserve.server.counters import ApiProcess
from tokserve.text.detokenizer import Detokenizer
from tokserve.text.tokenizer import Tokenizer

EOS = 0
NOWHERE = 7  # a token whose logprob is -inf
OPTIONS = ("stream", "text", "priority", "cache_salt", "deadline_ms", "queue_timeout_ms", "adapter")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}{{ name | default('assistant') }}:{% endif %}"
)  # fmt: skip
Script = Callable[[Sequence[int], int], list[int]]


def byte_tokenizer() -> Tokenizer:
    """Ids 0 <eos>, 1 <bos>, 2 <x>; then one id per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0, "<bos>": 1, "<x>": 2, **{char: 3 + i for i, char in enumerate(alphabet)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<bos>", "<x>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, TEMPLATE)


TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def says(text: str) -> Script:
    """Every choice answers `text` and ends."""
    return lambda prompt, index: [*ids(text), EOS]


def endless(prompt: Sequence[int], index: int) -> list[int]:
    """Letters that depend on the prompt and the choice, far beyond any limit."""
    return [3 + 64 + (sum(prompt) + 3 * index + i * i) % 26 for i in range(3000)]


def columns(tokens: Sequence[int], top: int, named: Sequence[int]) -> Logprobs:
    """Made-up logprobs: even tokens are the most probable, odd ones come third; NOWHERE is impossible."""
    own, ranks, top_ids, values = [], [], [], []
    for token in tokens:
        rank = 1 if token % 2 == 0 else 3
        own.append(-np.inf if token == NOWHERE else -0.125 * rank)
        ranks.append(rank)
        row = [token if i + 1 == rank else (token + 11 + i) % VOCAB for i in range(top)]
        top_ids.append([*row, *named])
        values.append([-0.125 * (i + 1) for i in range(top)] + [-5.0 - 0.5 * i for i in range(len(named))])
    pack = lambda values, kind: np.asarray(values, dtype=kind).tobytes()  # noqa: E731
    return Logprobs(
        pack(own, "<f4"), pack(ranks, "<i4"), pack(top_ids, "<i4"), pack(values, "<f4"), top + len(named), "raw"
    )


@dataclass
class Call:
    """What was sent for one prompt."""

    prompt: list[int]
    params: SamplingParams
    request_id: str
    options: dict[str, Any]


class FakeStream:
    """A scripted stream; `llm.hold` stops it before the next token, for as long as it is set."""

    def __init__(self, llm: FakeLLM, call: Call, key: str, seed: int) -> None:
        self.llm, self.params, self.request_id, self.key, self.seed = llm, call.params, call.request_id, key, seed
        self.prompt_ids = call.prompt
        self.streamed, self.with_text = call.options["stream"], call.options["text"]
        self.closed = False
        self.abort_reason: str | None = None
        self.wake = asyncio.Event()
        self.group = ""
        self.stalls: list[bool] = []
        self._line: deque[ChoiceOutput] = deque()
        self._choices = [_Choice(self, index) for index in range(self.params.n)]
        self._error: Exception | None = None
        self._playing: asyncio.Task[None] | None = None

    async def accepted(self) -> None:
        while self.llm.undecided and not self.llm.dead:
            await asyncio.sleep(0)
        if self.llm.dead:
            raise self.llm.dead
        if self.llm.refuse is not None:
            self._forget(self.llm.refused)
            raise self.llm.refuse

    def stall(self, stalled: bool) -> None:
        self.stalls.append(stalled)

    def listen(self, listener: Callable[[], None]) -> None:
        self._playing = asyncio.create_task(self._play(listener))

    async def _play(self, listener: Callable[[], None]) -> None:
        """Turn after turn, each told once; a listener that does not take them gets everything at once later."""
        try:
            while going := [choice for choice in self._choices if choice.end is None]:
                await self._turn()
                for choice in going:
                    delta = choice.step(self.abort_reason)
                    if self.streamed or choice.end is not None:
                        self._line.append(delta if self.streamed else choice.whole())
                listener()
        except Exception as error:
            self._error = error
            listener()

    def take(self) -> Iterator[ChoiceOutput]:
        while self._line:
            delta = self._line.popleft()
            if self.ended:
                self._forget(self.llm.ended)
            yield delta
        if self._error is not None:
            raise self._error

    @property
    def ended(self) -> bool:
        return not self._line and all(choice.end is not None for choice in self._choices)

    async def __aiter__(self) -> AsyncIterator[ChoiceOutput]:
        news = asyncio.Event()
        self.listen(news.set)
        while not self.ended:
            await news.wait()
            news.clear()
            for delta in self.take():
                yield delta

    async def aclose(self) -> None:
        if not self.closed and any(choice.end is None for choice in self._choices):
            self._forget(self.llm.left)
        self._forget(self.llm.ended)
        if self._playing is not None:
            self._playing.cancel()
        self.closed = True

    def _forget(self, where: set[str]) -> None:
        if self.llm.streams.pop(self.key, None) is not None:
            where.add(self.key)

    async def _turn(self) -> None:
        """One engine step, or the wait for one."""
        await asyncio.sleep(0)
        while self.llm.hold and self.abort_reason is None and self.llm.dead is None:
            self.wake.clear()
            await self.wake.wait()
        if self.llm.dead:
            raise self.llm.dead


class _Choice:
    def __init__(self, stream: FakeStream, index: int) -> None:
        p = stream.params
        self.stream, self.index, self.params = stream, index, p
        self.script = stream.llm.script(stream.prompt_ids, index)
        self.limit = min(p.max_tokens or 10**9, stream.llm.ready.max_model_len - len(stream.prompt_ids))
        self.detokenizer = None
        if stream.with_text or p.stop_strings():
            self.detokenizer = Detokenizer(
                TOKENIZER,
                p.stop_strings(),
                include_stop=p.include_stop_str_in_output,
                skip_special=p.skip_special_tokens,
            )
        self.parts: list[ChoiceOutput] = []
        self.end: str | None = None
        self.stop_reason: Any = None

    def step(self, abort_reason: str | None) -> ChoiceOutput:
        place = sum(len(part.token_ids) for part in self.parts)
        tokens, detail = [], None
        if abort_reason:
            detail, self.end = abort_reason, "abort"
        elif self.stream.llm.fails(self.index):
            detail, self.end = "nan", "error"
        else:
            tokens, detail = [self.script[place]], self._ended(self.script[place], place + 1)
        text, hit = self.detokenizer.push(tokens, detail is not None) if self.detokenizer else ("", None)
        if hit:
            detail, self.end, self.stop_reason = "stop_string", "stop", hit.text
        delta = self._delta(tokens, text, detail, place)
        self.parts.append(delta)
        return delta

    def _ended(self, token: int, length: int) -> str | None:
        p = self.params
        if token == EOS and not p.ignore_eos:
            detail, self.end = "eos", "stop"
        elif token in p.stop_token_ids:
            detail, self.end, self.stop_reason = "stop_token", "stop", token
        elif length >= self.limit:
            detail, self.end = "max_tokens" if length == p.max_tokens else "context", "length"
        else:
            return None
        return detail

    def _delta(self, tokens: list[int], text: str, detail: str | None, place: int) -> ChoiceOutput:
        p, prompt = self.params, self.stream.prompt_ids
        named = p.logprob_token_ids or []
        wanted = p.logprobs is not None or bool(named)
        delta = ChoiceOutput(self.index, tokens, text if self.stream.with_text else None)
        delta.logprobs = columns(tokens, _width(p.logprobs), named) if wanted and tokens else None
        if place == 0 and p.prompt_logprobs is not None and len(prompt) > 1 and self.end != "abort":
            first = max(1, p.prompt_logprobs_start)
            delta.prompt_logprobs = columns(prompt[first:], _width(p.prompt_logprobs), [])
        delta.cached_tokens = max(0, self.stream.llm.cached - self.index) if place == 0 else 0  # each a token less
        if detail:
            delta.finish_reason, delta.stop_detail, delta.stop_reason = self.end, detail, self.stop_reason
            delta.weight_versions = [("0", 0, place + len(tokens))]
            delta.times = (0.001, 0.25, 1.25)
            delta.message = "the logits are not finite" if self.end == "error" else None
        return delta

    def whole(self) -> ChoiceOutput:
        """All parts as one."""
        first, last = self.parts[0], self.parts[-1]
        last.token_ids = [token for part in self.parts for token in part.token_ids]
        last.text = "".join(part.text or "" for part in self.parts) if last.text is not None else None
        rows = [part.logprobs for part in self.parts if part.logprobs is not None]
        last.logprobs = join_logprobs(rows)
        last.prompt_logprobs, last.cached_tokens = first.prompt_logprobs, first.cached_tokens
        return last


def _width(asked: int | None) -> int:
    return 8 if asked == -1 else asked or 0


@dataclass
class FakeLLM:
    """See the module."""

    config: Config
    script: Script = endless
    fails: Callable[[int], bool] = lambda index: False
    cached: int = 0
    dead: EngineDead | None = None
    restarting: EngineDead | None = None
    hung: bool = False
    silence: float = 0.0
    hold: bool = False
    undecided: bool = False  # no word on new requests yet
    refuse: RequestError | None = None  # the word on new requests
    stats: StepStats = field(default_factory=StepStats)
    status: Status = field(default_factory=Status)
    calls: list[Call] = field(default_factory=list)
    verbs: list[str] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # verbs with their arguments
    answers: dict[str, Any] = field(default_factory=dict)  # by verb; an exception is raised
    streams: dict[str, FakeStream] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)  # streams closed before their end
    ended: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ready = Ready(
            self.config.model.max_model_len or 512, VOCAB, 64, 16, [EOS], "0", {"ops": {"linear": "fake"}}
        )
        self.tokenizer = None if self.config.server.tokens_only else TOKENIZER
        self.inputs = Inputs(self.config, self.ready, lambda: self.tokenizer)
        self.refreshed = 0
        self.news: list[Status] = []  # what a refresh brings
        self._orders: dict[str, Order] = {}

    @property
    def down(self) -> EngineDead | None:
        return self.dead or self.restarting

    @property
    def num_inflight(self) -> int:
        return len(self.streams)

    def prepare(self, order: Order) -> Prepared:
        if self.down:
            raise self.down
        prepared = self.inputs.prepare(order)
        self._orders[prepared.adds[0].rid] = order
        return prepared

    def submit(self, prepared: Sequence[Prepared], group_id: str = "", client: str = "") -> list[FakeStream]:
        """`streams` are by key, and the number of their first choice if there are several."""
        key = prepared[0].key
        if self._of(key):
            raise Conflict(f"request_id {key!r} is in use", field="request_id", code="duplicate_id")
        made = []
        for each in prepared:
            order = self._orders.pop(each.adds[0].rid)
            options = {name: getattr(order, name) for name in OPTIONS}
            self.calls.append(Call(unpack_ids(each.prompt), order.params, each.request_id, options))
            name = key if len(prepared) == 1 else f"{key}-{len(made)}"
            made.append(FakeStream(self, self.calls[-1], name, each.seed))
            made[-1].group = group_id
            self.streams[name] = made[-1]
        return made

    def _of(self, key: str) -> list[FakeStream]:
        return [stream for stream in self.streams.values() if bare_id(stream.request_id) == key]

    async def abort(self, request_ids: Sequence[str], reason: str = "abort_user") -> dict[str, str]:
        if self.dead:
            raise self.dead
        found = {}
        for given in request_ids:
            streams = self._of(bare_id(given))
            found[given] = "aborted" if streams else "finished" if bare_id(given) in self.ended else "not_found"
            for stream in streams:
                stream.abort_reason = reason
                stream.wake.set()
        await asyncio.sleep(0)
        return found

    async def abort_group(self, group_id: str, reason: str = "abort_user") -> dict[str, str]:
        streams = [stream for stream in self.streams.values() if stream.group == group_id]
        return await self.abort([bare_id(stream.request_id) for stream in streams], reason)

    async def abort_all(self, reason: str = "abort_user") -> dict[str, str]:
        return await self.abort([bare_id(stream.request_id) for stream in self.streams.values()], reason)

    async def refresh(self, seconds: float) -> None:
        self.refreshed += 1
        if self.news:
            self.status = self.news.pop(0)

    async def call(self, method: str, /, **args: Any) -> Any:
        if self.dead:
            raise self.dead
        self.verbs.append(method)
        self.asked.append((method, args))
        answer = self.answers.get(method, {})
        if isinstance(answer, Exception):
            raise answer
        return answer

    def die(self) -> None:
        """The engine is gone."""
        self.dead = EngineDead("the engine process ended", private="signal 9")
        self.release()

    def release(self) -> None:
        """End a hold."""
        self.hold = False
        for stream in self.streams.values():
            stream.wake.set()


CONTROLS = (
    "pause_generation", "resume_generation", "is_paused", "sleep", "wake_up", "is_sleeping", "release_kv_cache_memory",
    "reset_prefix_cache", "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update",
    "update_weights", "begin_weight_stream", "feed_weights", "finish_weight_update", "abort_weight_update",
    "update_weight_version",
    "weight_checksums", "checkpoint_checksums",
    "collective_rpc", "fresh_status", "load_lora_adapter", "unload_lora_adapter",
)  # fmt: skip
for _name in CONTROLS:  # the real ones: all they need is `call`
    setattr(FakeLLM, _name, getattr(AsyncLLM, _name))


@dataclass
class Site:
    """A fake and the app around it."""

    llm: FakeLLM
    app: Any

    def client(self, **kwargs: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", **kwargs)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(send())

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return (
            self.request("POST", path, json=body, **kwargs)
            if body is not None
            else self.request("POST", path, **kwargs)
        )

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def events(self, path: str, body: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """The events of a stream, without [DONE], which must be the last."""
        answer = self.post(path, body | {"stream": True}, **kwargs)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse_events(answer.text)


def parse_events(text: str) -> list[dict[str, Any]]:
    lines = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def site(
    script: Script = endless, *, keep_alive: float = 15.0, api_process: ApiProcess | None = None, **options: Any
) -> Site:
    """A fake server; `options` are config fields."""
    values = {"served_model_name": ["tiny", "alias"], "generation_config": "none", "max_model_len": 512} | options
    config = Config.make(**values)
    llm = FakeLLM(config, script)
    return Site(llm, build_app(llm, config, keep_alive=keep_alive, api_process=api_process))  # type: ignore[arg-type]


class Caller:
    """One ASGI request whose client can hang up, and whose writes are seen as they come."""

    def __init__(
        self, site: Site, path: str, body: Any, headers: dict[str, str] | None = None, chunks: int = 1
    ) -> None:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        size = -(-len(raw) // chunks)
        self._incoming = deque(raw[i * size : (i + 1) * size] for i in range(chunks))
        names = {"content-type": "application/json"} | (headers or {})
        self.scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "query_string": b"", "scheme": "http",
            "headers": [(k.encode(), v.encode()) for k, v in names.items()], "client": ("a", 1), "server": ("b", 2),
        }  # fmt: skip
        self.site = site
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self.done = False
        self.read = 0
        self._left = asyncio.Event()
        self.task = asyncio.create_task(site.app(self.scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._left.set()

    async def wait_for(self, condition: Callable[[Caller], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition(self):
                await asyncio.sleep(0.001)

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            chunk = self._incoming.popleft()
            self.read += len(chunk)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._incoming)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        assert not self.done, "a message after the end"
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.writes.append(message.get("body", b""))
            self.done = not message.get("more_body", False)
