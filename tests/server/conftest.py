"""Fixtures of the server's tests."""

import pytest

from tests.server.site import Site, chat_site
from tests.text.tool_templates import HERMES, OPENED


@pytest.fixture(scope="module", params=[HERMES, OPENED], ids=["hermes", "opened"])
def reader(request: pytest.FixtureRequest) -> Site:
    """A server that parses reasoning and calls, with a template that leaves reasoning to the model or opens it."""
    return chat_site("", request.param, reasoning_parser="qwen3")
