"""The runner's part of a profile: torch's profiler, a span for each op, and the file that has both and the engine's.

Ops are timed by putting each in a wrapper, which is taken away again, so they cost nothing while there is no profile.
A step that is replayed from a recording shows as one span, unless the profile runs steps op by op.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.autograd.profiler import profile  # torch.profiler's takes seconds to import what it does not need here

from tokserve import ops
from tokserve.base import trace
from tokserve.base.errors import RequestFailed
from tokserve.base.trace import SpanTotal, TraceSpan
from tokserve.runner.features import Calls, RunnerContext, RunnerFeature

ENGINE, REQUESTS, RUNNER = 1, 2, 3  # processes of the trace; torch's are numbered as the system does
TORCH_ROWS = 30  # of the reply's table
KERNEL = "kernel"  # category of what ran on a GPU
OP = "cpu_op"

logger = logging.getLogger(__name__)


class TorchEvent(msgspec.Struct):
    """What the tables read of an event in torch's file; times in microseconds."""

    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0


class TorchTrace(msgspec.Struct):
    """The file that torch's profiler writes."""

    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base: int = msgspec.field(name="baseTimeNanoseconds", default=0)


class RunnerProfiler(RunnerFeature):
    """`spans` has what the runner records."""

    def __init__(self, context: RunnerContext) -> None:
        self.spans = context.runner.spans
        self._backend = context.runner.backend
        self._capture = context.runner.admin.capture
        self._torch: Any = None  # a `profile`, whose methods have no types
        self._unwrap: Callable[[], None] = lambda: None
        self._op_by_op = False

    def calls(self) -> Calls:
        return {"start_profile": self.start, "stop_profile": self.stop}

    def background_calls(self) -> Calls:
        return {"write_profile": self.write}

    def start(self, torch_options: dict[str, Any], op_by_op: bool) -> None:
        """Record from now on.  `torch_options`: keyword arguments of torch's profiler."""
        self._op_by_op = op_by_op
        if op_by_op:
            self._backend.invalidate()
        device = "cuda" if torch.cuda.is_available() else None
        self._torch = profile(use_device=device, use_kineto=True, **torch_options)
        self._torch.__enter__()
        self.spans.start()
        self._unwrap = ops.wrap(self.spans.timed)

    def stop(self) -> None:
        """Record no more; `write` follows, or another `start`."""
        self._unwrap()
        self.spans.recording = False
        if self._torch is not None:
            self._torch.__exit__(None, None, None)
        if self._op_by_op:
            self._capture()

    def write(
        self, path: str, compress: bool, engine: list[TraceSpan], requests: list[TraceSpan]
    ) -> dict[str, list[dict[str, Any]]]:
        """Write the trace; returns tables by name, of ops, of torch's operations, and of what ran on a GPU.  `engine`,
        `requests`: spans, recorded elsewhere, that the trace has as well.  Raises RequestFailed."""
        recorded, file = self.spans.take(), Path(path)
        engine, requests = ([TraceSpan(*span) for span in spans] for spans in (engine, requests))  # or lists, from afar
        part = file.with_name(file.name + ".torch")
        kineto, self._torch = self._torch, None
        try:
            parsed = TorchTrace([])
            if kineto is not None:
                kineto.export_chrome_trace(str(part))
                parsed = _parsed(part)
            header = {"displayTimeUnit": "ms", "baseTimeNanoseconds": parsed.base}
            base = parsed.base - (time.time_ns() - time.monotonic_ns())
            processes = (
                ("tokserve: engine", ENGINE, engine),
                ("tokserve: requests", REQUESTS, requests),
                ("tokserve: runner", RUNNER, recorded),
            )
            parts: list[Iterable[bytes]] = [trace.events(*process, base) for process in processes]
            trace.write_trace(
                file, header, (one for many in [*parts, _joined(parsed.events)] for one in many), compress=compress
            )
        except (OSError, RuntimeError) as error:
            raise RequestFailed(f"the trace could not be written: {error}") from error
        finally:
            for left in (part, part.with_name(part.name + ".tmp")):  # torch renames the second to the first
                left.unlink(missing_ok=True)
        return {"ops": _rows(trace.totals(recorded)), **_torch_tables(parsed.events)}


def _parsed(part: Path) -> TorchTrace:
    """What torch's profiler has written; it does not report writes that fail."""
    try:
        return msgspec.json.decode(part.read_bytes(), type=TorchTrace)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        free = shutil.disk_usage(part.parent).free
        raise OSError(f"torch's trace is incomplete ({free} bytes are free in {part.parent})") from error


def _joined(raw: list[msgspec.Raw]) -> Iterator[bytes]:
    for first in range(0, len(raw), trace.PART):
        yield b",\n".join(bytes(event) for event in raw[first : first + trace.PART])


def _torch_tables(raw: list[msgspec.Raw]) -> dict[str, list[dict[str, Any]]]:
    """Torch's operations on the CPU, and kernels on a GPU, by name."""
    spans: dict[str, list[TraceSpan]] = {OP: [], KERNEL: []}
    decoder = msgspec.json.Decoder(TorchEvent)
    for one in raw:
        try:
            event = decoder.decode(one)
        except msgspec.ValidationError:  # of a kind that has other fields
            continue
        if event.cat in spans:
            start, length = round(1e3 * event.ts), round(1e3 * event.dur)
            spans[event.cat].append(TraceSpan(event.name, str(event.tid), start, length))
    tables = {"torch": trace.totals(spans[OP])[:TORCH_ROWS], "kernels": trace.totals(spans[KERNEL])[:TORCH_ROWS]}
    return {name: _rows(rows) for name, rows in tables.items()}


def _rows(rows: Iterable[SpanTotal]) -> list[dict[str, Any]]:
    return msgspec.to_builtins(list(rows))
