"""Options of images in requests: where they may come from, how large they may be, and how they are decoded."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from tokserve.base.errors import StartError
from tokserve.config.common import FOR_EVER, NotNegative, Positive, about

MODALITIES = ("image", "audio", "video")  # that other servers limit; here only the first has any
DEFAULT_IMAGES = 999  # of a prompt


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images in requests (docs/images.md)."""

    allowed_media_domains: Annotated[
        list[str] | None,
        about(
            "Hosts that http and https URLs of images may name (HOST, or HOST:PORT for a port other than 80 and 443; "
            "several, or repeatable). Names that resolve to private addresses are refused, even then. Default: none: "
            "images come as data: URLs.",
            extra={"several": True},
        ),
    ] = None
    allowed_local_media_path: Annotated[
        str | None, about("Directory whose files file: URLs of images may name. Default: none.")
    ] = None
    media_fetch_timeout: Annotated[
        float, about("Seconds that the image of an http URL may take to arrive.", gt=0, le=FOR_EVER)
    ] = 5.0
    limit_mm_per_prompt: Annotated[
        dict[str, Any] | None,
        about('JSON object {"image": N}: most images of a prompt. Default: 999.'),
    ] = None
    max_image_bytes: Annotated[
        Positive, about("Most bytes of an image as it is sent or fetched (suffixes K, M, G are understood).")
    ] = 32 << 20
    max_image_pixels: Annotated[
        Positive, about("Most pixels of an image, width times height, as its header says; checked before decoding.")
    ] = 64 << 20
    max_media_bytes: Annotated[Positive, about("Most bytes of all images of a request, as sent or fetched.")] = (
        128 << 20
    )
    max_media_memory: Annotated[
        Positive,
        about(
            "Memory for the patches of the images of requests that have not ended, in each API server process; more "
            "are 503."
        ),
    ] = 2 << 30
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        about('JSON object of arguments of the checkpoint\'s image processor, as {"max_pixels": 1000000}.'),
    ] = None
    mm_processor_workers: Annotated[
        int, about("Processes that decode, resize and cut up images; they start with the first image.", ge=1, le=64)
    ] = 1
    mm_processor_timeout: Annotated[
        float,
        about(
            "Seconds of a processor that decoding an image may take; its process is replaced then.", gt=0, le=FOR_EVER
        ),
    ] = 10.0
    mm_processor_cache_bytes: Annotated[
        NotNegative, about("Memory for processed images that may come again; 0: none are kept.")
    ] = 256 << 20
    mm_encoder_cache_bytes: Annotated[
        NotNegative, about("Memory for the embeddings of images that may come again, in each engine; 0: none are kept.")
    ] = 512 << 20
    language_model_only: Annotated[
        bool, about("Load a model that reads images without its vision tower, and refuse images.")
    ] = False

    def max_images(self) -> int:
        """Most images of a prompt.  Raises StartError for a limit that is no number."""
        for name, limit in (self.limit_mm_per_prompt or {}).items():
            if name not in MODALITIES:
                known = ", ".join(MODALITIES)
                raise StartError(f"option limit_mm_per_prompt: unknown key {name!r}; keys are {known}")
            count = limit.get("count", DEFAULT_IMAGES) if isinstance(limit, dict) else limit
            if type(count) is not int or count < 0:
                raise StartError(f"option limit_mm_per_prompt: {name} must be an integer of at least 0, got {limit!r}")
        limit = (self.limit_mm_per_prompt or {}).get("image", DEFAULT_IMAGES)
        count = limit.get("count", DEFAULT_IMAGES) if isinstance(limit, dict) else limit
        return int(count)
