"""The kernels that model tests run on."""

from collections.abc import Iterator

import pytest

from tokserve import ops
from tokserve.errors import StartError


@pytest.fixture(params=["torch", "cpp"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Binds one kind of implementation for a test; the torch references are back afterwards."""
    try:
        ops.bind("cpu", {"*": request.param})
    except StartError as error:
        pytest.skip(str(error))
    yield request.param
    ops.bind("cpu", {"*": "torch"})
