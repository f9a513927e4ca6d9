"""Names of clients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.site import site
from tokserve.config import ServerConfig
from tokserve.server.http.auth import Keys
from tokserve.server.http.client_names import LONGEST, PEER, ClientNames

GENERATE = "/inference/v1/generate"


def name(peer: str | None = "10.0.0.1", *headers: tuple[str, str], **options: Any) -> str:
    """The name of a request that `auth` has let pass."""
    scope = {"path": "/x", PEER: peer, "headers": [(key.lower().encode(), value.encode()) for key, value in headers]}
    Keys(options.get("api_key", ()), options.get("admin_api_key", ())).check(scope)
    return ClientNames(ServerConfig(**options)).name(scope)


def test_an_address_is_a_client() -> None:
    assert name("10.0.0.1") == "10.0.0.1" != name("10.0.0.2")
    assert name(None) == name("") == "", "a Unix socket has no client addresses"


def test_a_network_of_ipv6_is_a_client() -> None:
    assert name("2001:db8::1") == name("2001:db8::ffff") == "2001:db8::/64" != name("2001:db8:0:1::1")
    assert name("::ffff:10.0.0.1") == "10.0.0.1" and name("fe80::1%eth0") == "fe80::/64"


def test_an_api_key_identifies_a_client_and_is_not_shown() -> None:
    key = ("Authorization", "Bearer sesame")
    seen = name("10.0.0.1", key, api_key=["sesame", "other"])
    assert seen == name("10.0.0.2", key, api_key=["sesame"]) and "sesame" not in seen
    assert seen == name("10.0.0.2", ("Authorization", "bearer  sesame "), api_key=["sesame"])
    assert seen != name("10.0.0.1", ("Authorization", "Bearer other"), api_key=["other"])


def test_a_key_that_is_not_accepted_makes_no_other_client() -> None:
    key = ("x-api-key", "sesame")
    seen = name("10.0.0.1", key, api_key=["sesame"])
    assert seen == name("10.0.0.1", ("Authorization", "Bearer sesame"), api_key=["sesame"])
    assert seen == name("10.0.0.1", ("Authorization", "Bearer made-up"), key, api_key=["sesame"])
    assert seen == name("10.0.0.1", key, ("Authorization", "Bearer made-up"), api_key=["sesame"])


def test_unchecked_headers_do_not_name_a_client() -> None:
    for options in ({}, {"admin_api_key": ["admin"]}):
        assert name("10.0.0.1", ("Authorization", "Bearer made-up"), **options) == "10.0.0.1"
    assert name("10.0.0.1", ("X-Forwarded-For", "1.2.3.4")) == "10.0.0.1"


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        (["1.2.3.4"], "1.2.3.4"),
        (["6.6.6.6, 1.2.3.4"], "1.2.3.4"),
        (["6.6.6.6", "1.2.3.4"], "1.2.3.4"),
        (["2001:db8::7"], "2001:db8::/64"),
        ([""], "10.0.0.1"),
        ([], "10.0.0.1"),
        (["x" * 1000], "x" * LONGEST),
    ],
)
def test_a_trusted_header_names_the_client_by_its_last_address(headers: list[str], client: str) -> None:
    forwarded = [("X-Forwarded-For", value) for value in headers]
    assert name("10.0.0.1", *forwarded, client_header="X-Forwarded-For") == client


def test_the_client_name_reaches_the_engine() -> None:
    s = site(client_header="X-Real-IP")
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
    seen = []
    start = s.llm.submit

    def submit(states: Any, client: str = "", announcement: Any = None) -> Any:
        seen.append(client)
        return start(states, client)

    s.llm.submit = submit  # type: ignore[method-assign]
    assert s.post(GENERATE, body, headers={"X-Real-IP": "1.2.3.4"}).status_code == 200
    assert seen == ["1.2.3.4"]
