"""The real client, scheduler and KV cache around a scripted model, in one thread and without a socket.

`ScriptedLLM` is the `AsyncLLM` of an application under test.  Its engine is turned by whichever event loop runs, so a
test may have several, one after the other.  Tests can look at what was sent, hold the engine up, end it, and
reply to admin commands themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tests.server.byte_tokenizer import EOS, TOKENIZER, VOCAB, ids
from tokserve.base.errors import REFUSALS, EngineDead, RequestError
from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.engine_client import EngineClient
from tokserve.client.inputs import GenerateRequest
from tokserve.client.outputs import Column, EngineReport
from tokserve.client.request_state import RequestState
from tokserve.client.stream import Stream
from tokserve.config import Config
from tokserve.engine.core import EngineCore
from tokserve.protocol.commands import COMMANDS
from tokserve.protocol.logprobs import logprob_column
from tokserve.protocol.messages import (
    Abort,
    Call,
    Dead,
    FromEngine,
    Ready,
    Stall,
    Submit,
    SubmitReply,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from tokserve.protocol.params import SamplingParams, StructuredOutputs
from tokserve.protocol.plan import StepPlan
from tokserve.protocol.prompt import unpack_ids
from tokserve.testing.executor import Row, ScriptedChoice, ScriptedModel
from tokserve.testing.script import ScriptedReply
from tokserve.text.tokenizer import Tokenizer

WAIT_SECONDS, FORWARD_SECONDS = 0.125, 0.125  # by the engine's clock, before each step and in it
TOKEN_SECONDS = WAIT_SECONDS + FORWARD_SECONDS
LISTENING = 8  # turns of the event loop from a submission to the application's wait for its outputs
NUM_BLOCKS = 1024
IDENTITY = b"server"  # of the front end
NOWHERE = 7  # a token whose logprob is -inf
REFUSAL_OF_STATUS = {400: "invalid", 404: "model_not_found", 409: "duplicate_id", 429: "queue_full", 503: "draining"}
ABORTS = ("abort", "abort_group", "abort_prefix", "abort_all")
Script = Callable[[Sequence[int], int], list[int]]


def says(text: str) -> Script:
    """Every choice answers `text` and ends."""
    return lambda prompt, index: [*ids(text), EOS]


def endless(prompt: Sequence[int], index: int) -> list[int]:
    """Letters that depend on the prompt and the choice, far beyond any limit."""
    first = sum(prompt) + 3 * index
    return [3 + 64 + (first + i * i) % 26 for i in range(3000)]


def logprobs(token: int, top: int, named: Sequence[int]) -> Row:
    """Made-up logprobs: even tokens are the most probable, odd ones come third; NOWHERE is impossible."""
    rank = 1 if token % 2 == 0 else 3
    alternatives = [token if i + 1 == rank else (token + 11 + i) % VOCAB for i in range(top)]
    values = [-0.125 * (i + 1) for i in range(top)] + [-5.0 - 0.5 * i for i in range(len(named))]
    return Row(-np.inf if token == NOWHERE else -0.125 * rank, rank, [*alternatives, *named], values)


def columns(tokens: Sequence[int], top: int, named: Sequence[int] = ()) -> Column:
    """The same of several tokens, as the client gets them."""
    rows = [logprobs(token, top, named) for token in tokens]
    values, ranks = np.array([row.logprob for row in rows], np.float32), np.array([row.rank for row in rows], np.int32)
    shape = (len(rows), top + len(named))
    ids = np.array([row.top_ids for row in rows], np.int32).reshape(shape)
    return logprob_column(values, ranks, ids, np.array([row.top_logprobs for row in rows], np.float32).reshape(shape))


def complete(method: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an admin command, with the defaults of those that are left out."""
    if method not in COMMANDS:
        return args
    parameters: dict[str, Any] = msgspec.structs.asdict(msgspec.convert(args, COMMANDS[method].parameters))
    return parameters


class Model(ScriptedModel):
    """A scripted model with the logprobs of this module, and the engine's clock."""

    now = 0.0

    def forward(self, plan: StepPlan) -> None:
        self.now += FORWARD_SECONDS
        super().forward(plan)

    def logprobs(self, token: int, logprob: float, top: int, ids: Sequence[int]) -> Row:
        return logprobs(token, top, ids)


