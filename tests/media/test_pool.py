"""Workers that crash, hang or write garbage fail only their image."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokserve.base.errors import RequestError
from tokserve.features.images.media import frames, pool, worker_process
from tokserve.features.images.media.cache import ByteCache
from tokserve.features.images.media.frames import Array, BrokenFrame
from tokserve.features.images.media.pool import ProcessedImage, WorkerPool, digest_of

COMMAND = [sys.executable, "-m", "tests.media.odd_worker"]
FIELD = "messages[0].content[0].image_url.url"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    monkeypatch.chdir(Path(__file__).parents[2])
    pool = WorkerPool(COMMAND, workers=1, seconds=30.0, cache_bytes=1000)
    yield pool
    pool.close()
    assert not pool.pids and not pool.num_waiting


async def process(workers: WorkerPool, content: bytes, client: str = "") -> ProcessedImage:
    return await workers.process(content, digest_of(content), FIELD, client)


async def refusal(workers: WorkerPool, content: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await process(workers, content)
    return caught.value


def test_an_image_is_processed_once_and_named(workers: WorkerPool) -> None:
    async def run() -> None:
        assert not workers.pids  # no worker starts before there is an image
        lookups: list[bool] = []
        workers.cache.on_lookup = lookups.append
        first = await process(workers, b"abc")
        assert first.arrays["pixels"].shape == (3,) and bytes(first.arrays["pixels"].buffer) == bytes(3)
        assert await process(workers, b"abc") is first and lookups == [False, True]
        other = await process(workers, b"abd")
        assert other.hash != first.hash and len(other.hash) == 32
        assert first.size[0] == other.size[0] == workers.pids[0] != os.getpid()

    asyncio.run(run())


def test_equal_images_at_the_same_time_are_processed_once(workers: WorkerPool) -> None:
    async def run() -> None:
        images = await asyncio.gather(*(process(workers, b"sleep:0.1") for _ in range(20)))
        assert all(image is images[0] for image in images)

    asyncio.run(run())


@pytest.mark.parametrize("content", [b"crash", b"exit", b"nonsense", b"html", b"text"])
def test_an_image_that_ends_its_worker_ends_nothing_else(workers: WorkerPool, content: bytes) -> None:
    async def run() -> None:
        before = await process(workers, b"abc")
        results = await asyncio.gather(*(process(workers, part) for part in (content, b"x")), return_exceptions=True)
        error = results[0]
        assert isinstance(error, RequestError) and error.status == 400 and error.field == FIELD
        assert error.code == "image_unreadable" and error.message.startswith(FIELD)
        assert isinstance(results[1], ProcessedImage) and results[1].size != before.size
        assert workers.num_lost == 1

    asyncio.run(run())


def test_an_image_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    workers = WorkerPool(COMMAND, workers=1, seconds=0.3, cache_bytes=0)

    async def run() -> None:
        error = await refusal(workers, b"spin")
        assert error.status == 400 and error.field == FIELD and "--mm-processor-timeout" in error.message
        monkeypatch.setattr(worker_process, "PATIENCE", 0.0)
        error = await refusal(workers, b"sleep:1000")  # as one that gets no processor
        assert error.status == 503 and error.code == "media_worker" and "no processor" in error.message
        monkeypatch.setattr(worker_process, "PATIENCE", 60.0)
        monkeypatch.setattr(workers, "_seconds", 60.0)
        assert (await process(workers, b"x")).arrays

    asyncio.run(run())
    workers.close()


def test_an_unexpected_error_fails_one_image(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(message: object) -> bytearray:
        raise MemoryError

    async def run() -> None:
        with monkeypatch.context() as short:
            short.setattr(frames, "pack", no_memory)
            error = await asyncio.wait_for(refusal(workers, b"abc"), 60)
        assert error.status == 503 and error.code == "media_worker"
        assert (await process(workers, b"abc")).arrays["pixels"].shape == (3,)

    asyncio.run(run())


def test_a_refusal_keeps_its_worker(workers: WorkerPool) -> None:
    async def run() -> None:
        error = await refusal(workers, b"refuse")
        assert (error.message, error.code, error.status) == (f"{FIELD} must be better", "some_code", 400)
        pids = workers.pids
        await process(workers, b"x")
        assert workers.pids == pids and not workers.num_lost

    asyncio.run(run())


def test_large_images_pass_both_ways(workers: WorkerPool) -> None:
    async def run() -> None:
        content = b"large:20000000:" + bytes(10_000_000)
        image = await process(workers, content)
        assert image.num_bytes == 20_000_000
        assert len(workers.cache) == 0  # more than the cache may hold

    asyncio.run(run())


def test_a_worker_that_does_not_start_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    for command in ([*COMMAND, "never"], ["/nonexistent"]):
        workers = WorkerPool(command, workers=1, seconds=30.0, cache_bytes=0)
        error = asyncio.run(refusal(workers, b"x"))
        assert error.status == 503 and error.code == "media_worker" and not workers.pids
        workers.close()


def test_a_request_that_leaves_takes_its_image_out_of_the_queue(workers: WorkerPool, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"

    async def run() -> None:
        await process(workers, b"x")
        running = asyncio.create_task(process(workers, b"until:%s" % bytes(go_on)))
        await asyncio.sleep(0)
        while workers._turns:
            await asyncio.sleep(0.01)
        queued = [asyncio.create_task(process(workers, content)) for content in (b"a", b"b", b"b")]
        await asyncio.sleep(0)
        assert workers.num_waiting == 3
        for task in queued[:2]:
            task.cancel()
        running.cancel()
        await asyncio.gather(running, *queued[:2], return_exceptions=True)
        assert workers.num_waiting == 2  # the one that runs, and the one that another request waits for
        go_on.touch()
        assert (await queued[2]).arrays["pixels"].shape == (1,)

    asyncio.run(run())


def test_clients_take_turns(workers: WorkerPool, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"

    async def run() -> None:
        await process(workers, b"x")
        order: list[str] = []

        async def one(content: bytes, client: str) -> None:
            await process(workers, content, client)
            order.append(client)

        first = asyncio.create_task(one(b"until:%s" % bytes(go_on), "greedy"))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(one(b"greedy %d" % i, "greedy")) for i in range(5)]
        tasks += [asyncio.create_task(one(b"modest %d" % i, "modest")) for i in range(2)]
        while workers.num_waiting < 8:
            await asyncio.sleep(0.001)
        go_on.touch()
        await asyncio.gather(first, *tasks)
        assert order.index("modest") <= 2 and order[5:] == ["greedy"] * 3

    asyncio.run(run())


def test_the_queue_is_bounded(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool, "MAX_WAITING", 2)
    go_on = tmp_path / "go on"

    async def run() -> None:
        contents = (b"until:%s" % bytes(go_on), b"b")
        tasks = [asyncio.create_task(process(workers, content)) for content in contents]
        await asyncio.sleep(0)
        error = await refusal(workers, b"c")
        assert error.status == 503 and error.code == "media_overload"
        go_on.touch()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_closing_refuses_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    workers = WorkerPool(COMMAND, workers=2, seconds=1000.0, cache_bytes=0)

    async def run() -> None:
        await process(workers, b"x")
        tasks = [asyncio.create_task(process(workers, b"sleep:100%d" % i)) for i in range(4)]
        while len(workers.pids) < 2:
            await asyncio.sleep(0.01)
        closing = threading.Thread(target=workers.close)
        closing.start()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RequestError) and result.code == "draining"
        closing.join()
        assert (await refusal(workers, b"y")).code == "draining"

    asyncio.run(run())


def test_a_worker_ends_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    source, target = os.pipe()
    worker = pool.Worker(COMMAND)
    worker.await_ready()
    os.close(source), os.close(target)
    worker._process.stdin.close()  # type: ignore[union-attr]  # as the end of the server does
    assert worker._process.wait(120) == 0
    worker._process.stdout.close()  # type: ignore[union-attr]


def image(size: int, key: int) -> ProcessedImage:
    return ProcessedImage(bytes([key]), {"a": Array("|u1", (size,), memoryview(bytes(size)))}, (1, 1))


def test_the_cache_drops_what_was_used_least_recently() -> None:
    cache = ByteCache[bytes, ProcessedImage](100, lambda value: value.num_bytes)
    for key in range(3):
        cache.put(bytes([key]), image(40, key))
    assert len(cache) == 2 and cache.num_bytes == 80 and cache.get(b"\0") is None
    assert cache.get(b"\1") is not None
    cache.put(b"\3", image(40, 3))
    assert cache.get(b"\2") is None and cache.get(b"\1") is not None
    cache.put(b"\4", image(101, 4))
    assert cache.get(b"\4") is None and len(cache) == 2
    cache.put(b"\3", image(60, 3))  # in place of the earlier one
    assert len(cache) == 2 and cache.num_bytes == 100


def test_frames_end_at_their_deadline_and_with_their_writer() -> None:
    source, target = os.pipe()
    os.set_blocking(target, False)
    frame = frames.pack(frames.Refused("x" * 1_000_000))
    with pytest.raises(TimeoutError):
        frames.send(target, frame, time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        frames.receive(os.pipe()[0], time.monotonic() + 0.05)
    os.close(target)
    with pytest.raises(BrokenFrame, match="ended"):
        frames.receive(source)
    os.close(source)
    source, target = os.pipe()
    os.write(target, (1 << 40).to_bytes(8, "little"))
    with pytest.raises(BrokenFrame, match="a frame of"):
        frames.receive(source)
    os.close(source)
    with pytest.raises(BrokenFrame, match="ended"):
        frames.send(target, frame)
    os.close(target)
