"""Log lines: text and JSON, ids of requests, and nothing that a client can forge."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

import pytest

from tokserve.base import log

logger = logging.getLogger("tokserve.test")


Lines = Callable[[], list[str]]


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str], loggers: None) -> Lines:
    """The lines on stderr since the last call."""
    return lambda: capsys.readouterr().err.splitlines()


def test_text(written: Lines) -> None:
    log.setup("server")
    logger.info("port %d", 8000)
    logger.debug("not shown")
    (line,) = written()
    assert line.endswith(" INFO    server tokserve.test: port 8000")


def test_json(written: Lines) -> None:
    log.setup("engine", "debug", "json")
    logger.debug("port %d", 8000, extra={"fields": {"event": "bound", "ports": [1, 2]}})
    line = json.loads(*written())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "debug",
        "process": "engine",
        "logger": "tokserve.test",
        "message": "port 8000",
        "event": "bound",
        "ports": [1, 2],
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_message_can_forge_a_line(written: Lines, form: log.Format) -> None:
    log.setup("server", form=form)
    evil = "x\n2026-01-01 00:00:00 INFO    server tokserve: forged\r\x1b[2J\x00"
    logger.info("id %s", evil, extra={"request_id": evil})
    (line,) = written()
    assert "forged" in line and line.isprintable()


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_exception_can_forge_a_line(written: Lines, form: log.Format) -> None:
    log.setup("server", form=form)
    try:
        raise ValueError("x\n2026-01-01 00:00:00 INFO    server tokserve: forged")
    except ValueError:
        logger.exception("it failed")
    first, *rest = written()
    assert "it failed" in first and any("ValueError" in line for line in [first, *rest])
    assert all(line.startswith("  ") for line in rest)
    if form == "json":
        assert not rest and json.loads(first)["exception"].startswith("Traceback")


def test_half_a_surrogate_pair_is_written_too(written: Lines) -> None:
    for form in ("text", "json"):
        log.setup("server", form=form)  # type: ignore[arg-type]
        logger.info("id %s", "\ud800", extra={"fields": {"field": "\ud800"}})
    text, line = written()
    assert "\\ud800" in text and json.loads(line)["message"] == "id \\ud800"


def test_lines_carry_the_id_of_the_request_whose_task_logs(written: Lines) -> None:
    async def serve(name: str) -> None:
        log.request_id.set(name)
        await asyncio.sleep(0)
        logger.info("served")

    async def all_of_them() -> None:
        await asyncio.gather(*(asyncio.create_task(serve(name)) for name in "ab"))
        logger.info("nobody's")

    log.setup("server")
    asyncio.run(all_of_them())
    assert [line.partition("tokserve.test: ")[2] for line in written()] == [
        "[a] served",
        "[b] served",
        "nobody's",
    ]
    log.setup("server", form="json")
    asyncio.run(all_of_them())
    assert [json.loads(line).get("request_id") for line in written()] == ["a", "b", None]
    logger.info("another's", extra={"request_id": "c"})
    assert json.loads(*written())["request_id"] == "c"