class EngineLink:
    """An engine in the place of the client's socket; messages are packed as they would be for the socket.

    `hold`: the engine makes no step.  `undecided`: it does not see new requests yet.  `refuse`: what it says to them.
    """

    def __init__(
        self,
        config: Config,
        deliver: Callable[[FromEngine], None],
        drained: Callable[[], None],
        script: Script,
        vocab_size: int,
    ) -> None:
        self.script = script
        self.fails: Callable[[int], bool] = lambda index: False
        self.hold = False
        self.undecided = False
        self.refuse: RequestError | None = None
        self.sent: list[ToEngine] = []
        self._deliver, self._drained = deliver, drained
        self._received: deque[bytes] = deque()
        self._undecided: list[Submit] = []
        self._patience = 0  # turns without a step
        self._turning: asyncio.AbstractEventLoop | None = None  # the loop in which the next turn is due
        assert config.cache.block_size is not None
        self._model = Model(vocab_size, EOS, config.cache.block_size, NUM_BLOCKS)
        self._core = EngineCore(config, self._model, self._model.start(), self._emit, lambda: self._model.now)

    def hello(self) -> Ready:
        """What the engine says when it is ready."""
        self._core.receive(IDENTITY, Call(0, "hello"))
        ready = decode_from_engine(self._received.popleft())
        assert isinstance(ready, Ready)
        return ready

    def send(self, message: ToEngine) -> None:
        """Give the engine a message, which it takes before its next step."""
        self.sent.append(message)
        if not isinstance(message, Submit):
            self._core.receive(IDENTITY, decode_to_engine(encode(message)))
        elif self.undecided:
            self._undecided.append(message)
        else:
            self._submit(message)
        self.wake()

    def _submit(self, message: Submit) -> None:
        if (error := self.refuse) is not None:
            code = error.code if error.code in REFUSALS else REFUSAL_OF_STATUS[error.status]
            self._emit(
                IDENTITY, SubmitReply(message.call_id, code, str(error), error.retry_after or 1, error.field or "")
            )
            return
        self._patience = LISTENING
        for request in message.requests:
            index = int(request.request_id.rpartition("#")[2])
            tokens = self.script(unpack_ids(request.prompt.ids), index)
            scripted = ScriptedReply(tokens, fail_at=0 if self.fails(index) else None)
            self._model.choices[request.request_id] = ScriptedChoice(scripted)
        self._core.receive(IDENTITY, decode_to_engine(encode(without_grammars(message))))

    def call_elsewhere(self, method: str, **args: Any) -> None:
        """Another front end calls a command."""
        self._core.receive(b"another", Call(1, method, args))
        while self._core.step():
            pass

    def wake(self) -> None:
        """Turn the engine soon."""
        if not self.undecided:
            undecided, self._undecided = self._undecided, []
            for message in undecided:
                self._submit(message)
        loop = asyncio.get_running_loop()
        if self._turning is not loop:
            self._turning = loop
            loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = None
        self._patience = max(0, self._patience - 1)
        try:
            busy = self._patience or (not self.hold and self._step())
        except Exception as error:  # what the engine's process does
            self._deliver(Dead(f"{type(error).__name__}: {error}"))
            raise
        self.deliver()
        if busy:
            self.wake()

    def _step(self) -> bool:
        self._model.now += WAIT_SECONDS
        return self._core.step()

    def deliver(self) -> None:
        """Give the client what the engine has sent."""
        while self._received:
            self._deliver(decode_from_engine(self._received.popleft()))
        self._drained()

    def _emit(self, identity: bytes, message: FromEngine) -> None:
        if identity == IDENTITY:
            self._received.append(encode(message))

    def close(self) -> None:
        """Deliver nothing more."""
        self._received.clear()
        self.hold = True


def without_grammars(message: Submit) -> Submit:
    """The same requests; a script says what it says, whatever the grammar."""
    replace = msgspec.structs.replace
    return replace(
        message,
        requests=[
            replace(request, task=replace(request.task, structured_outputs=None)) for request in message.requests
        ],
    )


class SubmittedPrompt(NamedTuple):
    """What was sent for one prompt.  `form`: the structured outputs as the engine gets them."""

    prompt: list[int]
    params: SamplingParams
    request_id: str
    options: dict[str, Any]
    form: StructuredOutputs | None = None


class ScriptedEngine(EngineClient):
    """The client of an `EngineLink`, which is ready from the start."""

    def __init__(self, config: Config, script: Script, vocab_size: int) -> None:
        super().__init__(config)
        self.link = EngineLink(config, self._on_message, self.requests.notify, script, vocab_size)
        self.ready = self.link.hello()
        self._socket = self.link  # type: ignore[assignment]

    def send(self, message: ToEngine) -> None:
        self._loop = asyncio.get_running_loop()
        super().send(message)

    def lose(self, error: EngineDead) -> None:
        """The engine is gone, for good."""
        self.dead = self.down = error
        self._disconnect(error)


def _of_engine(name: str) -> Any:
    """A property of the client of the engine, which a test may set."""
    return property(lambda self: getattr(self._engine, name), lambda self, value: setattr(self._engine, name, value))


