"""Reading bodies: pieces, limits of time, values and memory, and that counts are released."""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
import threading
import time
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from tests.server.site import site
from tests.waiting import PATIENCE
from tokserve.base import memory
from tokserve.base.errors import Overloaded, RequestError, TimedOut, TooLarge
from tokserve.config import LimitsConfig
from tokserve.server.http import body_reader, workers
from tokserve.server.http.body_reader import CONTAINER_VALUES, FREE, HELD, NAME_VALUES, BodyReader
from tokserve.server.http.disconnect import ClientDisconnected

MIB = 1 << 20


def bodies(**limits: Any) -> BodyReader:
    return BodyReader(LimitsConfig(**limits), 64 * MIB)


def request(pieces: list[bytes], *, ends: bool = True, packed: bool = False, announced: bool = False) -> Request:
    """A request whose body comes in pieces; without an end, the last is followed by silence."""
    left = list(pieces)

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left) or not ends}

    kind = b"application/msgpack" if packed else b"application/json"
    headers = [(b"content-type", kind)]
    if announced:
        headers.append((b"content-length", b"%d" % sum(map(len, pieces))))
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


@pytest.mark.parametrize("size", [0, 1, FREE - 1, FREE, FREE + 1, 5 * MIB])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_pieces_are_joined(size: int, count: int) -> None:
    content = bytes(i % 251 for i in range(256)) * (size // 256 + 1)
    content = content[:size]
    step = max(1, -(-size // count))
    pieces = [content[i : i + step] for i in range(0, size, step)] or [b""]
    for announced in (False, True):
        assert bytes(asyncio.run(bodies().read(request(pieces, announced=announced)))) == content


def test_a_body_that_stops_is_refused() -> None:
    with pytest.raises(TimedOut) as caught:
        asyncio.run(bodies(body_timeout=0.05).read(request([b"[", b"1"], ends=False)))
    assert caught.value.code == "body_timeout" and caught.value.status == 408


def test_a_slow_body_is_refused() -> None:
    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    counted_request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    with pytest.raises(TimedOut):
        asyncio.run(bodies(body_timeout=0.02).read(counted_request))


def test_a_client_that_leaves() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnected):
        asyncio.run(bodies().read(Request({"type": "http", "headers": []}, receive)))


def test_bodies_together_have_a_limit_that_small_ones_do_not_meet() -> None:
    async def scene() -> None:
        all_bodies = bodies(max_body_memory_bytes=4 * MIB)
        first, second = request([b"x" * (3 * MIB)]), request([b"x" * MIB, b"x" * MIB])
        await all_bodies.read(first)
        with pytest.raises(Overloaded) as caught:
            await all_bodies.read(second)
        assert caught.value.status == 503 and caught.value.code == "body_memory" and caught.value.retry_after
        await all_bodies.read(request([b"x" * FREE]))
        all_bodies.release(first)
        all_bodies.release(second)
        all_bodies.release(second)
        again = request([b"x" * MIB, b"x" * MIB])
        await all_bodies.read(again)
        all_bodies.release(again)
        assert all_bodies.held == 0 and not again.scope[HELD]

    asyncio.run(scene())


def test_a_body_whose_client_leaves_while_its_values_are_counted_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, may_end, disconnected = threading.Event(), threading.Event(), asyncio.Event()
    count = body_reader._json_values

    def slowly(raw: body_reader.Buffer) -> int:
        counts.set()
        assert may_end.wait(120)
        return count(raw)

    monkeypatch.setattr(body_reader, "_json_values", slowly)
    raw = json.dumps([1] * MIB).encode()

    async def receive() -> Any:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def scene() -> None:
        all_bodies = bodies()
        counted_request = Request({"type": "http", "headers": []}, receive)
        decoding = asyncio.create_task(all_bodies.decode(counted_request, raw))
        assert await asyncio.to_thread(counts.wait, 30)
        disconnected.set()
        with pytest.raises(ClientDisconnected):
            await decoding
        all_bodies.release(counted_request)
        may_end.set()
        async with asyncio.timeout(30):
            while workers.WORK_LOG._running:
                await asyncio.sleep(0.01)
        assert all_bodies.held == 0

    asyncio.run(scene())


VALUES: list[tuple[Any, int]] = [
    ([1] * 9000, 9000),
    ([{}] * 9000, 81_000),
    (["x" * 10] * 3000, 3000),
    ([{"a": 1, "b": [2]}] * 2000, 38_000),
    ([1.5, -300, None, True, 2**40] * 1000, 5000),
    (["ä" * 300] * 3000, 3000),
    ([-32] * 9000, 9000),
]


@pytest.mark.parametrize(("value", "about"), VALUES)
@pytest.mark.parametrize("packed", [False, True])
def test_values_are_counted_before_they_are_decoded(value: Any, about: int, packed: bool) -> None:
    raw = msgspec.msgpack.encode(value) if packed else json.dumps(value).encode()
    enough, few = bodies(max_body_values=int(about * 1.5)), bodies(max_body_values=max(1000, int(about * 0.6)))
    enough.check_values(request([raw], packed=packed), raw, packed)
    with pytest.raises(TooLarge) as caught:
        few.check_values(request([raw], packed=packed), raw, packed)
    assert caught.value.code == "too_many_values"


@pytest.mark.parametrize(("names", "objects"), [(15, 200), (16, 200), (70_000, 1)])
def test_names_of_packed_objects_are_counted(names: int, objects: int) -> None:
    """Whatever the width of an object's length."""
    raw = msgspec.msgpack.encode([{f"name{index}": 1 for index in range(names)}] * objects)
    count = CONTAINER_VALUES + objects * (CONTAINER_VALUES + NAME_VALUES * names)
    bodies(max_body_values=count).check_values(request([raw], packed=True), raw, True)
    with pytest.raises(TooLarge):
        bodies(max_body_values=count - 1).check_values(request([raw], packed=True), raw, True)


def test_packed_bytes_are_one_value() -> None:
    raw = msgspec.msgpack.encode(
        {"token_ids": b"\x05\0\0\0" * MIB, "extension": msgspec.msgpack.Ext(5, b"x" * 100_000)}
    )
    bodies(max_body_values=1000).check_values(request([raw], packed=True), raw, True)


@pytest.mark.parametrize("raw", [b"\xc1" * 9000, b"\xdb\xff\xff\xff\xff" * 2000, b"\xdf" * 9000, b"\xd9" * 9001])
def test_counting_values_of_malformed_msgpack_ends(raw: bytes) -> None:
    try:
        bodies(max_body_values=1000).check_values(request([raw], packed=True), raw, True)
    except RequestError as error:
        assert error.code == "too_many_values"


def test_a_body_of_unknown_length_is_not_copied_as_it_grows() -> None:
    buffer, content = body_reader._BodyBuffer(0), bytearray()
    pages = set()
    for number in range(40):
        piece = bytes([number]) * (FREE // 2 + number)
        buffer.add(piece)
        content += piece
        pages.add(buffer._pages)
    assert buffer.content() == content and buffer.size > 4 * FREE
    assert len(pages - {None}) == 1


def test_parts_of_large_bodies_take_turns_of_the_event_loop() -> None:
    """Whatever has arrived already: other work of the loop runs between any two parts of all large bodies."""
    parts = 40

    async def scene() -> int:
        reader, turns = bodies(), 0
        pieces = [b"x" * (FREE // 2)] * parts
        reads = [asyncio.ensure_future(reader.read(request(pieces))) for _ in range(3)]
        while not all(read.done() for read in reads):
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(scene()) >= 3 * (parts - 3)


def test_the_pages_of_a_body_that_is_refused_go_back_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    names, done = [], threading.Event()

    def unmap(pages: mmap.mmap) -> None:
        names.append(threading.current_thread().name)
        memory.unmap(pages)
        done.set()

    monkeypatch.setattr(body_reader, "unmap", unmap)
    buffer = body_reader._BodyBuffer(0)
    buffer.add(bytes(body_reader.FREE + 1))
    pages = buffer._pages
    assert pages is not None
    buffer.clear()
    assert done.wait(60) and pages.closed and names[0].startswith("tokserve-work")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/detokenize", {"tokens": [70] * 600_000}, 200),
        ("/detokenize", {"tokens": [-1] * 600_000}, 400),
        ("/inference/v1/generate", {"token_ids": [70] * 600_000}, 400),
    ],
)
def test_a_large_body_is_freed_in_a_thread_when_nothing_else_refers_to_it(
    path: str, body: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, references, done = [], [], threading.Event()

    def free(values: list[Any]) -> None:
        names.append(threading.current_thread().name)
        end = time.monotonic() + PATIENCE
        while sys.getrefcount(values[0]) > memory.NO_OTHERS and time.monotonic() < end:
            time.sleep(0.01)  # a thread that waits for a processor may still have a frame of an error
        references.append(sys.getrefcount(values[0]))
        done.set()

    async def scene() -> int:
        async with site().client() as client:
            reply = await client.post(path, json=body)
            assert await asyncio.to_thread(done.wait, 20)
            return reply.status_code

    monkeypatch.setattr(body_reader, "free_in_parts", free)
    assert asyncio.run(scene()) == status
    assert references == [memory.NO_OTHERS] and names[0].startswith("tokserve-work")


def test_a_batch_of_rollouts_prompts_is_within_the_default_limit() -> None:
    """A trainer may send all prompts of a step in one body: 512 of 4,096 ids (rl-faults E3)."""
    raw = b'{"model":"demo","prompt":[' + b",".join([b"[" + b",".join([b"150000"] * 4096) + b"]"] * 512) + b"]}"
    bodies().check_values(request([raw]), raw, False)
