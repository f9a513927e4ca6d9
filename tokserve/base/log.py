"""One log format for all processes: a line of text, or a JSON object, per record.

`setup` sets the process name once; library code uses `logging.getLogger(__name__)` with lazy arguments.  A line
about a request carries its id: from `extra={"request_id": ...}`, or else that of the running task (`request_id`).
`extra={"fields": {...}}` adds members to the JSON object; the text should have the same values.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from tokserve.base.errors import sendable

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
Format = Literal["text", "json"]


class _TextFormatter(logging.Formatter):
    """`time level process logger: text`; control characters are escaped and tracebacks indented, so that no client can
    forge a line."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(about)s%(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        about = _request_of(record)
        record.about = f"[{about}] " if about else ""
        return _escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_escape(line)}" for line in super().formatException(ei).splitlines())


class _JsonFormatter(logging.Formatter):
    """A JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        about = _request_of(record)
        if about:
            line["request_id"] = about
        line |= vars(record).get("fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line).decode()
        except UnicodeEncodeError:  # a lone surrogate from a client's JSON
            return msgspec.json.encode(_without_surrogates(line)).decode()


def _request_of(record: logging.LogRecord) -> str | None:
    request: str | None = vars(record).get("request_id")
    return request or request_id.get()


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_surrogates(item) for name, item in value.items()}
    return sendable(value) if isinstance(value, str) else value


def setup(process: str, level: str = "info", form: Format = "text") -> None:
    """Log to stderr in this form; call once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_TextFormatter(process) if form == "text" else _JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tokserve").setLevel(level.upper())
