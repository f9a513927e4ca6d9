"""Waiting for what other threads and processes do, without an assertion on the time it takes."""

import time
from collections.abc import Callable

PATIENCE = 300.0  # seconds; machines are busy


def until(condition: Callable[[], object], about: object = "") -> None:
    """Return when the condition holds; `about` is shown if it never does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, about
        time.sleep(0.02)
