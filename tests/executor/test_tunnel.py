"""Tunnels: bytes in both directions, ends that are seen at the other end, and peers without the keys."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec
import pytest
import zmq

from tests.ports import free_port
from tokserve.base.curve import ClientKeys, EngineKeys, make_keys
from tokserve.features.ranks.channel import Channel, Joined, StoreSet
from tokserve.features.ranks.tunnel import Tunnel

WAIT = 10.0


def pair() -> tuple[Tunnel, Tunnel, EngineKeys, ClientKeys]:
    engine_keys, client_keys = make_keys()
    listening = Tunnel("127.0.0.1", engine_keys)
    connected = Tunnel(listening.address, client_keys)
    for tunnel in (listening, connected):
        tunnel.stream.settimeout(WAIT)
    return listening, connected, engine_keys, client_keys


def read(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := stream.recv(1 << 20)):
        data += part
    return data


def test_messages_pass_in_both_directions_at_once() -> None:
    listening, connected, *_ = pair()
    listener_end, connector_end = Channel(listening.stream), Channel(connected.stream)
    connector_end.send(Joined(3, "1"))
    assert listener_end.from_rank() == Joined(3, "1")
    large = os.urandom(5 << 20)
    sending = [
        threading.Thread(target=channel.send, args=(StoreSet("key", large),))
        for channel in (listener_end, connector_end)
    ]
    for thread in sending:
        thread.start()
    assert connector_end.from_rank() == listener_end.from_rank() == StoreSet("key", large)
    for thread in sending:
        thread.join(WAIT)
    listener_end.close()
    with pytest.raises(ConnectionError):
        connector_end.to_rank()
    connector_end.close()


def test_what_was_sent_arrives_before_the_end() -> None:
    listening, connected, *_ = pair()
    data = os.urandom(3 << 20)
    connected.stream.sendall(data)
    connected.finish()
    assert read(listening.stream, len(data) + 1) == data
    listening.stream.close()
    connected.stream.close()


def test_an_end_whose_process_is_killed_ends_the_one_that_connected() -> None:
    """The listener's end ends when the watcher of the process closes it."""
    script = (
        "import sys, time; from tokserve.base.curve import make_keys; "
        "from tokserve.features.ranks.tunnel import Tunnel; "
        "import msgspec; engine, client = make_keys(); tunnel = Tunnel('127.0.0.1', engine); "
        "print(tunnel.address, msgspec.json.encode(client).decode(), flush=True); "
        "tunnel.stream.recv(1); print('connected', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address, keys = process.stdout.readline().split(maxsplit=1)
        tunnel = Tunnel(address, msgspec.json.decode(keys, type=ClientKeys))
        tunnel.stream.settimeout(WAIT)
        tunnel.stream.sendall(b"x")
        assert process.stdout.readline() == "connected\n"
        process.kill()
        assert tunnel.stream.recv(1) == b""
        tunnel.stream.close()


def test_only_peers_with_the_keys_are_accepted() -> None:
    listening, connected, engine_keys, _ = pair()
    listening.stream.settimeout(0.5)
    _, strange = make_keys()
    stranger = Tunnel(listening.address, ClientKeys(strange.public, strange.secret, engine_keys.public))
    stranger.stream.settimeout(WAIT)
    with suppress(ConnectionError):  # it is turned away, before it has sent this or after
        stranger.stream.sendall(b"hello")
        assert stranger.stream.recv(1) == b""
    with zmq.Context() as context, context.socket(zmq.PAIR) as plain:
        plain.linger = 0
        plain.connect(f"tcp://{listening.address}")
        plain.send(b"hello")
        with pytest.raises(TimeoutError):
            listening.stream.recv(1)
    with socket.create_connection(listening.address.split(":")) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    connected.stream.sendall(b"me")
    listening.stream.settimeout(WAIT)
    assert read(listening.stream, 2) == b"me"
    for tunnel in (listening, connected, stranger):
        tunnel.stream.close()


def test_a_stream_ends_with_its_connection_whatever_was_still_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokserve.features.ranks.tunnel.PATIENCE", 10 * 1000 * int(WAIT))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(40):  # it may be lost before, while or after the tunnel sends
            tunnel = Tunnel(f"127.0.0.1:{listener.getsockname()[1]}", make_keys()[1])
            tunnel.stream.settimeout(WAIT)
            tunnel.stream.sendall(b"hello")
            listener.accept()[0].close()
            with suppress(ConnectionError):  # if the tunnel has not taken what was sent
                assert tunnel.stream.recv(1) == b""
            tunnel.stream.close()


def test_an_address_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(OSError, match=r"203\.0\.113\.7"):
        Tunnel("203.0.113.7", make_keys()[0])


def test_nobody_listens_ends_the_stream() -> None:
    tunnel = Tunnel(f"127.0.0.1:{free_port()}", make_keys()[1])
    tunnel.stream.settimeout(WAIT)
    assert tunnel.stream.recv(1) == b""
    tunnel.stream.close()
