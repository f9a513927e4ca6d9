"""Fixtures of the runner's tests."""

from collections.abc import Iterator

import pytest

from tokserve import ops
from tokserve.ops.registry import OPS


@pytest.fixture
def references() -> Iterator[dict[str, str]]:
    """Options with which a runner takes the torch references; afterwards ops are those they were."""
    before = {name: getattr(ops, name) for name in [*OPS, "torch_device"]}
    yield {"*": "torch"}
    for name, value in before.items():
        setattr(ops, name, value)
