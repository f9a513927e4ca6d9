"""The listening socket."""

import socket

import pytest

from tokserve.cli import listen
from tokserve.config import Config
from tokserve.errors import StartError


def test_a_small_write_is_not_held_back_by_the_kernel() -> None:
    with listen.bind(Config.make(port=0)) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1:1"):
        listen.bind(Config.make(host="192.0.2.1", port=1))
