"""`Engine`: an `EngineCore` over a scripted executor, with what it sent sorted by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tests.engine.drafters import draft_with
from tests.engine.scripted import ScriptedExecutor
from tests.engine.solo import EOS, Solo, engine_request, solo
from tests.outputs import Output, unpack
from tokserve.config import Config
from tokserve.engine.core import EngineCore
from tokserve.features.speculation.drafter import Drafter
from tokserve.protocol.columns import Column, join
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.kv_spec import StateLayout
from tokserve.protocol.messages import (
    Abort,
    Call,
    EngineRequest,
    Finish,
    FromEngine,
    Reply,
    Stall,
    StepOutput,
    StepStats,
    Submit,
    SubmitReply,
    decode_from_engine,
    encode,
)
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.prompt import unpack_ids

F = TypeVar("F")
D = TypeVar("D", bound=Drafter)


@dataclass
class Received:
    """The messages to the owner of a request."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    logprobs: Column | None = None
    prompt_logprobs: Column | None = None
    finish: Finish | None = None
    cached: int = 0
    pooled: bytes = b""

    def take(self, output: Output) -> None:
        assert self.finish is None, f"{output.rid}: output after its finish"
        assert output.token_ids or output.finish, f"{output.rid}: an output that says nothing"
        self.outputs.append(output)
        self.tokens += output.token_ids
        if output.cached:
            assert len(self.outputs) == 1, "cached tokens are told with the first output"
            self.cached = output.cached
        if output.logprobs is not None:
            self.logprobs = output.logprobs if self.logprobs is None else join([self.logprobs, output.logprobs])
        if output.prompt_logprobs is not None:
            assert len(self.outputs) == 1, "prompt logprobs come with the first output"
            self.prompt_logprobs = output.prompt_logprobs
        self.pooled += output.pooled
        self.finish = output.finish


