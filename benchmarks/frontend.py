"""The front end alone: the real HTTP server and client against a scripted engine, without a model.

    python benchmarks/frontend.py [--cases stream full ...] [--concurrency 64 256] [--json FILE]

Three processes: the server as `tokserve serve` runs it; a scripted engine behind the real ZeroMQ link, which makes one
token per step for every stream and answers other requests at once and whole; and a load client on raw sockets,
which counts tokens with a regular expression.  The engine runs at most `--window` steps ahead of what the client has
read (the client tells it through a pipe), so a front end that is too slow is waited for; what it has not sent when the
next step comes is merged into one event, which the column tokens/event shows.  `--window 1` is lock-step: every
token is an event of its own, and no two of the three processes ever work at the same time.

Figures: output tokens per second of wall time, and the front-end process's CPU time (all threads) per million
tokens, which is what remains true on a machine with fewer cores than processes.  Before the measurement every
case runs once with each reply parsed and compared with the script.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import closed_loop
import msgspec
import numpy as np
import psutil
import uvloop
import zmq

from tokserve.engine.output.columns import ColumnBuffer, StepColumns, StepRows
from tokserve.protocol.columns import LOGPROBS, ColumnRows, RecordForm
from tokserve.protocol.logprobs import logprob_records, stride_of
from tokserve.protocol.messages import (
    Abort,
    Call,
    EngineRequest,
    Finish,
    Ready,
    Reply,
    StepStats,
    Submit,
    SubmitReply,
    decode_to_engine,
    encode,
)
from tokserve.protocol.params import SamplingParams

VOCAB = 151_936
PERIOD = 4096  # tokens of the script
ACK = struct.Struct("<q")


class Case(NamedTuple):
    """The options of a case's requests."""

    stream: bool
    logprobs: int | None = None
    format: str = "objects"


CASES = {
    "stream": Case(True),
    "stream-arrays": Case(True, 0, "arrays"),
    "stream-objects": Case(True, 0),
    "stream-objects-5": Case(True, 5),
    "full": Case(False),
    "full-arrays": Case(False, 0, "arrays"),
    "full-base64": Case(False, 0, "base64"),
    "full-objects": Case(False, 0),
}

# --- the script: the token at each position, for engine and client ---

NUMBERS = np.arange(PERIOD)
IDS = array("i", (NUMBERS * 37_199 % VOCAB).astype("<i4").tobytes())
OWN = -(NUMBERS / 997).astype("<f4")
TOPS = np.tile(NUMBERS.astype("<i4")[:, None], 20)
RECORDS = logprob_records(OWN, (1 + NUMBERS % 5).astype("<i4"), TOPS, -(TOPS / 997).astype("<f4"))
SCORES = StepRows(ColumnRows(RECORDS))

# --- the engine ---


class Row:
    """A request in the engine."""

    def __init__(self, request: EngineRequest) -> None:
        assert isinstance(request.task, SamplingParams)
        self.request_id = request.request_id
        self.stream = request.options.stream
        self.limit = request.task.max_tokens or 1
        self.width = request.task.logprobs
        self.sent = 0

    def take(self, count: int, step: StepColumns) -> None:
        """The next `count` tokens."""
        first, self.sent = self.sent, self.sent + count
        step.add(self.request_id, IDS[first : self.sent], () if self.width is None else (self.scored(first),))
        if self.sent == self.limit:
            times = {"queued": 0.001, "first_token": 0.002, "total": 0.5}
            step.set_rare(Finish("length", "max_tokens", **times), weight_versions=[("0", 0, self.sent)])

    def scored(self, first: int) -> ColumnBuffer:
        """The logprobs of the tokens from `first` to the last."""
        column = ColumnBuffer(LOGPROBS, RecordForm(stride_of(self.width or 0), "raw"))
        column.append(SCORES, first, self.sent - first)
        return column


