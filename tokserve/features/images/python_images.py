"""Images in the Python API: Pillow's, arrays, the bytes of files, and URLs; all become URLs, as in HTTP."""

from __future__ import annotations

import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokserve.base.errors import RequestError, invalid
from tokserve.features.images.parts import CHAT_KINDS
from tokserve.protocol.images import ImageUrl

FORMS = "a Pillow image, a uint8 array [height, width, 3 or 4] or [height, width], the bytes of a file, or a URL"
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
PICTURES = ("image", "image_pil", "image_url", "url")  # fields of a part of a content that may hold one


def read_images(images: Any, uuids: Any) -> tuple[ImageUrl, ...]:
    """The images of vLLM's `multi_modal_data` and `multi_modal_uuids`, {"image": one or several} each.  Raises
    RequestError naming the entry."""
    pictures, names = _of_images(images, "multi_modal_data"), _of_images(uuids, "multi_modal_uuids")
    if names and len(names) != len(pictures):
        raise invalid("multi_modal_uuids.image", f"must have {len(pictures)} entries, one for each image")
    for i, name in enumerate(names):
        if not isinstance(name, str | None):
            raise invalid(f"multi_modal_uuids.image[{i}]", "must be a string or None")
    names = names or [None] * len(pictures)
    fields = (f"multi_modal_data.image[{i}]" for i in range(len(pictures)))
    return tuple(
        ImageUrl(image_url(picture, field), field, name)
        for picture, field, name in zip(pictures, fields, names, strict=True)
    )


def _of_images(value: Any, field: str) -> list[Any]:
    """The entries of the modality "image", the only one."""
    if not isinstance(value, Mapping | None):
        raise invalid(field, "must be a mapping {'image': one or several}")
    for name in value or {}:
        if name != "image":
            raise invalid(f"{field}.{name}", "is not supported: models take images", code="unsupported")
    images = (value or {}).get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def image_url(picture: Any, field: str) -> str:
    """A URL of the picture, which holds it unless it is one already.  Raises RequestError naming `field`."""
    if isinstance(picture, str):
        return picture
    if isinstance(picture, bytes | bytearray):
        return _inline_url(picture)
    if hasattr(picture, "save") and hasattr(picture, "mode"):
        return _inline_url(_png(picture))
    return _inline_url(_png_of_array(picture, field))


def _inline_url(content: bytes | bytearray) -> str:
    return "data:image/png;base64," + binascii.b2a_base64(content, newline=False).decode()


def _png(picture: Any) -> bytes:
    """Encode a Pillow image as it is, without the orientation that its EXIF data has."""
    buffer = io.BytesIO()
    (picture if picture.mode in PNG_MODES else picture.convert("RGB")).save(buffer, "PNG", compress_level=1, exif=b"")
    return buffer.getvalue()


def _png_of_array(picture: Any, field: str) -> bytes:
    from PIL import Image

    try:
        array = np.asarray(picture)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,), (4,)) or not array.size:
        shape = f"{array.dtype} {list(array.shape)}" if array.size > 1 else type(picture).__name__
        raise invalid(field, f"must be {FORMS}, got {shape}")
    return _png(Image.fromarray(np.ascontiguousarray(array)))


def with_urls(messages: Sequence[Any]) -> list[Any]:
    """Messages in which each picture in a part of a content is replaced by its URL.  Raises RequestError."""
    return [_message_with_urls(i, message) for i, message in enumerate(messages)]


def _message_with_urls(index: int, message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = [_part_with_urls(f"messages[{index}].content[{j}]", part) for j, part in enumerate(content)]
    return {**message, "content": parts}


def _part_with_urls(field: str, part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in (*CHAT_KINDS, "image_pil"):
        return part
    names = [name for name in PICTURES if part.get(name) is not None]
    if len(names) != 1:
        raise RequestError(f"{field} must have one of {', '.join(PICTURES)}", field=field)
    value = part[names[0]]
    if isinstance(value, Mapping):  # {"url": ...}, which HTTP has as well
        return part
    rest = {name: inner for name, inner in part.items() if name not in PICTURES}
    return rest | {"type": "image", "image": image_url(value, f"{field}.{names[0]}")}
