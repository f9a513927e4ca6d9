"""One worker process that decodes images, as a thread of the server uses it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from tokserve.base.structs import UNREADABLE
from tokserve.features.images.media import frames
from tokserve.features.images.media.frames import BrokenFrame, Job, Processed, Refused, WorkerReady

START_SECONDS = 120.0  # of a worker, which imports an image library and the checkpoint's processor
PATIENCE = 60.0  # seconds beyond those of an image, for processors that are busy
PIPE_BYTES = 1 << 20  # the most that a pipe holds without privileges


class Worker:
    """Starts a worker and waits until it is ready.  `kill` may be called by any thread."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises BrokenFrame, TimeoutError or OSError."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            bufsize=0,
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # numpy's threads spin at the start, and have no use
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._to, self._from):
            os.set_blocking(descriptor, False)
            with suppress(OSError):  # many pipes of one user
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.settings = ""  # of the checkpoint's image processor, as JSON

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self) -> None:
        """Raises BrokenFrame or TimeoutError: it does not start."""
        reply = self._receive(time.monotonic() + START_SECONDS)
        if not isinstance(reply, WorkerReady):
            raise BrokenFrame("it does not say that it is ready")
        self.settings = reply.settings

    def process(self, content: bytes, seconds: float) -> Processed | Refused:
        """`seconds`: of a processor.  Raises BrokenFrame where the process has ended, TimeoutError where it had no
        processor for so long; it is of no use then."""
        deadline = time.monotonic() + seconds + PATIENCE
        frames.send(self._to, frames.pack(Job(memoryview(content), seconds)), deadline)
        reply = self._receive(deadline)
        if isinstance(reply, WorkerReady):
            raise BrokenFrame("it does not answer")
        return reply

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> int:
        """End it; returns its exit status."""
        self._process.kill()
        self._process.communicate()
        return self._process.returncode

    def _receive(self, deadline: float) -> frames.Reply:
        frame = frames.receive(self._from, deadline)
        try:
            reply: frames.Reply = msgspec.msgpack.decode(frame, type=frames.Reply)
        except UNREADABLE as error:
            raise BrokenFrame(str(error)) from None
        return reply
