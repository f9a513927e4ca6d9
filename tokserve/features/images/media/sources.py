"""The bytes of a request's images, from data: URLs, from http URLs of allowed hosts, or from files in one directory.

Nothing here looks at what the bytes are.  Decoding and reading happen in threads, fetching in a loop of its own, so
that the event loop of the server only waits; all of it is bounded, by request and for all requests together.
"""

from __future__ import annotations

import asyncio
import binascii
import os
import stat
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tokserve.base.errors import Overloaded, StartError, invalid
from tokserve.config import MediaConfig
from tokserve.features.images.media.hosts import USUAL_PORTS, AllowedHosts
from tokserve.protocol.images import ImageUrl

if TYPE_CHECKING:
    from tokserve.features.images.media.fetch import Fetcher

THREADS = 2
PIECE = 1 << 18  # characters of base64 that are decoded without a pause, a multiple of 4
SCHEME_CHARS, HEAD_CHARS = 16, 256  # limits of a URL's scheme, and of what stands before the comma of a data: URL
MAX_URL = 16 << 10  # characters of a URL that does not hold the image itself
FETCHES_OF_REQUEST = 4  # at once
REQUESTS_IN_MEMORY = 4  # requests with as many bytes of images as one may have are in memory at once


class ByteCount:
    """Bytes in use, within a limit.  Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used

    def add(self, size: int) -> bool:
        """Add `size`, unless that would exceed the limit: returns whether it has been added."""
        with self._lock:
            if self._used + size > self.limit:
                return False
            self._used += size
            return True

    def subtract(self, size: int) -> None:
        with self._lock:
            self._used -= size


class RequestBytes:
    """Bytes of the images of a request, within its limit and that of all requests.  Thread-safe."""

    def __init__(self, config: MediaConfig, everything: ByteCount) -> None:
        self.per_image = config.max_image_bytes
        self._count = ByteCount(config.max_media_bytes)
        self._everything = everything
        self._lock = threading.Lock()
        self._closed = False

    def add(self, size: int, field: str) -> None:
        """Count bytes of the image that `field` names.  Raises RequestError."""
        with self._lock:
            if self._closed or not self._everything.add(size):  # closed: of a thread that still reads
                raise Overloaded("too many images are in memory", retry_after=1, code="media_overload")
            if not self._count.add(size):
                self._everything.subtract(size)
                raise invalid(
                    field,
                    f"makes the request's images too large: together they may have {self._count.limit} bytes "
                    "(--max-media-bytes)",
                    code="image_too_large",
                )

    def close(self) -> None:
        """The images are not in memory any more; nothing is counted from here on."""
        with self._lock:
            self._closed = True
            self._everything.subtract(self._count.used)


class ImageBytes:
    """Bytes of one image: `count(size)` raises RequestError where they exceed its limit, or that of its request."""

    def __init__(self, field: str, request: RequestBytes) -> None:
        self.field = field
        self._request = request
        self._size = 0

    def check(self, size: int) -> None:
        """Raise RequestError if an image may not have `size` bytes."""
        if size > self._request.per_image:
            raise invalid(
                self.field,
                f"must be an image of at most {self._request.per_image} bytes (--max-image-bytes)",
                code="image_too_large",
            )

    def count(self, size: int) -> None:
        self._size += size
        self.check(self._size)
        self._request.add(size, self.field)


class ImageSources:
    """Reads images; `close` ends its threads."""

    def __init__(self, config: MediaConfig) -> None:
        """Raises StartError for options that name no directory or no hosts."""
        self._config = config
        self._hosts = AllowedHosts(config.allowed_media_domains or ())
        self._root = None if config.allowed_local_media_path is None else _directory(config.allowed_local_media_path)
        self._threads = ThreadPoolExecutor(THREADS, "tokserve-media")
        self._memory = ByteCount(REQUESTS_IN_MEMORY * config.max_media_bytes)
        self._fetcher = _fetcher(self._hosts, config.media_fetch_timeout) if self._hosts else None

    @asynccontextmanager
    async def opened(self, images: Sequence[ImageUrl]) -> AsyncIterator[list[bytes]]:
        """The bytes of the images, which count as in memory until the end of the block.  Raises RequestError naming the
        field of the image at fault.  Cancelling stops what is being fetched."""
        request = RequestBytes(self._config, self._memory)
        at_once = asyncio.Semaphore(FETCHES_OF_REQUEST)
        tasks = [asyncio.create_task(self._read(image, request, at_once)) for image in images]
        try:
            yield [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            request.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._fetcher is not None:
            self._fetcher.close()

    async def _read(self, image: ImageUrl, request: RequestBytes, at_once: asyncio.Semaphore) -> bytes:
        url, field, _ = image
        scheme = url[:SCHEME_CHARS].partition(":")[0].lower()
        size = ImageBytes(field, request)
        loop = asyncio.get_running_loop()
        if scheme == "data":
            return await loop.run_in_executor(self._threads, decode_inline, url, size)
        if len(url) > MAX_URL:
            raise invalid(field, f"must have at most {MAX_URL} characters, but for a data: URL")
        if scheme == "file":
            return await loop.run_in_executor(self._threads, self._read_file, url, size)
        if scheme not in USUAL_PORTS or url[len(scheme) :][:3] != "://":
            raise invalid(field, "must be an http, https, data or file URL")
        if self._fetcher is None:
            raise invalid(
                field,
                "must be a data: URL: this server fetches no images (--allowed-media-domains)",
                code="media_not_allowed",
            )
        async with at_once:
            return await self._fetcher.fetch(url, field, size.count)

    def _read_file(self, url: str, size: ImageBytes) -> bytes:
        field = size.field
        outside = invalid(
            field, "must name a file in the directory of --allowed-local-media-path", code="media_not_allowed"
        )
        try:
            parts = urlsplit(url)
        except ValueError:
            raise outside from None
        path = unquote(parts.path, errors="surrogateescape")
        if self._root is None or parts.netloc not in ("", "localhost") or "\0" in path or not path.startswith("/"):
            raise outside
        if not Path(os.path.normpath(path)).is_relative_to(self._root):  # without a look at the disk
            raise outside
        try:
            resolved = Path(path).resolve(strict=True)
            if not resolved.is_relative_to(self._root):
                raise outside
            return _read_beneath(self._root, resolved.relative_to(self._root), size)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "too many links"
            raise invalid(field, f"cannot be read: {reason}") from None


def _fetcher(hosts: AllowedHosts, timeout: float) -> Fetcher:
    from tokserve.features.images.media.fetch import Fetcher  # an HTTP client, which takes a while to import

    return Fetcher(hosts, timeout)


def _directory(path: str) -> Path:
    try:
        resolved = Path(path).expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise StartError(f"option allowed_local_media_path: {path!r} cannot be opened: {error}") from None
    if not resolved.is_dir():
        raise StartError(f"option allowed_local_media_path: {path!r} is not a directory")
    return resolved


def _read_beneath(root: Path, relative: Path, size: ImageBytes) -> bytes:
    """The file's bytes.  No part of `relative` may be a link: what it names cannot change on the way."""
    *directories, name = relative.parts or ("",)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    opened = [os.open(root, flags | os.O_DIRECTORY)]
    try:
        for part in directories:
            opened.append(os.open(part, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
        opened.append(os.open(name, flags | os.O_NONBLOCK, dir_fd=opened[-1]))  # a pipe without a writer would wait
        if not stat.S_ISREG((about := os.fstat(opened[-1])).st_mode):
            raise invalid(size.field, "must name a file")
        size.check(about.st_size)
        kept = bytearray()
        while piece := os.read(opened[-1], 1 << 20):
            size.count(len(piece))
            kept += piece
        return bytes(kept)
    finally:
        for descriptor in opened:
            with suppress(OSError):
                os.close(descriptor)


def decode_inline(url: str, size: ImageBytes) -> bytes:
    """The bytes of a data: URL in base64 (RFC 2397), `data:TYPE;base64,...`; the type is not looked at.  Raises
    RequestError naming the field.  Other threads run between pieces of it."""
    field = size.field
    comma = url.find(",", 0, HEAD_CHARS)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise invalid(field, "must be data:TYPE;base64,... with the image in base64")
    start, chars = comma + 1, len(url) - comma - 1
    if not chars or chars % 4:
        raise invalid(field, "does not hold base64: its length must be a multiple of 4, and not 0")
    size.check(chars // 4 * 3 - 2)
    kept = bytearray()
    for at in range(start, len(url), PIECE):
        text = url[at : at + PIECE]
        try:
            piece = binascii.a2b_base64(text, strict_mode=True)
        except ValueError as error:
            raise invalid(field, f"does not hold base64: {str(error)[0].lower()}{str(error)[1:]}") from None
        if at + PIECE < len(url) and len(piece) * 4 != PIECE * 3:
            raise invalid(field, "does not hold base64: padding before its end")
        size.count(len(piece))
        kept += piece
    return bytes(kept)
