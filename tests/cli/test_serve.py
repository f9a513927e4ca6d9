"""The listening socket."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tokserve.base.errors import StartError
from tokserve.cli import listen
from tokserve.cli.http import ApiServer, Signals
from tokserve.cli.serve import chosen, serve, serve_config
from tokserve.config import Config
from tokserve.config.option_checks import is_open
from tokserve.config.resolve import resolve


def test_a_small_write_is_not_held_back_by_the_kernel() -> None:
    with listen.bind(Config.make(port=0)) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_second_of_two_servers_on_one_port_is_refused() -> None:
    with listen.bind(Config.make(port=0)) as first:
        config = Config.make(port=first.getsockname()[1])
        with listen.bind(config) as second:
            listen.begin(first, config)
            with pytest.raises(
                StartError,
                match=r"cannot listen on http://127\.0\.0\.1:\d+: Address already in use.*choose another --port",
            ):
                listen.begin(second, config)


def test_the_log_names_the_options_that_were_chosen_and_no_keys() -> None:
    assert (
        chosen(Config.make(port=1, tokens_only=True, api_key=["secret"])) == "port=1 tokens_only=True api_key=(1 set)"
    )
    assert chosen(Config()) == ""


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "10.0.0.1"}, True),
        ({"host": "0.0.0.0", "api_key": ["k"]}, False),
        ({"host": "127.0.0.1"}, False),
        ({}, False),
        ({"host": "0.0.0.0", "uds": "/tmp/x"}, False),
        ({"host": "0.0.0.0", "admin_api_key": ["k"]}, True),
        ({"host": "0.0.0.0", "ssl_certfile": __file__, "ssl_keyfile": __file__}, True),
        ({"host": "0.0.0.0", "ssl_certfile": __file__, "ssl_keyfile": __file__, "ssl_ca_certs": __file__}, False),
    ],
)
def test_a_server_that_is_open_to_others_without_a_key_is_known(options: dict[str, object], warned: bool) -> None:
    """newcomer-3 D15."""
    assert is_open(resolve(Config.make(**options))) is warned


@pytest.mark.usefixtures("loggers")
def test_a_start_that_is_open_to_others_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Stopped(ApiServer):
        async def start(self, joining: object = None) -> None:
            raise StartError("far enough")

    with pytest.raises(StartError, match="far enough"):
        serve_config(Config.make(model="demo", host="0.0.0.0", port=0), Stopped)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert "--api-key" in line and "0.0.0.0" in line


@pytest.mark.usefixtures("loggers")
def test_with_json_logs_a_start_error_is_a_json_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve({"model": "./nowhere", "log_format": "json"}) == 1
    line = json.loads(capsys.readouterr().err)
    assert line["level"] == "error" and "neither a directory" in line["message"]
    with pytest.raises(StartError, match="neither a directory"):
        serve({"model": "./nowhere"})


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1:1"):
        listen.bind(Config.make(host="192.0.2.1", port=1))


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("mine")
    with pytest.raises(StartError, match="cannot listen on"):
        listen.bind(Config.make(uds=str(notes)))
    assert notes.read_text() == "mine"
    with pytest.raises(StartError, match="too long"):
        listen.bind(Config.make(uds=str(tmp_path / ("x" * 200))))


def test_sockets_of_several_processes_share_an_address_exclusively() -> None:
    with listen.bind(Config.make(port=0)) as first:
        sockets = listen.spread(first, 3)
        try:
            assert sockets[0] is first and {socket.getsockname() for socket in sockets} == {first.getsockname()}
            for socket in sockets:
                socket.listen()
            with pytest.raises(StartError, match="cannot listen"):
                listen.bind(Config.make(port=first.getsockname()[1]))
        finally:
            for socket in sockets[1:]:
                socket.close()


def test_a_unix_socket_is_one_for_all(tmp_path: Path) -> None:
    config = Config.make(uds=str(tmp_path / "s"))
    with listen.bind(config) as only:
        assert listen.spread(only, 3) == [only] * 3
        listen.remove(config)
        listen.remove(config)
        assert not list(tmp_path.iterdir())


def test_a_hangup_stops_unless_it_is_ignored_from_the_start() -> None:
    async def heard() -> bool:
        notified = asyncio.Event()
        Signals(notified.set)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)  # read after it
        await notified.wait()
        return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    usual = [(number, signal.getsignal(number)) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        assert asyncio.run(heard())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert not asyncio.run(heard())
    finally:
        for number, handler in usual:
            signal.signal(number, handler)
