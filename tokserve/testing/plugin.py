"""Pytest fixtures, `tokserve_server` and `tokserve_client`.

A test suite loads them in the conftest.py of its root, and chooses model and options by a fixture of its own:

    pytest_plugins = ["tokserve.testing.plugin"]

    @pytest.fixture(scope="session")
    def tokserve_options():
        return {"model": "out/checkpoint", "tokens_only": True}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tokserve.rl import TokserveClient
    from tokserve.testing.process import ServerProcess


@pytest.fixture(scope="session")
def tokserve_options() -> dict[str, Any]:
    """Arguments of `tokserve.testing.server`; the demo model by default."""
    return {}


@pytest.fixture(scope="session")
def tokserve_server(tokserve_options: dict[str, Any]) -> Iterator[ServerProcess]:
    """A server for the whole session, started when the first test needs it."""
    from tokserve.testing.process import server

    with server(**tokserve_options) as running:
        yield running


@pytest.fixture
def tokserve_client(tokserve_server: ServerProcess) -> TokserveClient:
    """A new client of that server, for the test's event loop: `async with tokserve_client: ...` closes it."""
    from tokserve.rl import TokserveClient

    return TokserveClient(tokserve_server.url)
