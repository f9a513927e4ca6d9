"""Fetching over TLS: the connection goes to the address that was checked, the certificate is that of the name.

`pictures_test.pem`: the key and the certificate, made with openssl, of the name pictures.test alone.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.media.web import Web, content, redirect, web_server
from tokserve.base.errors import RequestError
from tokserve.features.images.media import fetch
from tokserve.features.images.media.fetch import Fetcher, FetchFailed
from tokserve.features.images.media.hosts import AllowedHosts

PEM = Path(__file__).parent / "pictures_test.pem"
NAMES = ["pictures.test", "other.test"]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(fetch, "is_public", lambda address: True)  # which that of the test's server is not
    with web_server() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(PEM)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        yield server


def fetched(web: Web, name: str, path: str, verify: ssl.SSLContext | bool) -> bytes:
    """What is fetched where all names are this machine's."""

    async def resolve(host: str, port: int) -> list[str]:
        assert host in NAMES
        return ["127.0.0.1"]

    port = web.server_port
    fetcher = Fetcher(AllowedHosts([f"{one}:{port}" for one in NAMES]), 5.0, resolve=resolve, verify=verify)
    try:
        return asyncio.run(fetcher.fetch(f"https://{name}:{port}{path}", "url", lambda size: None))
    finally:
        fetcher.close()


def trusting() -> ssl.SSLContext:
    """A context that trusts the certificate."""
    return ssl.create_default_context(cafile=str(PEM))


def test_the_certificate_of_the_name_is_accepted(web: Web) -> None:
    web.answers["/a.png"] = content(b"picture")
    web.answers["/moved"] = redirect("/a.png")
    for path in ("/a.png", "/moved"):
        assert fetched(web, "pictures.test", path, trusting()) == b"picture"
    assert web.seen[0] == ("/a.png", f"pictures.test:{web.server_port}")


@pytest.mark.parametrize(("name", "verify"), [("other.test", trusting()), ("pictures.test", True)])
def test_another_certificate_is_refused(web: Web, name: str, verify: ssl.SSLContext | bool) -> None:
    """A certificate of another name, and an untrusted one."""
    with pytest.raises(FetchFailed, match="certificate verify failed") as caught:
        fetched(web, name, "/a.png", verify)
    assert isinstance(caught.value, RequestError) and caught.value.field == "url"
    assert not web.seen
