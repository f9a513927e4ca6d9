"""An AsyncLLM with scripted tokens and a byte-level tokenizer, and an ASGI caller that can hang up.

`FakeLLM` has the client's own checks, request states and streams; what it scripts are the engine's outputs, and the
engine's death.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests import documented
from tests.outputs import Output, pack
from tests.text.tool_templates import HERMES
from tokserve.admin import COMMANDS
from tokserve.client.admin import AdminMethods
from tokserve.client.inputs import GenerateRequest, Inputs, bare_id
from tokserve.client.outputs import ChoiceOutput, EngineReport, Logprobs, StepStats
from tokserve.client.request_state import RequestState
from tokserve.client.requests import Requests
from tokserve.client.stream import Stream
from tokserve.config import Config
from tokserve.errors import Conflict, EngineDead, RequestError
from tokserve.messages import EngineRequest, Finish, Ready, Status
from tokserve.params import SamplingParams
from tokserve.prompt import unpack_ids
from tokserve.server.app import build_app
from tokserve.server.observe.counters import ApiProcess
from tokserve.text.tokenizer import Tokenizer

EOS = 0
NOWHERE = 7  # a token whose logprob is -inf
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


RUNNING = Status()


def complete(method: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an admin command, with the defaults of those that are left out."""
    if method not in COMMANDS:
        return args
    parameters: dict[str, Any] = msgspec.structs.asdict(msgspec.convert(args, COMMANDS[method].parameters))
    return parameters


class Call(NamedTuple):
    """What was sent for one prompt."""

    prompt: list[int]
    params: SamplingParams
    request_id: str
    options: dict[str, Any]


class FakeStream(Stream):
    """A stream whose tokens come as soon as it has a consumer; `llm.hold` stops it before the next token."""

    def __init__(self, llm: FakeLLM, state: RequestState, call: Call, name: str) -> None:
        engine_requests, state.engine_requests = state.engine_requests, ()
        super().__init__(llm, state)
        self.llm, self.state, self.call, self.name = llm, state, call, name
        self.listen = self._listen  # type: ignore[method-assign]
        self.abort_reason: str | None = None
        self.wake = asyncio.Event()
        self.stalls: list[bool] = []
        self.playing: asyncio.Task[None] | None = None
        self._choices = [_Choice(self, request, index) for index, request in enumerate(engine_requests)]

    async def accepted(self) -> None:
        while self.llm.undecided and not self.llm.dead:
            await asyncio.sleep(0)
        if self.llm.dead:
            raise self.llm.dead
        if self.llm.refuse is not None:
            self.llm.forget(self, self.llm.refused)
            raise self.llm.refuse

    def _listen(self, listener: Callable[[], None] | None) -> None:
        self.state.listen(listener)
        self._play()

    async def __anext__(self) -> ChoiceOutput:
        self._play()
        return await super().__anext__()

    def _play(self) -> None:
        if self.playing is None:
            self.playing = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        """Turn after turn, a token of each choice; a consumer that does not take them gets them merged later."""
        try:
            while going := [choice for choice in self._choices if choice.finish is None]:
                await self._turn()
                if self.llm.dead:
                    raise self.llm.dead
                self._step(going)
        except Exception as error:
            self.state.fail(error)  # type: ignore[arg-type]

    def _step(self, going: list[_Choice]) -> None:
        client = self.llm.requests
        stopped = client.receive(pack([choice.row(self.abort_reason) for choice in going], StepStats()))
        ends = [choice.row("abort_stop_string") for choice in going if choice.request.request_id in stopped]
        client.receive(pack(ends, StepStats()))
        if self.state.num_open == 0:
            self.llm.forget(self, self.llm.ended)
        client.notify()

    async def _turn(self) -> None:
        """One engine step, or the wait for one."""
        await asyncio.sleep(0)
        while self.llm.hold and self.abort_reason is None and self.llm.dead is None:
            self.wake.clear()
            await self.wake.wait()