class Engine:
    """One thread: takes requests, and sends a step whenever fewer than `window` are unread."""

    def __init__(self, address: str, acks: str, window: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        self._acks = os.open(acks, os.O_RDWR | os.O_NONBLOCK)
        self._window = window
        self._identity = b""
        self._rows: dict[str, Row] = {}
        self._unread = 0  # tokens

    def run(self) -> None:
        """Until the parent closes stdin."""
        poller = zmq.Poller()
        for source in (self._socket, self._acks, sys.stdin.fileno()):
            poller.register(source, zmq.POLLIN)
        while True:
            busy = bool(self._rows) and self._unread <= (self._window - 1) * len(self._rows)
            ready = dict(poller.poll(0 if busy else None))
            if sys.stdin.fileno() in ready:
                return
            if self._acks in ready:
                read = os.read(self._acks, 1 << 16)
                self._unread -= sum(count for (count,) in ACK.iter_unpack(read))
            if self._socket in ready:
                self._receive()
            if busy:
                self._send(list(self._rows.values()), 1)

    def _receive(self) -> None:
        rows = []
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._identity, packed = self._socket.recv_multipart()
            message = decode_to_engine(packed)
            if isinstance(message, Submit):
                self._send_message(SubmitReply(message.call_id))
                for row in map(Row, message.requests):
                    if row.stream:
                        self._rows[row.request_id] = row
                    else:
                        rows.append(row)
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    self._rows.pop(request_id, None)
            else:
                self._answer(message)
        if rows:
            self._send(rows, None)

    def _answer(self, call: Call) -> None:
        if call.method == "hello":
            self._send_message(Ready(1 << 20, VOCAB, 1 << 16, 64, [2], "0", {"scripted": True}))
        else:
            self._send_message(Reply(call.call_id, {}))

    def _send(self, rows: list[Row], count: int | None) -> None:
        """A step with so many tokens of each row, or all."""
        step = StepColumns()
        for row in rows:
            self._unread += count or row.limit
            row.take(count or row.limit, step)
            if row.sent == row.limit:
                self._rows.pop(row.request_id, None)
        self._send_message(step.step(StepStats(running=len(self._rows))))

    def _send_message(self, message: Any) -> None:
        self._socket.send_multipart((self._identity, encode(message)))


# --- the client ---


class Script:
    """The requests of a case and their expected replies; reports to the engine what was read."""

    def __init__(self, case: Case, args: argparse.Namespace, acks: int) -> None:
        self.case = case
        self.output_len: int = args.output_len
        self._acks = acks
        self._read = 0  # tokens not yet told to the engine
        params: dict[str, Any] = {"max_tokens": args.output_len, "ignore_eos": True, "temperature": 1.0}
        if case.logprobs is not None:
            params["logprobs"] = case.logprobs
        body = {"token_ids": IDS[: args.input_len].tolist(), "stream": case.stream, "sampling_params": params}
        self._request = closed_loop.request(json.dumps(body | {"logprobs_format": case.format}).encode())

    async def run(self, port: int, concurrency: int, total: int, check: bool) -> tuple[closed_loop.Load, float]:
        """The load, and how many seconds it took."""
        load = closed_loop.Load(
            repeat(self._request, total),
            stream=self.case.stream,
            count=self._count,
            check=self._compare if check else None,
        )
        seconds = await load.run(port, concurrency)
        if load.tokens != total * self.output_len:
            raise SystemExit(f"{load.tokens} tokens came, {total * self.output_len} were requested")
        return load, seconds

    def _count(self, tokens: int, events: int) -> None:
        self._read += tokens
        if self._read == tokens:
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        """Tell the engine what was read since the last time."""
        os.write(self._acks, ACK.pack(self._read))
        self._read = 0

    def _compare(self, reply: bytes) -> None:
        """The whole answer against the script."""
        _, _, body = reply.partition(b"\r\n\r\n")
        case = self.case
        deltas = [json.loads(body)["choices"][0]] if not case.stream else _deltas(body)
        ids = [token for delta in deltas for token in delta["token_ids"]]
        expected = IDS[: self.output_len].tolist()
        if ids != expected or deltas[-1]["finish_reason"] != "length":
            raise SystemExit("the tokens are not the engine's")
        if case.logprobs is not None:
            logprobs = [value for delta in deltas for value in _logprobs(delta["logprobs"], case.format)]
            if logprobs != OWN[: len(expected)].tolist():
                raise SystemExit("the logprobs are not the engine's")


def _deltas(chunked: bytes) -> list[Any]:
    """The choices of a stream's events."""
    body, at = [], 0
    while at < len(chunked):
        end = chunked.index(b"\r\n", at)
        size = int(chunked[at:end], 16)
        body.append(chunked[end + 2 : end + 2 + size])
        at = end + size + 4
    events = [line for line in b"".join(body).split(b"\n\n") if line]
    if events.pop() != b"data: [DONE]":
        raise SystemExit("a stream without [DONE]")
    return [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]


def _logprobs(shown: Any, kind: str) -> Sequence[float]:
    if kind == "objects":
        return [entry["logprob"] for entry in shown["content"]]
    logprobs = shown["token_logprobs"]
    return logprobs if kind == "arrays" else array("f", base64.b64decode(logprobs))


async def load(port: int, args: argparse.Namespace, acks: int) -> list[dict[str, Any]]:
    """All cases in turn."""
    server = psutil.Process(args.server_pid)
    results = []
    for name in args.cases:
        for concurrency in args.concurrency:
            script = Script(CASES[name], args, acks)
            await script.run(port, concurrency, concurrency, check=True)
            per_round = concurrency * args.output_len
            rounds = max(1, args.tokens * (1 if script.case.stream else 4) // per_round)
            before = server.cpu_times()
            one, seconds = await script.run(port, concurrency, rounds * concurrency, check=False)
            after = server.cpu_times()
            user, system = after.user - before.user, after.system - before.system
            results.append(
                {
                    "case": name,
                    "c": concurrency,
                    "tok_s": round(one.tokens / seconds),
                    "tok_cpu_s": round(one.tokens / (user + system)),
                    "cpu_s_per_mtok": (user + system) / one.tokens * 1e6,
                    "user_share": user / (user + system),
                    "tokens_per_event": one.tokens / one.events,
                    "cores": (user + system) / seconds,
                    "seconds": seconds,
                    "tokens": one.tokens,
                }
            )
            _print(results[-1])
    return results


def _print(r: dict[str, Any]) -> None:
    cells = (
        r["case"],
        r["c"],
        f"{r['tok_s']:,}",
        f"{r['tok_cpu_s']:,}",
        *(f"{r[name]:.2f}" for name in ("cpu_s_per_mtok", "user_share", "cores", "tokens_per_event")),
    )
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


# --- the processes ---


def run_engine() -> None:
    """Run the engine process as the server starts it: with the opening line of `tokserve.engine.process` on stdin."""
    opening = msgspec.json.decode(sys.stdin.buffer.readline())
    Engine(opening["address"], os.environ["FRONTEND_ACKS"], int(os.environ["FRONTEND_WINDOW"])).run()


def run_server(port: int) -> None:
    """`tokserve serve` with another engine."""
    from tokserve.cli import serve
    from tokserve.client import launch

    launch.COMMAND = (sys.executable, __file__, "--role", "engine")
    sys.exit(serve.serve({"model": "demo", "tokens_only": True, "port": port, "log_level": "warning"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--cases",
        nargs="+",
        choices=CASES,
        default=["stream", "stream-arrays", "full", "full-arrays"],
        metavar="CASE",
        help=f"of {', '.join(CASES)}. Default: stream stream-arrays full full-arrays.",
    )
    add("--concurrency", nargs="+", type=int, default=[64], metavar="N", help="connections. Default: 64.")
    add("--input-len", type=int, default=128, help="tokens of a prompt. Default: 128.")
    add("--output-len", type=int, default=256, help="tokens of an output. Default: 256.")
    add(
        "--tokens",
        type=int,
        default=200_000,
        help="per case, four times as many where replies are whole. Default: 200000.",
    )
    add("--window", type=int, default=1, help="steps the engine may be ahead of the client. Default: 1.")
    add("--json", type=Path, help="write the rows there too")
    add("--port", type=int, default=18_431, help="of the server. Default: 18431.")
    add("--role", choices=("all", "engine", "server"), default="all", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "engine":
        return run_engine()
    if args.role == "server":
        return run_server(args.port)
    with tempfile.TemporaryDirectory() as directory:
        acks = os.path.join(directory, "acks")
        os.mkfifo(acks)
        pipe = os.open(acks, os.O_RDWR)
        environment = os.environ | {"FRONTEND_ACKS": acks, "FRONTEND_WINDOW": str(args.window)}
        command = [sys.executable, __file__, "--role", "server", "--port", str(args.port)]
        server = subprocess.Popen(command, env=environment)
        try:
            args.server_pid = server.pid
            _wait(args.port, server)
            print("| case | c | tok/s | tok/CPU-s | CPU s/Mtok | user | cores | tokens/event |\n" + "|---" * 8 + "|")
            rows = uvloop.run(load(args.port, args, pipe))
        finally:
            server.terminate()
            server.wait()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until the server listens."""
    import socket

    while server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        select.select([], [], [], 0.1)
    raise SystemExit("the server ended")


if __name__ == "__main__":
    main()
