"""The client's socket: bursts, sends that cross with answers, closing in the middle."""

from __future__ import annotations

import asyncio
import errno
import gc
import multiprocessing
from pathlib import Path

import pytest
import zmq

from tests.client.fake_engine import FakeEngine
from tokserve.base.errors import StartError
from tokserve.client.client_socket import BURST, ClientSocket
from tokserve.protocol.messages import Call, Dead, FromEngine, Ready, Reply


def test_every_message_comes_once_and_in_order(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e.sock"
    received: list[FromEngine] = []

    async def scene() -> None:
        link = ClientSocket(address, received.append, lambda: None)
        link.send(Call(0, "hello"))
        count = 5 * BURST + 3
        with FakeEngine(address) as engine:
            await asyncio.to_thread(engine.wait, Call)
            for i in range(count):
                engine.send(Reply(i))
                if i % 7 == 0:
                    link.send(Call(1000 + i, "silence"))
                if i % 50 == 0:
                    await asyncio.sleep(0.001)
            end = asyncio.get_running_loop().time() + 60
            while len(received) < count + 1 and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.005)
            assert isinstance(received[0], Ready)
            assert [m.call_id for m in received[1:] if isinstance(m, Reply)] == list(range(count))
            assert len(await asyncio.to_thread(engine.wait, Call, 1 + (count + 6) // 7)) == 1 + (count + 6) // 7
        link.close()
        link.close()

    asyncio.run(scene())


def test_what_came_together_is_settled_once(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e.sock"
    received: list[FromEngine | None] = []

    async def scene() -> None:
        link = ClientSocket(address, received.append, lambda: received.append(None))
        link.send(Call(0, "hello"))
        with FakeEngine(address) as engine:
            await asyncio.to_thread(engine.wait, Call)
            engine.send(*[Reply(i) for i in range(3 * BURST)])
            async with asyncio.timeout(60):
                while len([m for m in received if isinstance(m, Reply)]) < 3 * BURST or received[-1] is not None:
                    await asyncio.sleep(0.005)
        link.close()

    asyncio.run(scene())
    bursts = "".join("|" if message is None else "m" for message in received).split("|")
    assert bursts[-1] == "" and all(len(burst) <= BURST for burst in bursts)


def test_closing_while_messages_are_delivered(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e.sock"
    received: list[FromEngine] = []

    async def scene() -> None:
        def deliver(message: FromEngine) -> None:
            received.append(message)
            if isinstance(message, Dead):
                link.close()

        link = ClientSocket(address, deliver, lambda: None)
        link.send(Call(0, "hello"))
        with FakeEngine(address) as engine:
            await asyncio.to_thread(engine.wait, Call)
            engine.send(Dead("x"), *[Reply(i) for i in range(10)])
            async with asyncio.timeout(60):
                while not any(isinstance(message, Dead) for message in received):
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)  # nothing is delivered after it
        assert isinstance(received[-1], Dead)

    asyncio.run(scene())


def forget(address: str) -> None:
    async def scene() -> None:
        link = ClientSocket(address, lambda _: None, lambda: None)
        link.itself = link  # type: ignore[attr-defined]
        link.send(Call(0, "hello"))

    asyncio.run(scene())
    gc.collect()


@pytest.mark.slow
def test_collecting_one_that_was_never_closed_does_not_block(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=forget, args=(f"ipc://{tmp_path}/e.sock",))
    process.start()
    process.join(120)
    blocked = process.is_alive()
    process.kill()
    assert not blocked and process.exitcode == 0


def test_without_descriptors_there_is_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted() -> None:
        raise zmq.ZMQError(errno.EMFILE)

    async def scene() -> None:
        with pytest.raises(StartError, match="cannot make a socket to the engine"):
            ClientSocket("ipc:///nowhere", lambda message: None, lambda: None)

    monkeypatch.setattr(zmq, "Context", exhausted)
    asyncio.run(scene())
