"""A worker that does what its images say, as a bug in an image library would: `python -m tests.media.odd_worker`."""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from tokserve.features.images.media import frames
from tokserve.features.images.media.frames import Array, Job, Processed, Refused, WorkerReady


def main() -> None:
    if sys.argv[1:] == ["never"]:
        sys.exit(3)
    to, at = sys.stdout.fileno(), sys.stdin.fileno()
    frames.send(to, frames.pack(WorkerReady('{"processor":"odd"}')))
    while True:
        try:
            job = msgspec.msgpack.decode(frames.receive(at), type=Job)
        except frames.BrokenFrame:
            return
        what, rest, *_ = (bytes(job.content[:256]) + b"::").split(b":")
        match what:
            case b"crash":
                os.kill(os.getpid(), 11)
            case b"exit":
                os._exit(0)
            case b"spin":
                signal.setitimer(signal.ITIMER_PROF, job.seconds)
                while True:
                    pass
            case b"sleep":
                time.sleep(float(rest))
            case b"until":
                while not os.path.exists(rest):
                    time.sleep(0.01)
            case b"nonsense":
                os.write(to, b"\xff" * 1000)
                continue
            case b"html":
                os.write(to, (5).to_bytes(8, "little") + b"<html")
                continue
            case b"text":
                frames.send(to, frames.pack(Refused("text")).replace(b"text", b"te\xfft"))  # a string that is not UTF-8
                continue
            case b"refuse":
                frames.send(to, frames.pack(Refused("must be better", "some_code")))
                continue
        size = int(rest) if what == b"large" else len(job.content)
        array = Array("|u1", (size,), memoryview(bytes(size)))
        frames.send(to, frames.pack(Processed({"pixels": array}, (os.getpid(), 1))))


if __name__ == "__main__":
    main()