def _replaceable(name: str) -> Any:
    """A property of the client of the engine, until a test sets another value."""
    return property(
        lambda self: self._replaced.get(name, getattr(self._engine, name)),
        lambda self, value: self._replaced.update({name: value}),
    )


def _of_link(name: str) -> Any:
    """An attribute of the link."""
    return property(lambda self: getattr(self.link, name), lambda self, value: setattr(self.link, name, value))


class ScriptedLLM(AsyncLLM):
    """See the module.

    `calls`: the prompts that were submitted, and `streams` of them.  `commands`: the admin commands but those that
    abort, with their arguments.  `answers`: replies to commands by name, {} for others; an exception is raised; if it
    is None, the engine replies.  `status` and `stats`, once set, are not the engine's any more.
    """

    images = None  # it serves none
    hung = False
    silence = 0.0
    ready, down = _of_engine("ready"), _of_engine("down")
    status, stats = _replaceable("status"), _replaceable("stats")
    script, fails, hold, undecided, refuse = (
        _of_link(name) for name in ("script", "fails", "hold", "undecided", "refuse")
    )

    def __init__(self, config: Config, script: Script = endless, tokenizer: Tokenizer = TOKENIZER) -> None:
        cache = msgspec.structs.replace(config.cache, block_size=config.cache.block_size or 16)
        model = msgspec.structs.replace(config.model, eos_token_ids=[EOS])
        self._set_up(msgspec.structs.replace(config, cache=cache, model=model, scheduler=config.scheduler.resolved()))
        engine = ScriptedEngine(self.config, script, tokenizer.vocab_size)
        self._engine, self.link = engine, engine.link
        self._tokenizer = None if config.server.tokens_only else tokenizer
        self.streams: list[Stream] = []  # all that were submitted
        self.calls: list[SubmittedPrompt] = []
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] | None = None
        self.num_refreshes = 0
        self.other_engines: list[EngineReport] = []
        self._replaced: dict[str, Any] = {}  # values of the engine that the test has set
        self._prepared: dict[RequestState, SubmittedPrompt] = {}  # and perhaps never sent

    @property
    def verbs(self) -> list[str]:
        return [method for method, _ in self.commands]

    @property
    def released(self) -> set[str]:
        """The engine's requests whose client left before their end."""
        aborts = [one for one in self.link.sent if isinstance(one, Abort) and one.reason == "abort_disconnect"]
        return {request_id for abort in aborts for request_id in abort.request_ids}

    @property
    def stalls(self) -> list[bool]:
        """When a client did not read, and when it did again."""
        return [message.stalled for message in self.link.sent if isinstance(message, Stall)]

    @property
    def reports(self) -> list[EngineReport]:
        [report] = super().reports
        return [msgspec.structs.replace(report, stats=self.stats, status=self.status), *self.other_engines]

    @property
    def announced(self) -> list[str]:
        """Requests that are to come."""
        return [announce.request_id for announce in self._engine._announced.values()]

    def prepare(self, request: GenerateRequest) -> RequestState:
        state = super().prepare(request)
        assert isinstance(request.task, SamplingParams)
        options = msgspec.structs.asdict(request.options) | {"text": request.text}
        sent = state.engine_requests[0].task
        form = sent.structured_outputs if isinstance(sent, SamplingParams) else None
        self._prepared[state] = SubmittedPrompt(
            unpack_ids(state.prompt.ids), request.task, request.request_id, options, form
        )
        return state

    def submit(
        self, requests: Sequence[RequestState], client: str = "", announcement: RequestAnnouncement | None = None
    ) -> list[Stream]:
        streams = super().submit(requests, client, announcement)
        self.calls += [self._prepared.pop(state) for state in requests]
        self.streams += streams
        return streams

    async def call(self, method: str, /, **args: Any) -> Any:
        if method not in ABORTS:
            self.commands.append((method, complete(method, args)))
        if self.answers is None or method in ABORTS:
            return await super().call(method, **args)
        self._engine.check()
        answer = self.answers.get(method, {})
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def refresh(self, seconds: float) -> None:
        self.num_refreshes += 1
        with suppress(TimeoutError, EngineDead):
            await asyncio.wait_for(super().call("stats"), seconds)

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter whose weights change nothing."""
        self.link.call_elsewhere("load_lora_adapter", lora_name=name, lora_path=path)
        self.link.deliver()

    def die(self) -> None:
        """The engine is gone."""
        self._engine.lose(EngineDead("the engine process ended", private="signal 9"))

    def wake(self) -> None:
        """End what holds the engine up."""
        self.hold = self.undecided = False
        self.link.wake()
