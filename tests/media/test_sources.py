"""Images from data: URLs and from files."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path

import pytest

from tokserve.base.errors import Overloaded, RequestError, StartError
from tokserve.config import MediaConfig
from tokserve.features.images.media.sources import PIECE, ImageSources
from tokserve.protocol.images import ImageUrl

FIELD = "messages[0].content[1].image_url.url"


def read(config: MediaConfig, *urls: str) -> list[bytes]:
    sources = ImageSources(config)

    async def run() -> list[bytes]:
        async with sources.opened([ImageUrl(url, FIELD) for url in urls]) as images:
            assert sources._memory.used == sum(map(len, images))
            return images

    try:
        return asyncio.run(run())
    finally:
        assert sources._memory.used == 0
        sources.close()


def refusal(config: MediaConfig, *urls: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(config, *urls)
    assert caught.value.field == FIELD and FIELD in caught.value.message
    return caught.value


def data_url(content: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(content).decode()


@pytest.mark.parametrize("size", [1, 2, 3, PIECE, 3 * PIECE // 4, 3 * PIECE // 4 + 1, 2 * PIECE + 17])
def test_a_data_url_is_its_bytes(size: int) -> None:
    content = os.urandom(size)
    assert read(MediaConfig(), data_url(content)) == [content]


def test_only_base64_is_read_from_the_head_of_a_data_url() -> None:
    for head in ("data:image/jpeg;charset=x;base64,", "DATA:;BASE64,", "data:text/plain;base64,"):
        assert read(MediaConfig(), data_url(b"abc", head)) == [b"abc"]


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,abcd",
        "data:image/png;base64",
        "data:",
        "data:image/png;base64,",
        "data:;base64,abc",
        "data:;base64,ab=c",
        "data:;base64,abc\n",
        "data:;base64,****",
        "data:;base64,YWJjéYWI",
        "data:;base64,====",
        "data:" + "x" * 300 + ";base64,YWJj",
        "data:;base64,YQ==" + "YQ==" * PIECE,
    ],
)
def test_a_broken_data_url_is_refused(url: str) -> None:
    assert refusal(MediaConfig(), url).status == 400


@pytest.mark.parametrize(
    "url", ["", "picture.png", "/etc/passwd", "ftp://example.com/a", "javascript:1", "http:/x", "gopher://x", "HTTP//x"]
)
def test_other_urls_are_refused(url: str) -> None:
    assert "http, https, data or file URL" in refusal(MediaConfig(), url).message


def test_without_allowed_domains_nothing_is_fetched() -> None:
    error = refusal(MediaConfig(), "https://example.com/a.png")
    assert error.code == "media_not_allowed" and "--allowed-media-domains" in error.message


def test_limits_of_an_image_and_of_a_request() -> None:
    config = MediaConfig(max_image_bytes=100, max_media_bytes=150)
    assert read(config, data_url(bytes(100)), data_url(bytes(50))) == [bytes(100), bytes(50)]
    assert "--max-image-bytes" in refusal(config, data_url(bytes(101))).message
    assert "--max-image-bytes" in refusal(config, data_url(bytes(1 << 20))).message
    assert "--max-media-bytes" in refusal(config, data_url(bytes(100)), data_url(bytes(51))).message


def test_images_of_all_requests_have_a_limit_together() -> None:
    sources = ImageSources(MediaConfig(max_media_bytes=100))

    async def run() -> int:
        async with sources.opened([ImageUrl(data_url(bytes(100)), FIELD)]):
            if sources._memory.used == 400:
                with pytest.raises(Overloaded) as caught:
                    await run()
                assert caught.value.code == "media_overload"
                return 4
            return await run()

    try:
        assert asyncio.run(run()) == 4 and sources._memory.used == 0
    finally:
        sources.close()


def test_files_are_read_in_their_directory_only(tmp_path: Path) -> None:
    root = tmp_path / "media"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "a b.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "x").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    (root / "inside").symlink_to(root / "inner" / "a b.png")
    os.mkfifo(root / "pipe")
    config = MediaConfig(allowed_local_media_path=str(root))
    assert read(config, f"file://{root}/inner/a%20b.png", f"file://localhost{root}/inside") == [b"picture"] * 2
    for name in ("/../secret", "/%2e%2e/secret", "/link", "/up/secret", "/up/media2/x", "2/x", "/../media2/x"):
        error = refusal(config, f"file://{root}{name}")
        assert error.code == "media_not_allowed" and "secret" not in error.message
    for url in ("file:///etc/passwd", "file://host" + str(root), "file:relative", f"file://{root}/%00", "file://[/x"):
        assert refusal(config, url).code == "media_not_allowed"
    for name in ("/pipe", "/inner", "/absent", ""):
        assert refusal(config, f"file://{root}{name}").status == 400
    assert (
        "--max-image-bytes"
        in refusal(MediaConfig(allowed_local_media_path=str(root), max_image_bytes=3), f"file://{root}/inside").message
    )


@pytest.mark.parametrize("name", ["link", "up/secret"])
def test_a_file_that_becomes_a_link_once_it_was_looked_at_is_not_followed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: path)  # as it was before the change
    error = refusal(MediaConfig(allowed_local_media_path=str(root)), f"file://{root}/{name}")
    assert error.status == 400 and "cannot be read" in error.message


def test_without_a_directory_no_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    assert refusal(MediaConfig(), f"file://{tmp_path}/x").code == "media_not_allowed"
    for path in (tmp_path / "absent", tmp_path / "x"):
        with pytest.raises(StartError, match="allowed_local_media_path"):
            ImageSources(MediaConfig(allowed_local_media_path=str(path)))


def test_the_limit_of_images_is_read_in_both_forms() -> None:
    assert MediaConfig().max_images() == 999
    assert MediaConfig(limit_mm_per_prompt={"image": 2, "video": 0}).max_images() == 2
    assert MediaConfig(limit_mm_per_prompt={"image": {"count": 3, "width": 9}}).max_images() == 3
    assert MediaConfig(limit_mm_per_prompt={"audio": 1}).max_images() == 999
    for wrong in ({"image": -1}, {"image": "2"}, {"image": True}, {"picture": 1}, {"image": {"count": None}}):
        with pytest.raises(StartError, match="limit_mm_per_prompt"):
            MediaConfig(limit_mm_per_prompt=wrong).max_images()
