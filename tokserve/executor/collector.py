"""Python's garbage collector, kept out of the import of torch, of whose time it takes a fourth."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Do not look for garbage: an import makes hundreds of thousands of objects, and nearly all of them stay.  Later
    collections skip them, too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
