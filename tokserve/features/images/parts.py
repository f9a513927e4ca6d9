"""Images as bodies of requests name them, in each of the dialects, and where their tokens lie in a prompt.

An image is named by a URL, which may hold it (`data:`).  Nothing is fetched or decoded here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokserve.base.errors import RequestError, invalid
from tokserve.protocol.images import ImageUrl, Placeholder

CHAT_KINDS = ("image_url", "input_image", "image")  # of parts: in chat, in responses, and in transformers
OTHER_MEDIA = ("audio_url", "input_audio", "video_url", "video", "audio", "image_embeds", "file", "input_file")
CONTENT_PART = ("type", "url", "image_url", "uuid")  # fields of an entry of content_parts
MAX_UUID = 256  # characters


class ImageSlots:
    """The images of a conversation, in order, and the text that stands for each of them.

    `placeholder`: of the token that is repeated.  `written`: what the template writes for an image, if it is another
    text; `around`: what stands before and after the placeholder then.  A text that spells the placeholder, or what the
    template writes, is refused: tokens of an image would stand where there is none.
    """

    def __init__(self, placeholder: str, written: str | None = None, around: tuple[str, str] = ("", "")) -> None:
        self.placeholder = placeholder
        self.written = placeholder if written is None else written
        self._sequence = around[0] + placeholder + around[1]
        self.images: list[ImageUrl] = []

    def check_text(self, field: str, value: Any) -> None:
        """Raise RequestError naming the path of a text in `value` that spells the placeholder."""
        if isinstance(value, str):
            for text in (self.placeholder, self.written):
                if text in value:
                    raise invalid(field, f"must not hold the text {text!r}, which stands for an image")
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                self.check_text(f"{field}.{name}", inner)
                self.check_text(field, name)
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                self.check_text(f"{field}[{i}]", inner)

    def check(self, rendered: str) -> None:
        """Raise RequestError unless the template has written something for each image."""
        count = rendered.count(self.written)
        if count != len(self.images):
            raise RequestError(
                f"messages: the chat template writes {count} of {self.written!r} for {len(self.images)} images",
                field="messages",
                code="placeholder_mismatch",
            )

    def expanded(self, rendered: str) -> str:
        """The text with the placeholders of the images."""
        return rendered.replace(self.written, self._sequence)


class UnreadImage(NamedTuple):
    """A part of a content that is an image, in the words of its route.  `field`: its path; `read`: what reads it."""

    field: str
    part: Mapping[str, Any]
    read: Callable[[str, Mapping[str, Any]], ImageUrl]

    def image(self) -> ImageUrl:
        """Raises RequestError naming a path in `field`."""
        try:
            return self.read(self.field, self.part)
        except RequestError as error:
            error.has_final_path = True
            raise

    def refusal(self, rule: str = "this model takes no images") -> RequestError:
        error = invalid(f"{self.field}.type", f"is {self.part['type']!r}: {rule}", code="unsupported")
        error.has_final_path = True
        return error


def chat_part(field: str, part: Mapping[str, Any]) -> ImageUrl:
    """The image of a part of one of `CHAT_KINDS`: {"type": "image_url", "image_url": {"url": ...}} and its like.
    Raises RequestError naming a path in `field`."""
    kind = part["type"]
    names = ("image_url",) if kind in ("image_url", "input_image") else ("image", "url", "image_url")
    name = next((name for name in names if part.get(name) is not None), names[0])
    if part.get("file_id") is not None:
        raise invalid(f"{field}.file_id", "is not supported: this server stores no files", code="unsupported")
    value, path = part.get(name), f"{field}.{name}"
    if isinstance(value, Mapping):
        value, path = value.get("url"), f"{path}.url"
    return ImageUrl(_url(path, value), path, _uuid(f"{field}.uuid", part.get("uuid")))


def anthropic_block(field: str, block: Mapping[str, Any]) -> ImageUrl:
    """The image of an Anthropic block: {"type": "image", "source": {"type": "base64" or "url", ...}}.  Raises
    RequestError naming a path in `field`."""
    source = block.get("source")
    if not isinstance(source, Mapping):
        raise invalid(f"{field}.source", "must be an object" if "source" in block else "is required")
    match source.get("type"):
        case "base64":
            media_type = _string(f"{field}.source.media_type", source.get("media_type"))
            if not media_type.startswith("image/") or len(media_type) > 64 or set(media_type) & set(";, "):
                raise invalid(f"{field}.source.media_type", "must be image/jpeg, image/png, image/gif or image/webp")
            path = f"{field}.source.data"
            return ImageUrl(f"data:{media_type};base64,{_string(path, source.get('data'))}", path)
        case "url":
            path = f"{field}.source.url"
            return ImageUrl(_url(path, source.get("url")), path)
        case "file":
            raise invalid(f"{field}.source.type", "is 'file': this server stores no files", code="unsupported")
        case None:
            raise invalid(f"{field}.source.type", "is required")
        case kind:
            raise invalid(f"{field}.source.type", f"must be base64 or url, got {str(kind)[:100]!r}")


def content_parts(value: Any) -> list[ImageUrl]:
    """The images of the token route's `content_parts`: [{"type": "image_url", "url": ..., "uuid": ...}, ...].  The URL
    may also be in `image_url`, as in chat.  Raises RequestError naming a path in `content_parts`."""
    if not isinstance(value, list):
        raise invalid("content_parts", "must be a list of objects")
    return [_content_part(f"content_parts[{i}]", part) for i, part in enumerate(value)]


def _content_part(field: str, part: Any) -> ImageUrl:
    if not isinstance(part, Mapping):
        raise invalid(field, "must be an object")
    kind = part.get("type")
    if kind is None:
        raise invalid(f"{field}.type", "is required")
    if kind != "image_url":
        code = "unsupported" if kind in OTHER_MEDIA else None
        raise invalid(f"{field}.type", f"must be 'image_url', got {str(kind)[:100]!r}", code=code)
    for name in part:
        if name not in CONTENT_PART:
            path = f"{field}.{str(name)[:100]}"
            raise RequestError(f"unknown field {path!r}", field=path, code="unknown_field")
    if part.get("url") is not None and part.get("image_url") is not None:
        raise invalid(f"{field}.image_url", "and url exclude each other")
    if part.get("url") is None and "image_url" in part:
        return chat_part(field, part)
    path = f"{field}.url"
    return ImageUrl(_url(path, part.get("url")), path, _uuid(f"{field}.uuid", part.get("uuid")))


def check_count(images: Sequence[ImageUrl], limit: int) -> None:
    """Raise RequestError naming the first image that is one too many."""
    if len(images) > limit:
        raise RequestError(  # vLLM's words, which clients may look for
            f"At most {limit} image(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase this "
            "limit.",
            field=images[limit].field,
            code="too_many_images",
        )


def expand(
    ids: Sequence[int] | NDArray[np.int32], token_id: int, lengths: Sequence[int], field: str
) -> tuple[NDArray[np.int32], list[Placeholder]]:
    """The prompt with the k-th `token_id` repeated `lengths[k]` times, and where these runs lie.  Raises RequestError
    naming `field`, that of the ids, unless each image has one placeholder."""
    packed = np.asarray(ids, np.int32)
    is_placeholder = packed == token_id
    check_placeholders(int(is_placeholder.sum()), len(lengths), token_id, field)
    repeats = np.ones(len(packed), np.int64)
    repeats[is_placeholder] = lengths
    offsets = (np.cumsum(repeats) - repeats)[is_placeholder]
    return np.repeat(packed, repeats), [Placeholder(int(at), n) for at, n in zip(offsets, lengths, strict=True)]


def check_placeholders(count: int, images: int, token_id: int, field: str) -> None:
    """Raise RequestError naming `field` unless there are as many placeholders as images."""
    if count != images:
        raise invalid(
            field,
            f"must hold one placeholder (token id {token_id}) for each image, not a run of them: there are "
            f"{count} for {images} {'image' if images == 1 else 'images'}",
            code="placeholder_mismatch",
        )


def _url(field: str, value: Any) -> str:
    url = _string(field, value)
    if not url:
        raise invalid(field, "must not be empty")
    return url


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(field, "is required" if value is None else "must be a string")
    return value


def _uuid(field: str, value: Any) -> str | None:
    if value is None:
        return None
    uuid = _string(field, value)
    if not 0 < len(uuid) <= MAX_UUID:
        raise invalid(field, f"must have 1 to {MAX_UUID} characters")
    return uuid
