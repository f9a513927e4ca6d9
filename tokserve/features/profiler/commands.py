"""Profiles: the commands start_profile and stop_profile, and the engine's spans, of its loop, steps and requests.

The runner has torch's profiler and the ops' spans, and writes the file (`recorder`).  A profile is bounded: it
ends by itself, and its result is kept for the next stop_profile.

    off --start--> delayed --its steps--> starting --> recording --stop, or a limit--> writing --> off
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from tokserve.base.errors import Conflict, RequestError, RequestFailed, StartError
from tokserve.base.trace import LOOP, Spans, totals
from tokserve.engine.admin.command import STEP_BOUNDARY, Command, command
from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.plan_builder import InFlightStep
from tokserve.engine.request import Request
from tokserve.protocol.plan import StepResult

logger = logging.getLogger(__name__)


class Profiler(EngineFeature):
    """Raises StartError if traces cannot be written to the directory."""

    def __init__(self, context: EngineContext) -> None:
        self.spans = context.spans
        self._active = False  # delayed, starting or recording
        self._plan = context.config.profiler.resolved()
        if self._plan.directory is not None:
            _make_writable(self._plan.directory)
        self._requests, self._outbox = context.requests, context.outbox
        self._executor, self._clock = context.executor, context.clock
        self._steps = Spans()
        self._options: dict[str, Any] = {}
        self._delay = 0  # steps until it begins
        self._left = 0  # steps until it ends
        self._num_steps = self._num_tokens = self._number = 0
        self._began = self._end = 0.0  # by the clock
        self._path = Path()
        self._seconds = 0.0
        self._state = "off"
        self._result: dict[str, Any] | RequestError | None = None  # of a profile that has ended by itself

    # --- hooks ---

    def poll(self) -> None:
        if self._active and (due := self._due()) is not None:
            self._outbox.commands.append(due)

    def seconds_left(self) -> float | None:
        """Until the profile ends by itself."""
        return max(0.0, self._end - self._clock()) if self.spans.recording else None

    def _due(self) -> Command | None:
        """What is to be done between steps, while there is a profile: begin after the delay, or end at a limit."""
        if self._state != "recording":
            return self._begin_late() if self._state == "delayed" and self._delay <= 0 else None
        if self._left <= 0:
            return self._end_by("max_iterations")
        if self._clock() >= self._end:
            return self._end_by("max_seconds")
        return self._end_by("size") if self.spans.full or self._steps.full else None

    def on_result(self, step: InFlightStep, result: StepResult, now: float) -> None:
        if not self._active:
            return
        if self._state != "recording":
            self._delay -= 1
            return
        self._left -= 1
        self._num_steps += 1
        self._num_tokens += step.num_tokens
        args = {"rows": len(step.rows), "new": step.num_new, "tokens": step.num_tokens, "logits": step.num_logits}
        self.spans.add(f"step {step.step}", _ns(step.planned), _ns(now), f"steps {step.step % 2}", args)

    def on_end(self, request: Request) -> None:
        if self._active and request.finish is not None:
            self._add_phases(request)

    def _add_phases(self, request: Request) -> None:
        """A request has ended, or the profile has: its phases, each a span on a track of its own."""
        now = request.history.received + request.finish.total if request.finish is not None else self._clock()
        phases = [
            ("queued", request.history.received),
            ("prefill", request.history.admitted),
            ("decode", request.history.first_token),
        ]
        known = [(name, begin) for name, begin in phases if begin is not None]
        args = {
            "prompt_tokens": request.prompt_len,
            "cached_tokens": request.history.cached_tokens or 0,
            "output_tokens": request.num_output,
            "finish": "running" if request.finish is None else request.finish.reason,
        }
        for index, (name, begin) in enumerate(known):
            end = known[index + 1][1] if index + 1 < len(known) else now
            if end >= self._began:
                start = max(begin, self._began)
                self._steps.add(name, _ns(start), _ns(end), request.request_id, args)

    # --- commands ---

    @command("start_profile")
    def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        max_seconds: float = 60.0,
        profiler_kwargs: dict[str, bool] | None = None,
        op_by_op: bool = False,
    ) -> Command:
        """Begin, or arm a delayed beginning.  Raises Conflict while there is a profile, RequestError if there is no
        directory for it."""
        plan = self._plan
        if plan.directory is None:
            raise RequestError("this server takes no profiles: start it with --profiler-dir")
        if self._state != "off":
            raise Conflict("a profile is under way already: POST /stop_profile ends it")
        self._result = None
        self._number += 1
        prefix = profile_prefix or "profile"
        name = f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._number}.json"
        self._path = Path(plan.directory, name + ".gz" if plan.compress else name)
        self._options = {"torch_options": plan.torch_options | (profiler_kwargs or {}), "op_by_op": op_by_op}
        self._delay = plan.delay if delay_iterations is None else delay_iterations
        self._left = max_iterations or plan.steps
        self._seconds = max_seconds
        self._set_state("delayed")
        if self._delay <= 0:
            yield from self._begin()
        return {"trace": str(self._path), "max_iterations": self._left, "max_seconds": max_seconds}

    def _set_state(self, state: str) -> None:
        self._state = state
        self._active = state in ("delayed", "starting", "recording")

    def _begin(self) -> Command:
        self._set_state("starting")
        yield STEP_BOUNDARY
        if self._state != "starting":  # it was stopped meanwhile
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._executor.call("start_profile", self._options)
        except (OSError, RuntimeError) as error:
            self._set_state("off")
            raise RequestFailed(f"the profile could not be started: {error}") from error
        self._num_steps = self._num_tokens = 0
        self._began = self._clock()
        self._end = self._began + self._seconds
        self._steps.start()
        self.spans.start()
        self._set_state("recording")
        logger.info("profile: recording, at most %d steps or %g s", self._left, self._seconds)

    def _begin_late(self) -> Command:
        """Begin after the delay: keep an error for the caller of `stop_profile`."""
        try:
            yield from self._begin()
        except RequestError as error:
            logger.error("profile: %s", error)
            self._result = error

    @command("stop_profile")
    def stop_profile(self) -> Command:
        """End the profile and write it; or the result of one that has ended by itself.  Raises Conflict if there is
        none."""
        if self._state in ("delayed", "starting"):
            self._set_state("off")
            raise Conflict("the profile had not begun: fewer steps than delay_iterations have run; it is cancelled")
        if self._state == "recording":
            return (yield from self._finish("stop_profile"))
        yield lambda: self._state != "writing"
        result, self._result = self._result, None
        if result is None:
            raise Conflict("no profile is under way")
        if isinstance(result, RequestError):
            raise result
        return result

    def _end_by(self, limit: str) -> Command:
        """The profile has reached a limit: keep what it says for its caller."""
        try:
            self._result = yield from self._finish(limit)
        except RequestError as error:
            logger.error("profile: %s", error)
            self._result = error

    def _finish(self, ended_by: str) -> Command:
        self._set_state("writing")
        try:
            yield STEP_BOUNDARY
            seconds = self._clock() - self._began
            for request in self._requests.live:
                self._add_phases(request)
            loop, requests = self.spans.take(), self._steps.take()
            self._executor.call("stop_profile", {})
            what = {"path": str(self._path), "compress": self._plan.compress, "engine": loop, "requests": requests}
            written = self._executor.background("write_profile", what)
            yield written
            tables = written.result()
        finally:
            self._set_state("off")
        rows = totals(span for span in loop if not span.track.startswith("steps "))
        busy = sum(row.seconds for row in rows)
        for row in rows:
            row.name = "other" if row.name == LOOP else row.name
        phases: list[dict[str, Any]] = msgspec.to_builtins(rows)
        for row in [*phases, *(row for table in tables.values() for row in table)]:
            row["share"] = row["seconds"] / busy if busy else 0.0
        logger.info("profile: %d steps in %.2f s, ended by %s: %s", self._num_steps, seconds, ended_by, self._path)
        return {
            "trace": str(self._path),
            "ended_by": ended_by,
            "steps": self._num_steps,
            "tokens": self._num_tokens,
            "seconds": seconds,
            "busy_seconds": busy,
            "phases": phases,
            **tables,
        }


def _make_writable(directory: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StartError(f"option profiler_dir: {directory}: {error.strerror}") from None


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