class _Choice:
    """A choice in the engine."""

    def __init__(self, stream: FakeStream, request: EngineRequest, index: int) -> None:
        assert isinstance(request.task, SamplingParams)
        self.llm, self.prompt, self.request, self.index = stream.llm, stream.call.prompt, request, index
        self.params = request.task
        self.script = self.llm.script(self.prompt, index)
        self.limit = min(self.params.max_tokens or 10**9, self.llm.ready.max_model_len - len(self.prompt))
        self.length = 0
        self.finish: Finish | None = None

    def row(self, abort_reason: str | None) -> Output:
        """The next token, or the end."""
        p, prompt = self.params, self.prompt
        named = p.logprob_token_ids or []
        tokens: list[int] = []
        is_first = self.length == 0
        if abort_reason:
            self._end("abort", abort_reason)
        elif self.llm.fails(self.index):
            self._end("error", "nan", message="the logits are not finite")
        else:
            tokens = [self.script[self.length]]
            self.length += 1
            self._end_after(tokens[0])
        output = Output(self.request.request_id, tokens, finish=self.finish)
        if tokens and (p.logprobs is not None or named):
            output.logprobs = columns(tokens, _width(p.logprobs), named)
        if is_first:
            output.cached = max(0, self.llm.cached - self.index)  # each a token less
            if p.prompt_logprobs is not None and len(prompt) > 1 and not abort_reason:
                first = max(1, p.prompt_logprobs_start)
                output.prompt_logprobs = columns(prompt[first:], _width(p.prompt_logprobs), [])
        if self.finish:
            output.spans = [("0", 0, self.length)]
        return output

    def _end_after(self, token: int) -> None:
        p = self.params
        if token == EOS and not p.ignore_eos:
            self._end("stop", "eos")
        elif token in p.stop_token_ids:
            self._end("stop", "stop_token", token)
        elif self.length >= self.limit:
            self._end("length", "max_tokens" if self.length == p.max_tokens else "context")

    def _end(self, reason: str, detail: str, stop: int | None = None, message: str | None = None) -> None:
        self.finish = Finish(reason, detail, stop, message, queued=0.001, first_token=0.25, total=1.25)


def _width(body: int | None) -> int:
    return 8 if body == -1 else body or 0


@dataclass(eq=False)
class FakeAnnouncement:
    """A request that is to come.  `ended`: why it was aborted."""

    llm: FakeLLM
    request_id: str
    group_id: str | None
    ended: str | None = None

    def end(self) -> None:
        self.llm.announced.remove(self)


