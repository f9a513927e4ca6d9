"""A request's images, from their URLs to what stands in its prompt."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokserve.base.errors import RequestError, Unavailable
from tokserve.config import Config
from tokserve.features.images.media.frames import WorkerSettings
from tokserve.features.images.media.pool import ProcessedImage, WorkerPool, digest_of
from tokserve.features.images.media.sources import ImageSources
from tokserve.features.images.parts import ImageSlots, check_count, expand
from tokserve.features.images.vision import encode_image, read_format
from tokserve.protocol.images import KIND, Grid, ImageFormat, ImageUrl
from tokserve.protocol.prompt import Feature, TokenPrompt, unpack_ids

DTYPES = ("|u1", "<f4")


class PreparedImage(NamedTuple):
    """An image as the engine takes it: `encoded` by `vision.encode_image`; `length`: its tokens in a prompt."""

    hash: bytes
    length: int
    encoded: bytes

    def feature(self, start: int) -> Feature:
        """The image as a feature of a prompt, from position `start` on."""
        return Feature(KIND, self.hash, start, self.length, self.encoded)


class ImageReader:
    """Reads and processes the images of requests; `close` ends its threads and processes.  `fetch` images by URLs, or
    take bytes; what is returned is in the order of what was given."""

    def __init__(self, config: Config, kind: ImageFormat) -> None:
        """Raises StartError for options that name no directory or no hosts."""
        media = config.media
        self.kind = kind
        self.max_images = media.max_images()
        self.sources = ImageSources(media)
        settings = WorkerSettings(
            media.max_image_pixels,
            kind.size,
            kind.temporal,
            kind.merge,
            kind.side * kind.size,
            dict(media.mm_processor_kwargs or {}),
        )
        command = [
            sys.executable,
            "-P",
            "-m",
            "tokserve.features.images.media.worker",
            config.model.model,
            msgspec.json.encode(settings).decode(),
        ]
        self.pool = WorkerPool(
            command,
            workers=media.mm_processor_workers,
            seconds=media.mm_processor_timeout,
            cache_bytes=media.mm_processor_cache_bytes,
        )

    def close(self) -> None:
        self.sources.close()
        self.pool.close()

    async def fetch(self, images: Sequence[ImageUrl], client: str = "") -> list[PreparedImage]:
        """Raises RequestError naming the field of an image that cannot be had or taken."""
        check_count(images, self.max_images)
        async with self.sources.opened(images) as contents:
            fields = [image.field for image in images]
            return await self.process(contents, fields, [image.uuid for image in images], client)

    async def process(
        self, contents: Sequence[bytes], fields: Sequence[str], uuids: Sequence[str | None], client: str = ""
    ) -> list[PreparedImage]:
        """The same of the bytes of image files.  `uuids`: the client's names of the images: equal images of different
        names share nothing, and different images never do, whatever their names."""
        loop = asyncio.get_running_loop()

        async def one(content: bytes, field: str, uuid: str | None) -> PreparedImage:
            digest = await loop.run_in_executor(None, digest_of, content)
            image = await self.pool.process(content, digest, field, client)
            name = image.hash if uuid is None else hashlib.sha256(image.hash + uuid.encode()).digest()
            return await loop.run_in_executor(None, partial(self._prepared, image, name))

        tasks = [asyncio.create_task(one(*image)) for image in zip(contents, fields, uuids, strict=True)]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _prepared(self, image: ProcessedImage, name: bytes) -> PreparedImage:
        pixels, grid = (_numpy(image, part) for part in ("pixels", "grid"))
        if pixels.shape[1:] != (self.kind.patch_elements,) or grid.shape != (3,):
            raise Unavailable("the checkpoint's image processor does not fit its config.json", code="media_worker")
        shape = Grid(*map(int, grid))
        return PreparedImage(name, self.kind.num_tokens(shape), encode_image(pixels, shape))


def _numpy(image: ProcessedImage, name: str) -> NDArray[np.generic]:
    array = image.arrays[name]
    return np.frombuffer(array.buffer, array.dtype).reshape(array.shape)


def image_slots(kind: ImageFormat, text_of: Callable[[int], str]) -> ImageSlots:
    """What takes the images of a conversation.  `text_of`: the text of a token."""
    placeholder = text_of(kind.token_id)
    if not kind.side:
        return ImageSlots(placeholder)
    start, end = text_of(kind.start_id), text_of(kind.end_id)
    return ImageSlots(placeholder, start, (f"\n\n{start}", f"{end}\n\n"))  # as Gemma's processor writes it


def with_images(ids: Sequence[int], images: Sequence[PreparedImage], token_id: int, field: str) -> TokenPrompt:
    """The prompt whose ids have one placeholder for each image.  Raises RequestError naming `field`."""
    expanded, places = expand(ids, token_id, [image.length for image in images], field)
    features = tuple(image.feature(place.offset) for image, place in zip(images, places, strict=True))
    return TokenPrompt(expanded.astype("<i4").tobytes(), features)


def refuse_images(images: Sequence[ImageUrl]) -> None:
    """Raise RequestError if there are any: the model reads none."""
    if images:
        raise RequestError(f"{images[0].field}: this model takes no images", field=images[0].field, code="unsupported")


def make_reader(config: Config) -> ImageReader | None:
    """What reads the images of prompts; None: the model takes none.  Raises StartError for a checkpoint or options that
    no image can be read with."""
    kind = read_format(config)
    return None if kind is None else ImageReader(config, kind)


async def read_images(reader: ImageReader | None, prompt: TokenPrompt, images: Sequence[ImageUrl]) -> TokenPrompt:
    """The prompt, whose ids have one placeholder for each image, with the images.  Raises RequestError."""
    if reader is None:
        refuse_images(images)
        return prompt
    return with_images(unpack_ids(prompt.ids), await reader.fetch(images), reader.kind.token_id, "prompts")
