"""The server that is asked: `pytest tests/conformance --base-url http://host:8000`, or else a demo server."""

from collections.abc import Iterator

import pytest

from tests.conformance.api import Api


@pytest.fixture(scope="session")
def api(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[Api]:
    base_url = pytestconfig.getoption("--base-url")
    if base_url:
        with Api(base_url, *(pytestconfig.getoption(name) for name in ("--vocab-size", "--eos-token-id"))) as requested:
            yield requested
    else:
        with Api(request.getfixturevalue("demo").url) as requested:
            yield requested


@pytest.fixture
def text(api: Api) -> Api:
    """The same, for what needs a tokenizer."""
    if api.tokens_only:
        pytest.skip("a tokens-only server")
    return api
