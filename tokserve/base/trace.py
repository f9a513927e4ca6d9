"""Spans of time, and the file of a profile: Chrome's trace-event format, which Perfetto and chrome://tracing open.

A span is on a track, where later ones lie within earlier ones or follow them.  Times are nanoseconds of the monotonic
clock; `written` turns them into the file's.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

MAX_SPANS = 1_000_000  # of a profile: some hundred bytes each in the file
PART = 4096  # spans that are encoded at once
LOOP = "turn"  # the span around a turn of the engine's loop; what is in no span inside it is "other"
_NOTHING = nullcontext()


class TraceSpan(NamedTuple):
    """A stretch of time on a track.  `args`: what a viewer shows of it."""

    name: str
    track: str
    start: int  # ns
    duration: int  # ns
    args: dict[str, Any] | None = None


class Spans:
    """A recorder, of one thread's spans or of several; off until `start`, and again after `take`.  While it is off,
    `span` is a look at a flag."""

    def __init__(self) -> None:
        self.recording = False
        self._spans: list[TraceSpan] = []

    def start(self) -> None:
        """Record from now on."""
        self._spans = []
        self.recording = True

    def take(self) -> list[TraceSpan]:
        """What was recorded; nothing is recorded any more."""
        self.recording = False
        spans, self._spans = self._spans, []
        return spans

    @property
    def full(self) -> bool:
        """Whether it has as many as it keeps."""
        return len(self._spans) >= MAX_SPANS

    def span(self, name: str) -> AbstractContextManager[object]:
        """Records the length of a `with`, on its thread's track."""
        return _OpenSpan(self, name) if self.recording else _NOTHING

    def add(self, name: str, start: int, end: int, track: str = "", args: dict[str, Any] | None = None) -> None:
        """Record a span whose times are known; by default on this thread's track."""
        if self.recording and not self.full:
            track = track or threading.current_thread().name
            self._spans.append(TraceSpan(name, track, start, max(0, end - start), args))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with a span for each call, on its thread's track."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return call


class _OpenSpan:
    """A span that has begun."""

    __slots__ = ("_name", "_spans", "_start")

    def __init__(self, spans: Spans, name: str) -> None:
        self._spans, self._name = spans, name

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._spans.add(self._name, self._start, time.monotonic_ns())


class SpanTotal(msgspec.Struct):
    """Spans of one name: how many, and the seconds that were spent in them but not in spans inside them."""

    name: str
    calls: int = 0
    seconds: float = 0.0


def totals(spans: Iterable[TraceSpan]) -> list[SpanTotal]:
    """The totals by name, the longest first."""
    rows: dict[str, SpanTotal] = {}
    inside: dict[str, list[tuple[int, SpanTotal]]] = {}  # by track, the spans around the one at hand, with their ends
    for span in sorted(spans, key=lambda span: (span.start, -span.duration)):
        around = inside.setdefault(span.track, [])
        while around and around[-1][0] <= span.start:
            around.pop()
        row = rows.setdefault(span.name, SpanTotal(span.name))
        row.calls += 1
        row.seconds += span.duration / 1e9
        if around:
            around[-1][1].seconds -= span.duration / 1e9
        around.append((span.start + span.duration, row))
    return sorted(rows.values(), key=lambda row: -row.seconds)


def events(process: str, number: int, spans: Iterable[TraceSpan], base: int) -> Iterator[bytes]:
    """The spans as JSON events of a process with its own tracks.  `number`: of the process in the trace; `base`:
    nanoseconds of the monotonic clock at the file's time 0."""
    encode = msgspec.json.encode
    tracks: dict[str, int] = {}
    yield encode(_named("process_name", process, number, 0))
    part: list[bytes] = []
    for span in spans:
        if span.track not in tracks:
            tracks[span.track] = thread = len(tracks) + 1
            part.append(encode(_named("thread_name", span.track, number, thread)))
            part.append(encode(_event("thread_sort_index", number, thread) | {"args": {"sort_index": thread}}))
        event = {
            "ph": "X",
            "cat": process,
            "name": span.name,
            "pid": number,
            "tid": tracks[span.track],
            "ts": (span.start - base) / 1e3,
            "dur": span.duration / 1e3,
        }
        part.append(encode(event | {"args": span.args} if span.args else event))
        if len(part) >= PART:
            yield b",\n".join(part)
            part = []
    if part:
        yield b",\n".join(part)


def _event(name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread}


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return _event(kind, process, thread) | {"args": {"name": name}}


def write_trace(path: Path, header: dict[str, Any], parts: Iterable[bytes], *, compress: bool) -> None:
    """Write events, encoded and in parts, as a trace; `header`: the file's other fields.  Raises OSError."""
    opener = gzip.open if compress else open
    partial = path.with_name(path.name + ".partial")
    try:
        with opener(partial, "wb") as file:
            file.write(msgspec.json.encode(header)[:-1] + (b"," if header else b"") + b'"traceEvents":[\n')
            for number, part in enumerate(parts):
                file.write((b",\n" if number else b"") + part)
            file.write(b"\n]}\n")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