@dataclass
class FakeLLM(AdminMethods):
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
    status: Status = RUNNING
    calls: list[Call] = field(default_factory=list)
    verbs: list[str] = field(default_factory=list)
    commands: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # verbs with their arguments
    answers: dict[str, Any] = field(default_factory=dict)  # by verb; an exception is raised
    streams: dict[str, FakeStream] = field(default_factory=dict)
    made: list[FakeStream] = field(default_factory=list)  # all streams
    left: set[str] = field(default_factory=set)  # streams closed before their end
    ended: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    images: None = None  # it serves no images

    def __post_init__(self) -> None:
        self.ready = Ready(
            self.config.model.max_model_len or 512, VOCAB, 64, 16, [EOS], "0", {"ops": {"linear": "fake"}}
        )
        self.tokenizer = None if self.config.server.tokens_only else TOKENIZER
        self.inputs = Inputs(self.config, self.ready, lambda: self.tokenizer)
        self.refreshed = 0
        self.news: list[Status] = []  # what a refresh brings
        self.other_engines: list[EngineReport] = []
        self.requests = Requests()
        self.announced: list[FakeAnnouncement] = []
        self._calls: dict[RequestState, Call] = {}  # prepared, and perhaps never sent
        self._last_call = 0

    @property
    def down(self) -> EngineDead | None:
        return self.dead or self.restarting

    @property
    def reports(self) -> list[EngineReport]:
        first = EngineReport(0, self.stats, self.status, self.ready, self.down is not None)
        return [first, *self.other_engines]

    @property
    def num_inflight(self) -> int:
        return len(self.streams)

    def prepare(self, request: GenerateRequest) -> RequestState:
        if self.down:
            raise self.down
        state = self.inputs.prepare(request)
        assert isinstance(request.task, SamplingParams)
        options = msgspec.structs.asdict(request.options) | {"text": request.text}
        self._calls[state] = Call(unpack_ids(state.prompt.ids), request.task, request.request_id, options)
        return state

    def announce(self, request_id: str, group_id: str | None = None) -> FakeAnnouncement:
        announcement = FakeAnnouncement(self, bare_id(request_id), group_id)
        self.announced.append(announcement)
        return announcement

    def submit(
        self, states: Sequence[RequestState], client: str = "", announcement: FakeAnnouncement | None = None
    ) -> list[FakeStream]:
        """`streams` are by id, and the number of their prompt if there are several."""
        bare = bare_id(states[0].request_id)
        if self._of(bare):
            raise Conflict(f"request_id {bare!r} is in use", field="request_id", code="duplicate_id")
        self._last_call += 1
        self.requests.add(self._last_call, states)
        for index, state in enumerate(states):
            self.calls.append(self._calls.pop(state))
            name = bare if len(states) == 1 else f"{bare}-{index}"
            self.streams[name] = FakeStream(self, state, self.calls[-1], name)
            self.made.append(self.streams[name])
            if announcement is not None:
                self.streams[name].abort_reason = announcement.ended
        return self.made[-len(states) :]

    def forget(self, stream: FakeStream, where: set[str]) -> None:
        """A stream has come to an end of this kind."""
        if self.streams.pop(stream.name, None) is not None:
            where.add(stream.name)

    def _stream(self, state: RequestState) -> FakeStream | None:
        return next((stream for stream in self.streams.values() if stream.state is state), None)

    def release(self, state: RequestState) -> None:
        stream = self._stream(state)
        self.requests.abandon(state)
        if stream is not None:
            self.forget(stream, self.left)
            if stream.playing is not None:
                stream.playing.cancel()

    def release_soon(self, state: RequestState) -> None:
        """Dropped streams make no more tokens once the loop has ended."""

    def stall(self, state: RequestState, stalled: bool) -> None:
        [stream] = [stream for stream in self.made if stream.state is state]
        stream.stalls.append(stalled)

    def _of(self, bare: str) -> list[FakeStream]:
        return [stream for stream in self.streams.values() if bare_id(stream.request_id) == bare]

    async def abort(self, request_ids: Sequence[str], reason: str = "abort_user") -> dict[str, str]:
        if self.dead:
            raise self.dead
        results = {}
        for given in request_ids:
            streams = self._of(bare_id(given))
            coming = [one for one in self.announced if one.request_id == bare_id(given) and one.ended is None]
            for announcement in coming:
                announcement.ended = reason
            ended = "finished" if bare_id(given) in self.ended else "not_found"
            results[given] = "aborted" if streams or coming else ended
            for stream in streams:
                stream.abort_reason = reason
                stream.wake.set()
        await asyncio.sleep(0)
        return results

    async def abort_group(self, group_id: str, reason: str = "abort_user") -> dict[str, str]:
        streams = [stream for stream in self.streams.values() if stream.call.options["group_id"] == group_id]
        coming = [one.request_id for one in self.announced if one.group_id == group_id and one.ended is None]
        return await self.abort([bare_id(stream.request_id) for stream in streams] + coming, reason)

    async def abort_prefix(self, prefix: str, reason: str = "abort_user") -> dict[str, str]:
        named = {bare_id(stream.request_id) for stream in self.streams.values()}
        named |= {one.request_id for one in self.announced if one.ended is None}
        return await self.abort([name for name in sorted(named) if name.startswith(prefix)], reason)

    async def abort_all(self, reason: str = "abort_user") -> dict[str, str]:
        coming = [one.request_id for one in self.announced if one.ended is None]
        return await self.abort([bare_id(stream.request_id) for stream in self.streams.values()] + coming, reason)

    async def refresh(self, seconds: float) -> None:
        self.refreshed += 1
        if self.news:
            self.status = self.news.pop(0)

    async def call(self, method: str, /, **args: Any) -> Any:
        if self.dead:
            raise self.dead
        self.verbs.append(method)
        self.commands.append((method, complete(method, args)))
        answer = self.answers.get(method, {})
        if isinstance(answer, Exception):
            raise answer
        return answer

    def die(self) -> None:
        """The engine is gone."""
        self.dead = EngineDead("the engine process ended", private="signal 9")
        self.wake()

    def wake(self) -> None:
        """End a hold."""
        self.hold = False
        for stream in self.streams.values():
            stream.wake.set()


DOCUMENTS: dict[Any, dict[str, Any]] = {}


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

        response = asyncio.run(send())
        documented.check(self.document(), response, without_bodies=("admin", "sglang", "trainers"))
        return response

    def document(self) -> dict[str, Any]:
        """Its OpenAPI document; the names of models may be those of another site."""
        config = self.llm.config
        server = config.server
        kind = (server.sglang_api, server.tokens_only, server.ui, config.model.runner)
        if kind not in DOCUMENTS:
            DOCUMENTS[kind] = self.app.openapi()
        return DOCUMENTS[kind]

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


def chat_site(text: str, template: str = HERMES, **options: Any) -> Site:
    """A fake server whose choices all answer `text`; `template` makes prompts of its conversations."""
    return site(says(text), **({"chat_template": template, "max_model_len": 2048} | options))


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
