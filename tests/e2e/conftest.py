"""A server and a checkpoint that several end-to-end tests share; the server `demo` is shared by more than these."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Served
from tests.threads import ServerThread


@pytest.fixture(scope="session")
def tokens_only() -> Iterator[Served]:
    """The demo model, token routes only."""
    with ServerThread("demo", "--tokens-only") as server:
        yield server


@pytest.fixture(scope="session")
def float32() -> Iterator[Served]:
    """The demo model in float32, with all dialects."""
    flags = ("--dtype", "float32", "--sglang-api", "--per-request-spec-decode-metrics", "detailed")
    with ServerThread("demo", *flags) as server:
        yield server


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    from tokserve.checkpoint import DEMO_DIR

    return DEMO_DIR
