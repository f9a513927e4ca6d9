"""Fetching: allowed hosts only, checked addresses, redirects, limits, and no credentials."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from tests.media.web import Web, content, redirect, web_server
from tokserve.base.errors import RequestError
from tokserve.config import MediaConfig
from tokserve.features.images.media import fetch
from tokserve.features.images.media.fetch import Fetcher
from tokserve.features.images.media.hosts import AllowedHosts
from tokserve.features.images.media.sources import ImageSources
from tokserve.protocol.images import ImageUrl

FIELD = "content_parts[0].url"


@pytest.fixture
def web() -> Iterator[Web]:
    with web_server() as server:
        yield server


def get(web: Web, path: str, host: str | None = None, **options: object) -> bytes:
    """The content at a path, as a server that allows the host of `web` reads it."""
    config = MediaConfig(allowed_media_domains=[web.host], **options)  # type: ignore[arg-type]
    sources = ImageSources(config)

    async def run() -> bytes:
        async with sources.opened([ImageUrl(web.url(path, host), FIELD)]) as images:
            return images[0]

    try:
        return asyncio.run(run())
    finally:
        assert sources._memory.used == 0
        sources.close()


def refused(web: Web, path: str, **options: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        get(web, path, **options)
    assert caught.value.field == FIELD and FIELD in caught.value.message
    return caught.value


def resolved(
    names: dict[str, list[str]], hosts: list[str], url: str, calls: list[str] | None = None, timeout: float = 5.0
) -> bytes:
    """What is fetched from `url` where names resolve to these addresses."""

    async def resolve(host: str, port: int) -> list[str]:
        if calls is not None:
            calls.append(host)
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return names[host]

    fetcher = Fetcher(AllowedHosts(hosts), timeout, resolve=resolve)
    try:
        return asyncio.run(fetcher.fetch(url, FIELD, lambda size: None))
    finally:
        fetcher.close()


def test_an_image_is_fetched(web: Web) -> None:
    web.answers["/a.png?x=1"] = content(b"picture" * 100_000)
    assert get(web, "/a.png?x=1#part") == b"picture" * 100_000
    assert web.seen == [("/a.png?x=1", web.host)]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1/a", "does not name"),
        ("http://localhost:{port}/a", "does not name"),
        ("http://[::ffff:127.0.0.1]:{port}/a", "does not name"),
        ("http://2130706433:{port}/a", "does not name"),
        ("http://user:secret@127.0.0.1:{port}/a", "must not hold a user"),
        ("http://127.0.0.1:{port}@example.com/a", "must not hold a user"),
        ("http://example.com\\@127.0.0.1:{port}/a", "."),
        ("http:///a", "."),
        ("http://127.0.0.1:99999/a", "."),
        ("http://127.0.0.1:{port}\n/a", "."),
        ("http://" + "a" * 20_000, "characters"),
    ],
)
def test_urls_of_other_hosts_are_refused(web: Web, url: str, words: str) -> None:
    sources = ImageSources(MediaConfig(allowed_media_domains=[web.host]))

    async def run() -> None:
        async with sources.opened([ImageUrl(url.format(port=web.server_port), FIELD)]):
            pass

    with pytest.raises(RequestError, match=words) as caught:
        asyncio.run(run())
    sources.close()
    assert caught.value.status == 400 and caught.value.field == FIELD and not web.seen


def test_a_name_with_a_private_address_is_not_connected_to(web: Web) -> None:
    for addresses in (
        ["127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
        ["fe80::1%lo"],
        ["10.0.0.1"],
    ):
        with pytest.raises(RequestError, match="not of the public internet") as caught:
            resolved(
                {"a.example": addresses}, [f"a.example:{web.server_port}"], web.url("/", f"a.example:{web.server_port}")
            )
        assert caught.value.status == 400 and caught.value.code == "media_not_allowed" and not web.seen


def test_a_listed_name_that_is_this_machines_is_not_connected_to(web: Web) -> None:
    host = f"localhost:{web.server_port}"
    sources = ImageSources(MediaConfig(allowed_media_domains=[host]))

    async def run() -> None:
        async with sources.opened([ImageUrl(web.url("/", host), FIELD)]):
            pass

    with pytest.raises(RequestError, match="not of the public internet"):
        asyncio.run(run())
    sources.close()
    assert not web.seen


def test_the_connection_goes_to_the_address_that_was_checked(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(fetch, "is_public", lambda address: checked.append(address) or True)
    web.answers["/a"] = content(b"picture")
    host, calls = f"a.example:{web.server_port}", list[str]()
    assert resolved({"a.example": ["127.0.0.1"]}, [host], web.url("/a", host), calls) == b"picture"
    assert web.seen == [("/a", host)] and calls == ["a.example"] and checked == ["127.0.0.1"]


def test_further_addresses_are_tried(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda address: True)
    web.answers["/a"] = content(b"picture")
    host = f"a.example:{web.server_port}"
    assert resolved({"a.example": ["127.0.0.2", "127.0.0.1"]}, [host], web.url("/a", host)) == b"picture"


def test_a_name_that_does_not_resolve_is_an_error_of_the_host(web: Web) -> None:
    with pytest.raises(RequestError, match="cannot be resolved") as caught:
        resolved({}, ["a.example"], "http://a.example/a")
    assert caught.value.status == 502 and caught.value.field == FIELD


def test_redirects_are_followed_on_allowed_hosts_only(web: Web) -> None:
    web.answers |= {"/1": redirect("/2", 301), "/2": redirect("3", 307), "/3": redirect(web.url("/a"), 308)}
    web.answers |= {"/a": content(b"picture"), "/0": redirect("/1")}
    assert get(web, "/1") == b"picture"
    assert "redirects more than 3 times" in (error := refused(web, "/0")).message and error.status == 422
    with web_server() as other:
        other.answers["/a"] = content(b"secret")
        for target in (other.url("/a"), f"//{other.host}/a", f"http://localhost:{other.server_port}/a"):
            web.answers["/other"] = redirect(target)
            error = refused(web, "/other")
            assert error.status == 400 and error.code == "media_not_allowed" and "redirects" in error.message
        assert not other.seen
    for target in (
        "file:///etc/passwd",
        "data:image/png;base64,YWJj",
        "ftp://x/",
        "http://",
        "http://[x",
        "http://a:b/",
    ):
        web.answers["/other"] = redirect(target)
        assert refused(web, "/other").status in (400, 422)


@pytest.mark.parametrize(
    ("status", "becomes"),
    [(404, 422), (403, 422), (410, 422), (204, 422), (408, 502), (429, 502), (500, 502), (503, 502)],
)
def test_statuses_of_the_host(web: Web, status: int, becomes: int) -> None:
    web.answers["/a"] = content(b"", status)
    error = refused(web, "/a")
    assert error.status == becomes and f"status {status}" in error.message


def test_an_endless_or_large_body_ends_at_the_limit(web: Web) -> None:
    sent = 0

    def endless(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        content(b"")(handler)
        while True:
            handler.wfile.write(bytes(1 << 16))
            sent += 1 << 16

    web.answers["/endless"] = endless
    assert "--max-image-bytes" in refused(web, "/endless", max_image_bytes=1 << 20).message
    assert sent < 1 << 25


def test_a_slow_host_ends_at_the_time_limit(web: Web) -> None:
    leave = threading.Event()

    def dripping(handler: BaseHTTPRequestHandler) -> None:
        content(b"")(handler)
        while not leave.wait(0.02):
            handler.wfile.write(b".")

    def silent(handler: BaseHTTPRequestHandler) -> None:
        leave.wait()

    web.answers |= {"/dripping": dripping, "/silent": silent}
    try:
        for path in ("/dripping", "/silent"):
            error = refused(web, path, media_fetch_timeout=0.3)
            assert error.status == 502 and "--media-fetch-timeout" in error.message
    finally:
        leave.set()


def test_no_connection_and_a_broken_reply_are_errors_of_the_host(web: Web) -> None:
    def broken(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"no http at all\r\n\r\n")

    def cut(handler: BaseHTTPRequestHandler) -> None:
        content(b"half", Content_Length="100")(handler)

    web.answers |= {"/broken": broken, "/cut": cut, "/gzip": content(b"x", Content_Encoding="gzip")}
    for path in web.answers:
        assert refused(web, path).status == 502
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RequestError, match="no connection to its host") as caught:
            resolved({}, [host], f"http://{host}/")
    assert caught.value.status == 502


def test_cookies_and_the_environments_proxies_are_not_used(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, str]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        sent.append(dict(handler.headers))
        content(b"x", Set_Cookie="a=b")(handler)

    web.answers["/a"] = answer
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    sources = ImageSources(MediaConfig(allowed_media_domains=[web.host]))

    async def run() -> None:
        for _ in range(2):
            async with sources.opened([ImageUrl(web.url("/a"), FIELD)]) as images:
                assert images == [b"x"]

    asyncio.run(run())
    sources.close()
    assert [sorted(headers) for headers in sent] == [["Accept", "Accept-Encoding", "Host", "User-Agent"]] * 2


def test_cancelling_closes_the_connection(web: Web) -> None:
    arrived, closed = threading.Event(), threading.Event()

    def waits(handler: BaseHTTPRequestHandler) -> None:
        arrived.set()
        if handler.connection.recv(1) == b"":
            closed.set()

    web.answers["/a"] = waits
    sources = ImageSources(MediaConfig(allowed_media_domains=[web.host], media_fetch_timeout=60.0))

    async def run() -> None:
        async def read() -> None:
            async with sources.opened([ImageUrl(web.url("/a"), FIELD)]):
                raise AssertionError("nothing has been sent")

        task = asyncio.create_task(read())
        await asyncio.to_thread(arrived.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert closed.wait(120)
    sources.close()


def test_the_first_refusal_cancels_the_other_fetches(web: Web) -> None:
    arrived, closed = threading.Event(), threading.Event()

    def waits(handler: BaseHTTPRequestHandler) -> None:
        arrived.set()
        if handler.connection.recv(1) == b"":
            closed.set()

    def missing(handler: BaseHTTPRequestHandler) -> None:
        arrived.wait()
        content(b"", 404)(handler)

    web.answers |= {"/waits": waits, "/missing": missing}
    sources = ImageSources(MediaConfig(allowed_media_domains=[web.host], media_fetch_timeout=60.0))

    async def run() -> None:
        urls = [ImageUrl(web.url("/missing"), FIELD), ImageUrl(web.url("/waits"), "another")]
        async with sources.opened(urls):
            raise AssertionError("nothing has been sent")

    with pytest.raises(RequestError, match="status 404"):
        asyncio.run(run())
    assert closed.wait(120)
    sources.close()
