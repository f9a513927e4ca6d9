"""Images of requests: from the URLs of a body to a prompt with features, and features as vLLM writes them.

`content_parts` names images by URLs; `features` holds their patches, made by another server or by a trainer's own
processor.  Their form is that of vLLM's mm_features and mm_serde (research/wire-more.md, section 1.1).
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request

from tokserve.base.errors import RequestError, Unavailable, invalid, mistyped
from tokserve.features.images.media.cache import NamedImages
from tokserve.features.images.media.images import refuse_images, with_images
from tokserve.features.images.parts import check_count, content_parts
from tokserve.features.images.server_images import ServerImages
from tokserve.features.images.vision import check_image, decode_image, encode_image
from tokserve.protocol.images import KIND, Grid, ImageFormat, ImageUrl
from tokserve.protocol.prompt import Feature, TokenPrompt
from tokserve.server.http.disconnect import CancelOnDisconnect
from tokserve.server.http.workers import off_loop
from tokserve.server.serving import Serving

RAW_VIEW = 3  # extension types of msgpack: a tensor's bytes
PICKLES = (1, 2)
FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32")
PIXELS, GRID = "pixel_values", "image_grid_thw"
MAX_ITEMS = 4096  # of a modality
PLACE = "mm_placeholders.image"


class PlaceOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Where the tokens of an image lie."""

    offset: Annotated[int, Meta(ge=0, lt=1 << 31)]
    length: Annotated[int, Meta(gt=0, lt=1 << 31)]


class FeatureOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The field `features`; maps are by modality."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[PlaceOptions]]
    kwargs_data: dict[str, list[str | None] | None] | None = None
    mm_metadata: Any = None


class RenderedFeatures(msgspec.Struct):
    """`features` of a rendered request."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[dict[str, int]]]
    kwargs_data: dict[str, list[str]] | None


async def fetched(
    serving: Serving, request: Request, ids: Sequence[int], images: Sequence[ImageUrl], field: str
) -> TokenPrompt:
    """The prompt with one placeholder for each image, expanded.  `field`: of the ids, for errors.  Raises RequestError,
    and `ClientDisconnected`."""
    reader = serving.state_of(ServerImages).reader
    if reader is None:
        refuse_images(images)
        raise RequestError("content_parts: this model takes no images", field="content_parts", code="unsupported")
    try:
        async with CancelOnDisconnect(request.receive):
            prepared = await reader.fetch(images, serving.clients.name(request.scope))
    except RequestError as error:
        error.has_final_path = True
        raise
    size = sum(len(image.encoded) for image in prepared)
    return await off_loop(request, size, lambda: with_images(ids, prepared, reader.kind.token_id, field))


async def prompt_with_images(
    serving: Serving, request: Request, parts: Any, features: Any, ids: Sequence[int] | bytes, field: str, salt: str
) -> TokenPrompt:
    """The token route's prompt.  `parts`: its `content_parts`; `features`: its field of this name; one of them is None.
    `salt`: the request's cache_salt: features without data are those of requests with the same."""
    if parts is not None and features is not None:
        raise RequestError("content_parts and features are mutually exclusive", field="content_parts")
    if isinstance(ids, bytes | bytearray):
        if len(ids) % 4:
            raise invalid(field, f"must be int32 values, 4 bytes each, got {len(ids)} bytes")
        ids = np.frombuffer(ids, "<i4").tolist()
    if parts is not None:
        return await fetched(serving, request, ids, content_parts(parts), field)
    images = serving.state_of(ServerImages)
    reader = images.reader
    if reader is None:
        raise RequestError("features: this model takes no images", field="features", code="unsupported")
    cache, kind, limit = images.features, reader.kind, reader.max_images
    size = sum(map(len, _texts(features)))
    return await off_loop(request, size, lambda: read_features(features, ids, kind, cache, salt, limit))


def _texts(features: Any) -> list[str]:
    """The texts in kwargs_data, as far as it has its form."""
    data = features.get("kwargs_data") if isinstance(features, Mapping) else None
    lists = data.values() if isinstance(data, Mapping) else ()
    return [text for texts in lists if isinstance(texts, list) for text in texts if isinstance(text, str)]


