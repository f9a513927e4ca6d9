"""An engine without a scheduler or a model: a ROUTER in a thread that sends what a test or its script provides."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from tests.outputs import Output, pack
from tests.waiting import PATIENCE
from tokserve.config import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokserve.protocol.columns import Column
from tokserve.protocol.logprobs import logprob_column
from tokserve.protocol.messages import (
    Abort,
    Announce,
    Call,
    EndAnnouncement,
    EngineRequest,
    Finish,
    FromEngine,
    Ready,
    Reply,
    Stall,
    StepOutput,
    StepStats,
    Submit,
    SubmitReply,
    ToEngine,
    decode_to_engine,
    encode,
)
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.prompt import unpack_ids

T = TypeVar("T")
VOCAB = 450
READY = Ready(64, VOCAB, 40, 4, [2], "v1", {"fake": True})
Script = Callable[[EngineRequest], list[Output]]


def config(model: str | Path = "none", **options: Any) -> Config:
    """A configuration that counts as resolved, without a checkpoint."""
    model_options = {"max_logprobs": 20, "generation_config": "none"} | options.pop("model_options", {})
    return Config(
        model=ModelConfig(model=str(model), **model_options),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(scheduling_policy=options.pop("policy", "priority")),
        runtime=RuntimeConfig(start_timeout=options.pop("start_timeout", 20.0), **options.pop("runtime", {})),
        server=ServerConfig(
            tokens_only=options.pop("tokens_only", False), chat_template=options.pop("chat_template", None)
        ),
        parallel=ParallelConfig(data_parallel_size=options.pop("engines", 1)),
    )


def logprobs_for(ids: Sequence[int], width: int = 2) -> Column:
    """Recognisable rows: -id/10, rank id % 7, top ids from id + 1."""
    sampled = np.asarray(ids, dtype="<f4") / np.float32(-10)
    top = np.asarray([[token + 1 + i for i in range(width)] for token in ids], dtype="<i4").reshape(len(ids), width)
    ranks = np.asarray([token % 7 for token in ids], dtype="<i4")
    return logprob_column(sampled, ranks, top, (top / np.float32(-10)).astype("<f4"))


def tokens(rid: str, ids: Sequence[int], finish: Finish | None = None, **fields: Any) -> Output:
    """An output with these new tokens."""
    return Output(rid, list(ids), finish=finish, **fields)


def stop(detail: str = "max_tokens", reason: str = "length", **fields: Any) -> Finish:
    """An end with times."""
    return Finish(reason, detail, queued=0.25, first_token=0.5, total=1.5, **fields)


def echo(request: EngineRequest) -> list[Output]:
    """Streams the prompt back, one token per output."""
    assert isinstance(request.task, SamplingParams)
    ids = unpack_ids(request.prompt.ids)[: request.task.max_tokens]
    logprobs = [logprobs_for([token]) if request.task.logprobs is not None else None for token in ids]
    spans = [("v1", 0, len(ids))]
    if not request.options.stream:
        joined = logprobs_for(ids) if request.task.logprobs is not None else None
        return [tokens(request.request_id, ids, stop(), logprobs=joined, spans=spans)]
    ends = [None] * (len(ids) - 1) + [stop()]
    return [
        tokens(request.request_id, [token], end, logprobs=row, spans=spans if end else [])
        for token, row, end in zip(ids, logprobs, ends, strict=True)
    ]


class FakeEngine:
    """`with FakeEngine(address) as engine:`; `engine.received` grows, `engine.send` speaks to the last front end.

    Answers hello, ping, shutdown and aborts by itself; engine requests by `script`, if there is one.
    Submissions are accepted unless `admission` says otherwise (None: no reply yet); their engine requests are in
    `received` as well.
    """

    def __init__(self, address: str, ready: FromEngine | None = READY, script: Script | None = None) -> None:
        self.address = address
        self.received: list[ToEngine] = []
        self.live: dict[str, EngineRequest] = {}
        self.ended: set[str] = set()
        self.closed = threading.Event()
        self.admission: Callable[[Submit], SubmitReply | None] = lambda submit: SubmitReply(submit.call_id)
        self.deaf = False  # to pings
        self.heritage: Callable[[Call], list[FromEngine]] = lambda call: [Reply(call.call_id, {})]
        self._ready = ready
        self._script = script
        self._news = threading.Condition()
        self._outbox: deque[FromEngine] = deque()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self.closed.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(10.0)  # the end of a libzmq context was seen to hang, once in tens of thousands
        if not self._thread.is_alive():
            os.close(self._wake)

    def send(self, *messages: FromEngine) -> None:
        """Send messages to the last front end that sent one."""
        self._outbox.extend(messages)
        os.eventfd_write(self._wake, 1)

    def step(self, *outputs: Output, **stats: int) -> None:
        """One step with these outputs."""
        self.send(pack(outputs, StepStats(**stats)))

    def wait(self, kind: type[T], count: int = 1, seconds: float = PATIENCE) -> list[T]:
        """All messages of a kind, once there are `count`."""
        with self._news:
            end = time.monotonic() + seconds
            while len(actual := [m for m in self.received if isinstance(m, kind)]) < count:
                assert self._news.wait(end - time.monotonic()), f"{len(actual)} of {count} {kind.__name__} came"
            return actual

    def _run(self) -> None:
        context = zmq.Context()
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops what is above it
        socket.bind(self.address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        identity = b""
        while not self.closed.is_set():
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if socket in ready:
                identity, packed = socket.recv_multipart()
                message = decode_to_engine(packed)
                with self._news:
                    self.received.append(message)
                    self.received.extend(message.requests if isinstance(message, Submit) else ())  # type: ignore[arg-type]
                    self._news.notify_all()
                self._outbox.extend(self._answers(message))
            while self._outbox:
                message_out = self._outbox.popleft()
                if isinstance(message_out, StepOutput):
                    for rid, _, _, rare in message_out.rows():
                        if rare and rare.finish:
                            self.live.pop(rid, None)
                            self.ended.add(rid)
                socket.send_multipart((identity, encode(message_out)))
        socket.close(linger=500)
        context.term()

    def _answers(self, message: ToEngine) -> list[FromEngine]:
        if isinstance(message, Submit):
            reply = self.admission(message)
            answers: list[FromEngine] = [] if reply is None else [reply]
            if reply is not None and reply.refusal:
                return answers
            for request in message.requests:
                self.live[request.request_id] = request
                outputs = self._script(request) if self._script else []
                answers += [pack([output], StepStats(steps=1)) for output in outputs]
            return answers
        if isinstance(message, Abort):
            return self._abort(message.request_ids, message.reason)
        if isinstance(message, Stall | Announce | EndAnnouncement):
            return []
        return self._call(message)

    def _abort(self, rids: Sequence[str], reason: str) -> list[FromEngine]:
        outputs = [tokens(rid, [], stop(reason, "abort"), spans=[("v1", 0, 99)]) for rid in rids if rid in self.live]
        return [pack(outputs, StepStats())] if outputs else []

    def _abort_keys(self, call: Call, keys: Sequence[str], reason: str) -> list[FromEngine]:
        live = {key: [rid for rid in self.live if rid.rpartition("#")[0] == key] for key in keys}
        ended = {rid.rpartition("#")[0] for rid in self.ended}
        result = {key: "aborted" if live[key] else "finished" if key in ended else "not_found" for key in keys}
        return [*self._abort([rid for rids in live.values() for rid in rids], reason), Reply(call.call_id, result)]

    def _call(self, call: Call) -> list[FromEngine]:
        if call.method == "hello":
            return [self._ready] if self._ready else []
        if call.method == "stats":
            return [StepOutput(StepStats(steps=77)), Reply(call.call_id, {})]
        if call.method == "take_over":
            return self.heritage(call)
        if call.method == "ping":
            return [] if self.deaf else [Reply(call.call_id, {})]
        keys = list(dict.fromkeys(rid.rpartition("#")[0] for rid in self.live))
        if call.method in ("abort", "abort_all"):
            return self._abort_keys(call, call.args.get("keys", keys), call.args["reason"])
        if call.method == "shutdown":
            self.closed.set()
            return self._abort_keys(call, keys, "shutdown")
        if call.method == "silence":
            return []
        return [Reply(call.call_id, error=f"no verb {call.method!r}")]