class Clock:
    """A simulated clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """An EngineCore over a ScriptedExecutor, with what it sent sorted by request."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        context: int = 64,
        drafter: Drafter | None = None,
        snapshots: int | None = None,
        interval: int = 8,
        images: ImageFormat | None = None,
        **options: Any,
    ) -> None:
        """`snapshots`: of a model with recurrent states, taken every `interval` tokens.  `images`: of one with a
        tower."""
        options = {
            "model": "scripted",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "spec_method": "none",
            **options,
        }
        options.setdefault("eos_token_ids", list(EOS))
        self.config = Config.make(max_model_len=context, **options)
        slots = self.config.scheduler.max_num_seqs
        states = None if snapshots is None else StateLayout(slots, snapshots, interval, spare_inputs=9)
        self.executor = ScriptedExecutor(self.config, num_blocks, block_size, states, images)
        self.clock = Clock()
        self.wakes: list[None] = []
        self.core = EngineCore(
            self.config,
            self.executor,
            self.executor.start(),
            self._emit,
            self.clock,
            lambda: self.wakes.append(None),
        )
        if drafter is not None:
            self.draft_with(drafter)
        self.received: dict[str, Received] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.messages: list[tuple[bytes, FromEngine]] = []
        self.owners: dict[str, bytes] = {}
        self.submit_replies: list[SubmitReply] = []
        self.weights_of = {"v1": ""}  # by version
        self.loads: dict[int, str] = {}  # generation -> path of the adapter

    def draft_with(self, drafter: D) -> D:
        """Propose drafts by this drafter from here on."""
        return draft_with(self.core, drafter)

    def feature(self, kind: type[F]) -> F:
        """The engine's feature of this class."""
        return next(feature for feature in self.core.features if isinstance(feature, kind))

    def _emit(self, identity: bytes, message: FromEngine) -> None:
        message = decode_from_engine(encode(message))
        self.messages.append((identity, message))
        if isinstance(message, SubmitReply):
            self.submit_replies.append(message)
        if isinstance(message, Reply) and isinstance(message.result, dict) and "generation" in message.result:
            self.loads[message.result["generation"]] = message.result["lora_path"]
        if isinstance(message, StepOutput):
            for output in unpack(message):
                assert self.owners[output.rid] == identity, "sent to another front end"
                self.received.setdefault(output.rid, Received()).take(output)

    def make(
        self,
        rid: str,
        prompt: Sequence[int],
        *,
        owner: bytes = b"A",
        seed: int = 0,
        task: PoolingParams | None = None,
        **fields: Any,
    ) -> EngineRequest:
        """A request that is yet to be submitted; `fields` of SamplingParams and RequestOptions."""
        names = {f.name for f in msgspec.structs.fields(SamplingParams)}
        params = SamplingParams(**{name: value for name, value in fields.items() if name in names})
        options = {name: value for name, value in fields.items() if name not in names}
        self.requests[rid] = request = engine_request(rid, prompt, params if task is None else task, seed, **options)
        self.owners[rid] = owner
        return request

    def submit(self, key: str, *requests: EngineRequest, owner: bytes = b"A", client: str = "") -> SubmitReply:
        """Submit requests under one id; the engine's reply."""
        self.core.receive(owner, Submit(7, key, list(requests), client))
        return self.submit_replies[-1]

    def add(
        self, rid: str, prompt: Sequence[int], *, owner: bytes = b"A", client: str = "", **fields: Any
    ) -> EngineRequest:
        """Submit one request, whose id is that of its submission as well; it must be accepted."""
        request = self.make(rid, prompt, owner=owner, **fields)
        assert self.submit(rid, request, owner=owner, client=client) == SubmitReply(7)
        return request

    def stall(self, *rids: str, stalled: bool = True, owner: bytes = b"A") -> None:
        """Their client does not read, or reads again."""
        self.core.receive(owner, Stall(list(rids), stalled))

    def add_choices(self, key: str, count: int = 2, *, owner: bytes = b"A", **options: Any) -> None:
        """Submit `count` requests of 40 tokens under one id, with ids "key#0" and so on; they must be accepted."""
        requests = [
            self.make(f"{key}#{i}", [3, i], owner=owner, max_tokens=40, ignore_eos=True, **options)
            for i in range(count)
        ]
        assert self.submit(key, *requests, owner=owner) == SubmitReply(7)

    def abort(self, *keys: str, reason: str = "abort_user", call_id: int | None = 1, owner: bytes = b"A") -> None:
        """Abort requests by key, with an acknowledgement; without a call id, as their owner aborts them."""
        if call_id is None:
            self.core.receive(owner, Abort(list(keys), reason))
        else:
            self.call("abort", keys=list(keys), reason=reason, call_id=call_id, owner=owner)

    def call(self, method: str, /, *, call_id: int = 1, owner: bytes = b"A", **args: Any) -> None:
        self.core.receive(owner, Call(call_id, method, args))

    def step(self) -> bool:
        busy = self.core.step()
        self.core.cache.check()
        return busy

    def run(self, limit: int = 2000) -> None:
        """Until idle."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the engine does not come to rest")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def replies(self) -> list[Reply]:
        return [message for _, message in self.messages if isinstance(message, Reply)]

    @property
    def stats(self) -> StepStats:
        return self.core.scheduler.stats()

    def stored(self, name: str) -> float:
        """A statistic of the KV store."""
        number: float = self.stats.rooms["kv_store"][name]
        return number

    def solo(self, rid: str) -> Solo:
        """The result of the request alone, with the weights that its spans name, or else the first."""
        request = self.requests[rid]
        eos = self.config.model.eos_token_ids or ()
        spans = self.received[rid].outputs[-1].spans if rid in self.received else []
        made_by = {index: self.weights_behind(label) for label, start, end in spans for index in range(start, end)}
        prompt_spans = self.received[rid].outputs[-1].prompt_spans if rid in self.received else []
        prompt_weights = self.weights_behind(prompt_spans[0][0]) if prompt_spans else ""
        return solo(
            unpack_ids(request.prompt.ids),
            request.task,
            request.seed,
            self.core.limits.context,
            eos,
            lambda i: made_by.get(i, self.weights_of["v1"]),
            request.prompt.features,
            prompt_weights,
        )

    def weights_behind(self, label: str) -> str:
        """What a span's version stands for."""
        version, plus, adapter = label.partition("+")
        return self.weights_of[version] + (f"+{self.loads[int(adapter.rpartition('@')[2])]}" if plus else "")

    def tokens(self, rid: str) -> list[int]:
        return self.received[rid].tokens

    def last_reply(self) -> Reply:
        assert self.replies, "no reply yet"
        return self.replies[-1]

    def finish(self, rid: str) -> Finish:
        """How a request ended."""
        finish = self.received[rid].finish
        assert finish is not None, f"{rid} has not ended"
        return finish

    def check_complete(self, rid: str) -> None:
        """The request ended by itself, with exactly what it gives alone."""
        received, expected = self.received[rid], self.solo(rid)
        assert received.finish is not None, f"{rid} has not ended"
        assert (received.tokens, received.finish.detail) == (expected.tokens, expected.detail)
        assert received.logprobs == expected.logprobs
        assert received.prompt_logprobs == expected.prompt_logprobs
        self.check_spans(rid)
        assert received.pooled == expected.pooled
        if not self.requests[rid].options.stream:
            assert len(received.outputs) == 1

    def check_spans(self, rid: str) -> None:
        """Spans cover all output tokens without gaps, or name the version of a vector; `solo` checks the versions.
        They have all weights whose KV a token has read, and no others."""
        received, place = self.received[rid], 0
        seen: dict[str, int] = {}  # weights, and the first token after they came in
        spans = received.outputs[-1].spans
        assert len(spans) == 1 or not received.pooled
        for label, start, end in spans:
            assert start == place and place <= end
            seen.setdefault(self.weights_behind(label), start)
            place = end
        assert place == len(received.tokens)
        if set(self.weights_of) == {"v1"} and not self.loads:
            assert len(spans) <= 1
        kv = [self.executor.kv_read[rid, index] for index in range(place)]
        for index, weights in enumerate(kv):
            assert all(seen[one] <= index for one in weights), "KV of weights that are not reported"
        for label, start, _ in spans if kv else ():
            assert self.weights_behind(label) in kv[start], "weights are reported that computed nothing"
        self._check_prompt_spans(rid)

    def _check_prompt_spans(self, rid: str) -> None:
        """Spans of the prompt say what made the KV of each of its positions, as the first token read it."""
        named = [
            weights
            for label, start, end in self.received[rid].outputs[-1].prompt_spans
            for weights in [self.weights_behind(label)] * (end - start)
        ]
        prompt_len = len(self.requests[rid].prompt.ids) // 4
        if self.received[rid].tokens:
            assert named == self.executor.kv_read[rid, 0][:prompt_len]
        elif self.received[rid].pooled:
            assert len(set(named)) == 1 and len(named) == prompt_len
        else:
            assert len(named) <= prompt_len

    def check_empty(self) -> None:
        """All slots, blocks and limits are released."""
        self.core.cache.check()
        self.core.cache.check_idle()
        assert self.stats.running == self.stats.waiting == self.stats.blocks_held == 0
        assert len(self.core.scheduler._free_slots) == self.config.scheduler.rows
        assert not self.executor.in_flight and not self.core.scheduler.in_flight
