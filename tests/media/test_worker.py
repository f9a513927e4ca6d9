"""Image files to patches, in a worker process, as transformers' processor makes them; and files that are none."""

from __future__ import annotations

import asyncio
import io
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.models.pictures import data_url
from tests.tiny_models import tiny_vision_config
from tokserve import checkpoint
from tokserve.base.errors import RequestError
from tokserve.config import Config
from tokserve.features.images.media.images import ImageReader, PreparedImage
from tokserve.features.images.vision import decode_image, image_format
from tokserve.protocol.images import Grid, ImageUrl, image_grid

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "size": {"shortest_edge": 256, "longest_edge": 16384},
}


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, len(mode)), np.uint8)
    return Image.fromarray(pixels if len(mode) > 1 else pixels[..., 0], mode)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageReader]:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(tiny_vision_config("qwen3_vl")))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    kind = image_format(directory, checkpoint.hf_config(directory))
    assert kind is not None
    reader = ImageReader(Config.make(model=str(directory), max_image_pixels=1 << 20), kind)
    yield reader
    reader.close()


def read(reader: ImageReader, *contents: bytes, uuid: str | None = None) -> list[PreparedImage]:
    urls = [ImageUrl(data_url(content), f"content_parts[{i}].url", uuid) for i, content in enumerate(contents)]
    return asyncio.run(reader.fetch(urls))


def test_patches_are_those_of_transformers(reader: ImageReader) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    exact = Qwen2VLImageProcessorPil(**{name: value for name, value in PROCESSOR.items() if name[:7] != "image_p"})
    sizes = [(40, 32), (17, 90), (200, 150), (16, 16), (33, 65)]
    images = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    for image, prepared in zip(images, read(reader, *map(file_of, images)), strict=True):
        expected = exact(images=[image], return_tensors="np")
        patches, grid = decode_image(prepared.encoded, reader.kind)
        assert grid == Grid(*expected["image_grid_thw"][0].tolist()) == image_grid(prepared.encoded)
        assert prepared.length == grid.h * grid.w // 4
        np.testing.assert_allclose(patches, expected["pixel_values"], atol=1e-6)


@pytest.mark.slow
def test_an_image_may_take_so_much_time_of_a_processor(reader: ImageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    content = file_of(picture(1000, 1000))
    monkeypatch.setattr(reader.pool, "_seconds", 0.001)
    with pytest.raises(RequestError, match=r"takes more than 0\.001 s to decode") as caught:
        read(reader, content)
    assert caught.value.status == 400
    monkeypatch.undo()
    assert len(read(reader, content)) == 1


def test_the_worker_has_one_thread(reader: ImageReader) -> None:
    read(reader, file_of(picture(40, 32)))
    (pid,) = reader.pool.pids
    assert len(os.listdir(f"/proc/{pid}/task")) == 1


def test_modes_and_orientation(reader: ImageReader) -> None:
    gray, rgb = picture(40, 32, "L"), picture(40, 32)
    clear = Image.merge("RGBA", (*rgb.split(), Image.new("L", rgb.size, 0)))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be rotated by 90 degrees
    prepared = read(
        reader,
        file_of(gray),
        file_of(gray.convert("RGB")),
        file_of(clear),
        file_of(Image.new("RGB", rgb.size, "white")),
        file_of(rgb.transpose(Image.Transpose.ROTATE_90), exif=turned),
        file_of(rgb),
        file_of(rgb.convert("P"), "GIF"),
    )
    encoded = [image.encoded for image in prepared]
    assert encoded[0] == encoded[1] and encoded[2] == encoded[3] and encoded[4] == encoded[5] != encoded[6]


def test_hashes_are_of_bytes_or_are_sent_by_the_client(reader: ImageReader) -> None:
    one, other = file_of(picture(40, 32)), file_of(picture(40, 32, seed=1))
    first, again, second = read(reader, one, one, other)
    assert first == again and first.hash != second.hash
    names = {image.hash for uuid in ("mine", "yours") for image in read(reader, one, other, uuid=uuid)}
    assert len(names | {first.hash, second.hash}) == 6
    assert read(reader, one, uuid="mine")[0].hash in names


def _png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "words", "code"),
    [
        (b"GIF89a", "must be an image", "image_unreadable"),
        (b"hello", "must be an image", "image_unreadable"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be an image", "image_unreadable"),
        (b"%PDF-1.4", "must be an image", "image_unreadable"),
        (b"%!PS-Adobe-3.0 EPSF", "must be an image", "image_unreadable"),
        (_png_header(30000, 30000), "--max-image-pixels", "image_too_large"),
        (_png_header(900, 1000), "cannot be decoded", "image_unreadable"),
        (_png_header(2000, 1), "ratio", "image_unreadable"),
        (file_of(picture(40, 32))[:300], "cannot be decoded", "image_unreadable"),
    ],
)
def test_files_that_are_no_images_are_refused(reader: ImageReader, content: bytes, words: str, code: str) -> None:
    good, lost = file_of(picture(40, 32)), reader.pool.num_lost
    with pytest.raises(RequestError, match=words) as caught:
        read(reader, good, content)
    assert (caught.value.field, caught.value.code, caught.value.status) == ("content_parts[1].url", code, 400)
    assert reader.pool.num_lost == lost and read(reader, good)  # the worker lives


def test_more_images_than_a_prompt_may_have(tmp_path: Path, reader: ImageReader) -> None:
    few = ImageReader(Config.make(model="demo", limit_mm_per_prompt={"image": 1}), reader.kind)
    try:
        with pytest.raises(RequestError, match=r"At most 1 image\(s\)") as caught:
            read(few, b"x", b"y")
        assert caught.value.field == "content_parts[1].url" and not few.pool.pids
    finally:
        few.close()
