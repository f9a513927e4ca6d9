"""The compiled loops over weights, where this package is a part of the server's and its extension was built.

Without them numpy gives the same numbers, more slowly.
"""

from __future__ import annotations

from typing import Any

try:
    from .. import _C

    native: Any = _C
except ImportError:  # tokserve-client by itself, or nothing was compiled
    native = None
