"""Fixtures of the engine's tests."""

from pathlib import Path

import pytest


@pytest.fixture
def address(tmp_path: Path) -> str:
    """The address at which an engine listens."""
    return f"ipc://{tmp_path}/engine.sock"
