"""Worker processes that decode and cut up images, and a cache of what they made.

Whatever an image does to its worker (a crash, endless work, all memory it may have), the server loses this image and
starts another worker.  Equal bytes are processed once: while they are, and as long as the result is in the cache.
Clients take turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from tokserve.base.errors import Overloaded, RequestError, Unavailable, invalid
from tokserve.base.turns import Turns
from tokserve.features.images.media.cache import ByteCache
from tokserve.features.images.media.frames import Array, BrokenFrame, Refused
from tokserve.features.images.media.worker_process import Worker

logger = logging.getLogger(__name__)

MAX_WAITING = 1024  # images
UNREADABLE = "image_unreadable"


class ProcessedImage(msgspec.Struct, frozen=True):
    """An image as the model takes it.  `hash` names its bytes and the settings of the processor."""

    hash: bytes
    arrays: dict[str, Array]
    size: tuple[int, int]  # width and height of the image that was sent

    @property
    def num_bytes(self) -> int:
        return sum(len(array.buffer) for array in self.arrays.values())


class Refusal(NamedTuple):
    """Why there is no processed image: `rule` is said of its field, or the message if the server is at fault."""

    rule: str
    code: str | None = None
    is_servers_fault: bool = False

    def error(self, field: str) -> RequestError:
        if self.is_servers_fault:
            return Unavailable(self.rule, code=self.code)
        return invalid(field, self.rule, code=self.code)


Outcome = ProcessedImage | Refusal
CLOSED = Refusal("the server is shutting down", "draining", is_servers_fault=True)
NO_WORKER = Refusal("the process that decodes images does not start", "media_worker", is_servers_fault=True)
FAILED = Refusal("the image could not be decoded; the server's log says more", "media_worker", is_servers_fault=True)
NO_PROCESSOR = Refusal(
    "no processor was free to decode the image; send it again", "media_worker", is_servers_fault=True
)
ENDED = Refusal("cannot be decoded: the process that decodes images crashed", UNREADABLE)


class _ImageJob:
    """An image to be processed, and who waits for it."""

    def __init__(self, digest: bytes, content: bytes) -> None:
        self.digest, self.content = digest, content
        self.waiters: list[Future[Outcome]] = []


class WorkerPool:
    """Processes images in worker processes, which start with the first image."""

    def __init__(self, command: Sequence[str], *, workers: int, seconds: float, cache_bytes: int) -> None:
        """`command`: starts a worker; `seconds`: of a processor, for an image; `cache_bytes`: of processed images."""
        self._command = command
        self._num_workers = workers
        self._seconds = seconds
        self._changed = threading.Condition()  # and the lock of what follows
        self._threads: list[threading.Thread] = []
        self._workers: dict[int, Worker] = {}  # by thread
        self._turns: Turns[_ImageJob] = Turns()
        self._jobs: dict[bytes, _ImageJob] = {}  # that wait or are being processed, by digest
        self._closed = False
        self.cache = ByteCache[bytes, ProcessedImage](cache_bytes, lambda image: image.num_bytes)  # by digest
        self.num_lost = 0  # workers that were ended by an image

    @property
    def num_waiting(self) -> int:
        """Images that wait or are being processed."""
        return len(self._jobs)

    @property
    def pids(self) -> list[int]:
        """Ids of the worker processes."""
        return [worker.pid for worker in list(self._workers.values())]

    async def process(self, content: bytes, digest: bytes, field: str, client: str = "") -> ProcessedImage:
        """The image as the model takes it.  `digest`: of the content (`digest_of`).

        Raises RequestError naming `field`: 400 for what is no image, too large, or ends its worker; `Overloaded`,
        `Unavailable`.  Cancelling takes the image out of the queue if no other request waits for it.
        """
        cached = self.cache.get(digest)
        if cached is not None:
            return cached
        waiter: Future[Outcome] = Future()
        job = self._enter(waiter, content, digest, client)
        try:
            outcome = await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            self._leave(job, waiter)
            raise
        if isinstance(outcome, Refusal):
            raise outcome.error(field)
        return outcome

    def close(self) -> None:
        """End workers and threads; images that have not been processed are refused."""
        with self._changed:
            self._closed = True
            for worker in self._workers.values():
                worker.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for job in list(self._jobs.values()):
            self._finish(job, CLOSED)

    def _enter(self, waiter: Future[Outcome], content: bytes, digest: bytes, client: str) -> _ImageJob:
        with self._changed:
            if self._closed:
                raise CLOSED.error("")
            job = self._jobs.get(digest)
            if job is None:
                if len(self._jobs) >= MAX_WAITING:
                    raise Overloaded("too many images wait to be processed", retry_after=5, code="media_overload")
                job = self._jobs[digest] = _ImageJob(digest, content)
                self._turns.add(client, job)
                self._start_thread()
                self._changed.notify()
            job.waiters.append(waiter)
            return job

    def _leave(self, job: _ImageJob, waiter: Future[Outcome]) -> None:
        with self._changed:
            job.waiters = [other for other in job.waiters if other is not waiter]
            if not job.waiters and self._turns.remove(job):
                del self._jobs[job.digest]

    def _start_thread(self) -> None:
        index = len(self._threads)
        if index < self._num_workers:
            thread = threading.Thread(target=self._run, args=(index,), name=f"tokserve-images-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # --- the threads ---

    def _run(self, index: int) -> None:
        while (job := self._next()) is not None:
            outcome: Outcome = FAILED
            try:
                outcome = self._outcome(index, job)
            except Exception:  # the thread goes on, and its requests are answered
                logger.exception("an image could not be handed to the process that decodes images")
                self._end(index)
            self._finish(job, outcome)
        self._end(index)

    def _next(self) -> _ImageJob | None:
        """The next image of the client whose turn it is; None: the pool is closed."""
        with self._changed:
            while not self._turns and not self._closed:
                self._changed.wait()
            return None if self._closed else self._turns.next()

    def _finish(self, job: _ImageJob, outcome: Outcome) -> None:
        if isinstance(outcome, ProcessedImage):
            self.cache.put(job.digest, outcome)
        with self._changed:
            self._jobs.pop(job.digest, None)
            waiters, job.waiters = job.waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(outcome)

    def _outcome(self, index: int, job: _ImageJob) -> Outcome:
        try:
            worker = self._workers.get(index) or self._started(index)
        except (BrokenFrame, TimeoutError, OSError) as error:
            self._end(index)
            if not self._closed:
                logger.error("the process that decodes images does not start: %s", error)
            return CLOSED if self._closed else NO_WORKER
        try:
            reply = worker.process(job.content, self._seconds)
        except TimeoutError:
            self._discard_worker(index, "has had no processor")
            return NO_PROCESSOR
        except BrokenFrame as error:
            if self._closed:
                return CLOSED
            if self._discard_worker(index, str(error)) != -signal.SIGPROF:
                return ENDED
            return Refusal(f"takes more than {self._seconds:g} s to decode (--mm-processor-timeout)", UNREADABLE)
        if isinstance(reply, Refused):
            return Refusal(reply.rule, reply.code)
        name = hashlib.sha256(worker.settings.encode() + job.digest).digest()
        return ProcessedImage(name, reply.arrays, reply.size)

    def _started(self, index: int) -> Worker:
        worker = Worker(self._command)
        with self._changed:
            self._workers[index] = worker
            if self._closed:
                worker.kill()
        worker.await_ready()
        return worker

    def _discard_worker(self, index: int, why: str) -> int | None:
        self.num_lost += 1
        status = self._end(index)
        logger.warning("an image has ended the process that decodes images: %s, exit status %s", why, status)
        return status

    def _end(self, index: int) -> int | None:
        with self._changed:
            worker = self._workers.pop(index, None)
        return None if worker is None else worker.close()


def digest_of(content: bytes) -> bytes:
    """Takes a millisecond per megabyte or two: not for an event loop."""
    return hashlib.sha256(content).digest()