def read_features(
    value: Any, ids: Sequence[int], kind: ImageFormat, cache: NamedImages, salt: str, max_images: int
) -> TokenPrompt:
    """The prompt with the images of `features`.  Raises RequestError naming a path in it, Unavailable for data that is
    to be in the cache and is not."""
    try:
        options = msgspec.convert(value, FeatureOptions)
    except msgspec.ValidationError as error:
        raise mistyped(error, "features") from None
    _check_modalities(options)
    names, places = options.mm_hashes.get("image", []), options.mm_placeholders.get("image", [])
    data = (options.kwargs_data or {}).get("image") or [None] * len(names)
    check_count([ImageUrl("", f"features.mm_hashes.image[{i}]") for i in range(len(names))], max_images)
    if not len(names) == len(places) == len(data):
        raise invalid("features.mm_placeholders.image", "and mm_hashes.image and kwargs_data.image differ in length")
    packed = np.asarray(ids, "<i4")
    features = []
    for i, (name, place) in enumerate(zip(names, places, strict=True)):
        _check_place(packed, place, kind, f"features.{PLACE}[{i}]")
        text, field = data[i], f"features.kwargs_data.image[{i}]"
        if text is None:
            image = cache.get((salt, name))
            if image is None:
                raise Unavailable(
                    f"{field} is null, and no image of the name {name[:100]!r} is in the cache: send its data",
                    field=field,
                    code="multimodal_cache_miss",
                )
        else:
            encoded = _image(text, kind, field)
            image = hashlib.sha256(name.encode() + b"\0" + hashlib.sha256(encoded).digest()).digest(), encoded
        feature = Feature(KIND, image[0], place.offset, place.length, image[1])
        check_image(feature, kind, field)
        if text is not None:
            cache.put((salt, name), image)
        features.append(feature)
    order = sorted(range(len(features)), key=lambda i: features[i].start)
    for before, after in pairwise(order):
        if features[before].start + features[before].length > features[after].start:
            raise invalid(f"features.{PLACE}[{after}]", f"overlaps [{before}]")
    return TokenPrompt(packed.tobytes(), tuple(features[i] for i in order))


def _check_modalities(options: FeatureOptions) -> None:
    for name in ("mm_hashes", "mm_placeholders", "kwargs_data"):
        for modality, items in (getattr(options, name) or {}).items():
            path = f"features.{name}.{modality[:50]}"
            if modality != "image":
                raise invalid(path, "is not supported: this server takes images", code="unsupported")
            if len(items or ()) > MAX_ITEMS:
                raise invalid(path, f"must have at most {MAX_ITEMS} entries")
    if options.mm_metadata is not None and not _is_empty(options.mm_metadata):
        raise invalid("features.mm_metadata", "is not supported", code="unsupported")


def _is_empty(value: Any) -> bool:
    """Whether a value holds nothing but nulls."""
    if isinstance(value, Mapping):
        return all(_is_empty(inner) for inner in value.values())
    return value is None or (isinstance(value, list) and all(_is_empty(inner) for inner in value))


def _check_place(ids: NDArray[np.int32], place: PlaceOptions, kind: ImageFormat, field: str) -> None:
    end = place.offset + place.length
    if end > len(ids):
        raise invalid(field, f"must lie in the prompt's {len(ids)} tokens, got positions {place.offset} to {end - 1}")
    run = ids[place.offset : end]
    if (run != kind.token_id).any():
        at = place.offset + int(np.flatnonzero(run != kind.token_id)[0])
        raise invalid(
            field,
            f"must be a run of the placeholder {kind.token_id}, and token_ids[{at}] is {int(ids[at])}",
            code="placeholder_mismatch",
        )


def _image(text: str, kind: ImageFormat, field: str) -> bytes:
    """The encoded image of an entry of kwargs_data."""
    try:
        packed = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise invalid(field, "must be base64") from None
    try:
        item = msgspec.msgpack.decode(packed, ext_hook=_raw_bytes)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise invalid(field, "must be one msgpack map in base64") from None
    except _PickleError:
        raise invalid(
            field, "holds a pickle (extension 1 or 2), which is never loaded: tensors are extension 3", code="pickle"
        ) from None
    if not isinstance(item, dict):
        raise invalid(field, "must be a msgpack map")
    for name in item:
        if name not in (PIXELS, GRID):
            raise invalid(f"{field}.{str(name)[:50]}", f"is unknown; an image has {PIXELS} and {GRID}")
    for name in (PIXELS, GRID):
        if not isinstance(item.get(name), dict) or "data" not in item[name]:
            raise invalid(f"{field}.{name}", "must be a map with data")
    sizes = _integers(item[GRID]["data"], f"{field}.{GRID}")
    return encode_image(_pixels(item[PIXELS]["data"], kind, f"{field}.{PIXELS}"), Grid(*sizes))


