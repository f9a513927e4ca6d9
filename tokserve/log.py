"""One log format for all processes: time, level, process, logger, text.

The process name is set once by `setup`; library code uses `logging.getLogger(__name__)` with lazy
arguments.
"""

from __future__ import annotations

import logging
import sys


class _OneLine(logging.Formatter):
    """Escapes control characters, so that text from a client cannot forge a log line."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.exc_info or record.stack_info or text.isprintable():
            return text
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def setup(process: str, level: str = "info") -> None:
    """Send all logging to stderr as `time level process logger: text`; call once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tokserve").setLevel(level.upper())
