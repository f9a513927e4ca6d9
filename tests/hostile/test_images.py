"""Hostile images and patches: each is refused at once with a 4xx that names a field, without other effects.

The good client's request is `==` before and after, no memory stays, and no worker that was ended is missed.
"""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from PIL import Image

from tests.e2e.server import Server
from tests.hostile.attack import PATIENT
from tests.models.pictures import data_url, png, write_served

GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
PAD, START, END = 288, 290, 291
SAMPLING = {"max_tokens": 4, "temperature": 0.7, "seed": 3, "logprobs": 1, "ignore_eos": True}
GOOD = png(40, 32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write_served(tmp_path_factory.mktemp("vl"))
    flags = ("--max-model-len", "512", "--max-media-memory", "80000", "--allowed-media-domains", "localhost,redirect")
    with Server(directory, *flags) as server:
        yield server


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(width: int, height: int, content: bytes = b"", extra: bytes = b"") -> bytes:
    """A PNG file whose header claims so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def saved(kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(GOOD)).convert("RGB").save(out, kind, **options)
    return out.getvalue()


def mutated(content: bytes, random_: random.Random) -> bytes:
    changed = bytearray(content)
    match random_.randrange(4):
        case 0:
            return bytes(changed[: random_.randrange(len(changed))])
        case 1:
            for _ in range(random_.randrange(1, 30)):
                changed[random_.randrange(len(changed))] = random_.randrange(256)
        case 2:
            at = random_.randrange(len(changed))
            changed[at:at] = random_.randbytes(random_.randrange(1, 200))
        case _:
            at = random_.randrange(8, min(64, len(changed)))  # sizes are there
            changed[at : at + 4] = random_.randbytes(4)
    return bytes(changed)


def files(count: int, seed: int) -> Iterator[bytes]:
    """Hostile image files."""
    deep = zlib.compress(bytes(1 << 24))
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26)))
    yield from (bomb(30_000, 30_000), bomb(1 << 31, 1), bomb(0, 0), bomb(8000, 8000, deep), bomb(40, 32, deep))
    yield from (bomb(40, 32, zlib.compress(bytes(40 * 97)), text), b"", b"\0", b"<svg/>" * 99, b"%!PS-Adobe" * 9)
    kinds = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "ICO", "PCX", "PPM", "TGA")
    originals = [saved(kind) for kind in kinds]
    frames = [Image.new("P", (30, 30), i) for i in range(200)]
    originals.append(saved("GIF", save_all=True, append_images=frames))
    random_ = random.Random(seed)
    for _ in range(count):
        yield mutated(random_.choice(originals), random_)


def by_url(url: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "url": url}]
    return {"token_ids": [5, START, PAD, END, 9], "content_parts": parts, "sampling_params": SAMPLING}


def urls() -> Iterator[Any]:
    yield from ("http://127.0.0.1/x.png", "http://localhost/x.png", "http://[::1]/", "http://0/", "http://2130706433/")
    yield from ("https://169.254.169.254/latest", "http://redirect/x", "http://user@localhost/", "http://localhost:1/")
    yield from ("file:///etc/passwd", "file://localhost/etc/passwd", "ftp://a/b", "gopher://a", "data:", "data:,", "x")
    yield from ("data:image/png;base64,", "data:image/png;base64,!!!", "data:image/png," + "a" * 99, "http://", "http:")
    yield from ("data:image/png;base64," + "A" * (1 << 20), "http://" + "a" * 70_000, 5, None, {"url": "x"}, ["x"], "")
    yield from (
        "HTTP://LOCALHOST/",
        "\thttp://localhost/",
        "http://local\x00host/",
        "//localhost/x",
        "http://ⓛocalhost/",
    )


def features(count: int, seed: int, good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Requests whose features are no image, or not the one of their place."""
    random_ = random.Random(seed)
    packed = base64.b64decode(good["features"]["kwargs_data"]["image"][0])
    for _ in range(count):
        item = base64.b64encode(mutated(packed, random_)).decode()
        yield good | {"features": good["features"] | {"kwargs_data": {"image": [item]}}}
    huge = {"pixel_values": {"data": ["uint8", [1 << 31, 1 << 31], msgspec.msgpack.Ext(3, b"")]}}
    nested = b"\x91" * 100_000 + b"\x90"  # lists in lists
    for content in (msgspec.msgpack.encode(huge), nested, b"\x82" + b"\xa1a" + nested, b"\x05", b""):
        item = base64.b64encode(content).decode()
        yield good | {"features": good["features"] | {"kwargs_data": {"image": [item]}}}
    for name in ("mm_hashes", "mm_placeholders", "kwargs_data"):
        for wrong in ({}, {"image": []}, {"image": [None] * 5000}, {"image": 5}, [], 5, {"x" * 99_999: []}):
            yield good | {"features": good["features"] | {name: wrong}}


def rendered(server: Server) -> dict[str, Any]:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": data_url(GOOD)}}]
    reply = server.post(CHAT + "/render", {"messages": [{"role": "user", "content": content}]}).json()
    return {"token_ids": reply["token_ids"], "features": reply["features"], "sampling_params": SAMPLING}


def attack(server: Server, bodies: Iterator[dict[str, Any]], fields: tuple[str, ...]) -> tuple[int, int]:
    """How many were refused, and how many answered."""

    def one(body: dict[str, Any]) -> int:
        answer = httpx.post(server.url + GENERATE, json=body, timeout=PATIENT)
        assert answer.status_code in (200, 400, 422, 503), answer.text[:500]
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code != 503 or error["code"] in ("multimodal_cache_miss", "media_overload"), error
            assert answer.status_code == 503 or str(error["param"]).startswith(fields), error
        return answer.status_code

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(one, bodies))
    return sum(status != 200 for status in statuses), statuses.count(200)


def resident(server: Server) -> int:
    """Bytes of the server's processes without those that decode."""
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    return sum(
        p.memory_info().rss for p in processes if "tokserve.features.images.media.worker" not in " ".join(p.cmdline())
    )


def storm(server: Server, count: int, seed: int) -> None:
    body = by_url(data_url(GOOD))
    before = server.post(GENERATE, body).json()["choices"]
    memory = resident(server)
    hostile = (by_url(data_url(content)) for content in files(count, seed))
    refused, _ = attack(server, hostile, ("content_parts[0]",))
    assert refused >= 10
    refused, answered = attack(server, (by_url(url) for url in urls()), ("content_parts[0]",))
    assert answered == 0 and refused >= 25
    good = rendered(server)
    refused, _ = attack(server, features(count, seed, good), ("features",))
    assert refused >= count // 4
    assert server.post(GENERATE, body).json()["choices"] == before
    assert resident(server) - memory < 150 << 20


@pytest.mark.slow
def test_hostile_images(server: Server) -> None:
    storm(server, 20, seed=0)


@pytest.mark.slow
def test_the_memory_of_images_in_flight_has_a_limit(server: Server) -> None:
    """--max-media-memory is 80,000 bytes: six for each pixel."""
    large = by_url(data_url(png(128, 112, seed=3)))
    answer = server.post(GENERATE, large)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "media_overload"
    assert int(answer.headers["retry-after"]) >= 1
    fits = by_url(data_url(png(96, 96, seed=4)))
    for _ in range(3):
        assert server.post(GENERATE, fits).status_code == 200


@pytest.mark.slow
def test_a_thousand_hostile_images(server: Server, tmp_path: Path) -> None:
    storm(server, 1000, seed=1)
