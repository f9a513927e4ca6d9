"""Images of http and https URLs, fetched by an event loop of their own in a thread.

Only allowed hosts are connected to (`hosts`), at an address that has been checked: the name is resolved once, and the
connection goes to that address, so a name that resolves to something else the next moment gains nothing.  Redirects are
followed by the same rules.  Nothing of the environment (proxies, .netrc), no cookies and no credentials are sent.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from tokserve import __version__
from tokserve.base.errors import FetchFailed, FetchRefused, Overloaded, RequestError, invalid
from tokserve.features.images.media.hosts import USUAL_PORTS, AllowedHosts, canonical, is_public

MAX_REDIRECTS = 3
FETCHES = 32  # at once; further ones wait
MAX_WAITING = 256  # fetches
RESOLVERS = 8  # threads that resolve names
FAILING = (408, 425, 429)  # statuses below 500 that say nothing about what the URL names
HEADERS = {"User-Agent": f"tokserve/{__version__}", "Accept": "image/*", "Accept-Encoding": "identity"}
Count = Callable[[int], None]  # is called with the number of bytes before they are kept; may raise RequestError
Resolve = Callable[[str, int], Awaitable[list[str]]]  # addresses of a host


async def _resolve(host: str, port: int) -> list[str]:
    results = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in results))


class Fetcher:
    """Fetches URLs for any thread or event loop; `close` ends its thread."""

    def __init__(
        self, hosts: AllowedHosts, timeout: float, *, resolve: Resolve = _resolve, verify: ssl.SSLContext | bool = True
    ) -> None:
        """`timeout`: seconds for a URL, with its redirects.  `resolve` and `verify` (certificates): for tests."""
        self._hosts = hosts
        self._timeout = timeout
        self._resolve = resolve
        self._verify = verify
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def fetch(self, url: str, field: str, count: Count) -> bytes:
        """What the URL names.  Cancelling closes the connection.

        Raises RequestError naming `field`: 400 for a URL or an address that is not allowed, `FetchRefused` (422) if the
        host refuses, `FetchFailed` (502) if it fails or takes too long, `Overloaded` if too many wait.
        """
        target = self._target(url, field)  # refuses most before there is a thread
        future = asyncio.run_coroutine_threadsafe(self._fetch(target, field, count), self._started())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Cancel what is being fetched, and end the thread."""
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._resolvers = ThreadPoolExecutor(RESOLVERS, "tokserve-resolve")
                self._loop.set_default_executor(self._resolvers)
                verify = httpx.create_ssl_context() if self._verify is True else self._verify
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a connection per request
                self._transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits)
                self._slots, self._waiting = asyncio.Semaphore(FETCHES), 0
                self._thread = threading.Thread(target=self._run, name="tokserve-fetch", daemon=True)
                self._thread.start()
            return self._loop

    def _run(self) -> None:
        assert self._loop is not None
        self._loop.run_forever()
        self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.aclose()
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    def _target(self, url: str, field: str) -> httpx.URL:
        try:
            target = httpx.URL(url)
            host = canonical(target.raw_host.decode("ascii"))
        except (httpx.InvalidURL, ValueError) as error:
            raise invalid(field, f"is not a valid URL: {str(error)[:200]}") from None
        if target.scheme not in USUAL_PORTS or not host:
            raise invalid(field, "must be an http, https, data or file URL")
        if target.userinfo:
            raise invalid(field, "must not hold a user or a password")
        if not self._hosts.allows(target.scheme, host, target.port or USUAL_PORTS[target.scheme]):
            raise invalid(
                field,
                f"names the host {target.netloc.decode('ascii')[:200]!r}, which --allowed-media-domains does not name",
                code="media_not_allowed",
            )
        return target

    async def _fetch(self, target: httpx.URL, field: str, count: Count) -> bytes:
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many images are being fetched", retry_after=5, code="media_overload")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            async with asyncio.timeout(self._timeout):
                return await self._follow(target, field, count)
        except TimeoutError:
            raise self._failed(field, f"has not arrived within {self._timeout:g} s (--media-fetch-timeout)") from None
        except httpx.TransportError as error:
            raise self._failed(field, f"cannot be fetched: {str(error)[:200] or type(error).__name__}") from None
        finally:
            self._slots.release()

    async def _follow(self, target: httpx.URL, field: str, count: Count) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._connect(target, field)
            try:
                if not response.is_redirect:
                    return await self._read(response, field, count)
                location = response.headers.get("Location", "")
            finally:
                await response.aclose()
            try:
                joined = str(target.join(location))
            except (httpx.InvalidURL, ValueError):
                raise FetchRefused(f"{field} redirects to what is no URL", field=field) from None
            try:
                target = self._target(joined, field)
            except RequestError as error:
                error.message = error.message.replace(field, f"{field} redirects, and its target", 1)
                raise
        raise FetchRefused(f"{field} redirects more than {MAX_REDIRECTS} times", field=field)

    async def _connect(self, target: httpx.URL, field: str) -> httpx.Response:
        """The response of the first address that can be connected to."""
        host = canonical(target.raw_host.decode("ascii"))
        port = target.port or USUAL_PORTS[target.scheme]
        try:
            addresses = [host] if self._hosts.lists_address(host) else await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise self._failed(field, f"names a host that cannot be resolved: {error}") from None
        if not self._hosts.lists_address(host) and not all(map(is_public, addresses)):
            raise invalid(
                field, "names a host with an address that is not of the public internet", code="media_not_allowed"
            )
        headers = HEADERS | {"Host": target.netloc.decode("ascii")}
        extensions = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), self._timeout)}
        problem = "it has no address"
        for address in addresses:
            at_address = target.copy_with(host=address, fragment=None)
            extra = {"sni_hostname": host} if target.scheme == "https" else {}
            request = httpx.Request("GET", at_address, headers=headers, extensions=extensions | extra)
            try:
                return await self._transport.handle_async_request(request)
            except httpx.ConnectError as error:
                problem = str(error)[:200]
        raise self._failed(field, f"cannot be fetched, no connection to its host: {problem}")

    async def _read(self, response: httpx.Response, field: str, count: Count) -> bytes:
        status = response.status_code
        if status >= 500 or status in FAILING:
            raise self._failed(field, f"cannot be fetched: its host answers with status {status}")
        if status != 200:
            raise FetchRefused(f"{field} cannot be fetched: its host answers with status {status}", field=field)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise self._failed(
                field, "cannot be fetched: its host sent a compressed reply, and an uncompressed one was requested"
            )
        kept = bytearray()
        async for chunk in response.aiter_raw():
            count(len(chunk))
            kept += chunk
        return bytes(kept)

    @staticmethod
    def _failed(field: str, why: str) -> FetchFailed:
        return FetchFailed(f"{field} {why}", field=field, code="media_fetch_failed")