class _PickleError(Exception):
    pass


def _raw_bytes(code: int, content: memoryview) -> Any:
    if code in PICKLES:
        raise _PickleError
    return bytes(content) if code == RAW_VIEW else msgspec.msgpack.Ext(code, bytes(content))


def _tensor(value: Any, field: str) -> tuple[str, tuple[int, ...], bytes]:
    """dtype, shape and bytes of a tensor."""
    if not (isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and isinstance(value[2], bytes)):
        raise invalid(field, "must be a tensor: [dtype, shape, extension 3]")
    dtype, shape, content = value
    dtype = dtype.removeprefix("torch.")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
        raise invalid(field, "must have a shape of integers of at least 0")
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int64": 8, "int32": 4}
    if dtype not in sizes:
        raise invalid(field, f"must be of one of the dtypes {', '.join(sizes)}, got {dtype[:50]!r}")
    count = 1
    for size in shape:
        count *= size
    if len(content) != count * sizes[dtype]:
        raise invalid(field, f"must have {count * sizes[dtype]} bytes for its shape {shape}, got {len(content)}")
    return dtype, tuple(shape), content


def _pixels(value: Any, kind: ImageFormat, field: str) -> NDArray[Any]:
    """Patches [n, patch_elements], uint8 or float32."""
    dtype, shape, content = _tensor(value, field)
    if len(shape) != 2 or shape[1] != kind.patch_elements:
        raise invalid(field, f"must have the shape [patches, {kind.patch_elements}], got {list(shape)}")
    if dtype == "uint8":
        return np.frombuffer(content, np.uint8).reshape(shape)
    if dtype not in FLOATS:
        raise invalid(field, f"must be uint8, which is normalized here, or one of {', '.join(FLOATS)}, got {dtype}")
    if dtype == "bfloat16":
        wide = np.frombuffer(content, "<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(shape)
    return np.frombuffer(content, "<f4" if dtype == "float32" else "<f2").astype("<f4").reshape(shape)


def _integers(value: Any, field: str) -> list[int]:
    """Three integers: a tensor [3] or [1, 3], or such a list."""
    listed = value
    if isinstance(value, list) and value and isinstance(value[0], str):
        dtype, _, content = _tensor(value, field)
        if dtype not in INTEGERS:
            raise invalid(field, f"must be int64 or int32, got {dtype}")
        listed = np.frombuffer(content, "<i8" if dtype == "int64" else "<i4").tolist()
    if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], list):
        listed = listed[0]
    if not isinstance(listed, list) or len(listed) != 3 or not all(type(n) is int and 0 <= n < 1 << 20 for n in listed):
        raise invalid(field, "must be the three sizes of a grid")
    return listed


def rendered_features(prompt: TokenPrompt, kind: ImageFormat, *, with_patches: bool) -> RenderedFeatures:
    """The field `features` of a request with this prompt: float32 pixels, normalized; or without them."""
    images = prompt.features
    return RenderedFeatures(
        {"image": [feature.hash.hex() for feature in images]},
        {"image": [{"offset": feature.start, "length": feature.length} for feature in images]},
        {"image": [_item(feature, kind) for feature in images]} if with_patches else None,
    )


def _item(feature: Feature, kind: ImageFormat) -> str:
    patches, grid = decode_image(feature.data, kind)
    sizes = np.array(grid, "<i8")
    item = {
        PIXELS: {
            "data": ["float32", list(patches.shape), msgspec.msgpack.Ext(RAW_VIEW, patches.astype("<f4").tobytes())],
            "field": ["flat", {"keep_on_cpu": False, "slices": [[0, len(patches), None]], "dim": 0}],
        },
        GRID: {
            "data": ["int64", [3], msgspec.msgpack.Ext(RAW_VIEW, sizes.tobytes())],
            "field": ["batched", {"keep_on_cpu": True}],
        },
    }
    return binascii.b2a_base64(msgspec.msgpack.encode(item), newline=False).decode()


def keep(prompt: TokenPrompt, cache: NamedImages, salt: str) -> None:
    """The images of a rendered prompt, so that `features` without data may refer to them."""
    for feature in prompt.features:
        cache.put((salt, feature.hash.hex()), (feature.hash, feature.data))
