"""Images as a checkpoint's vision tower takes them: patches, the ids of placeholders, positions along three axes.

The server and the engine read the same `ImageFormat` from the checkpoint, and images travel between them as the data
of a feature of kind `KIND`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokserve import checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.checkpoint import read_json
from tokserve.config import Config
from tokserve.protocol.images import HEADER, Grid, ImageFormat
from tokserve.protocol.prompt import Feature

DTYPES = (np.dtype("|u1"), np.dtype("<f4"))
Int64 = NDArray[np.int64]
# what the processors in transformers take where preprocessor_config.json says nothing
GEMMAS = {"image_mean": (0.5,), "image_std": (0.5,)}
QWENS = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
GEMMA = "Gemma3ForConditionalGeneration"


def image_format(directory: Path, hf: Mapping[str, Any]) -> ImageFormat | None:
    """Read the format from config.json (`hf`, as `checkpoint.hf_config` returns it) and preprocessor_config.json; None:
    the model takes no images.  Raises StartError for attributes of a wrong kind."""
    vision = hf.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    processor = processor_config(directory)
    if GEMMA in hf.get("architectures", ()):
        return _gemma_format(hf, vision, processor)
    if not isinstance(hf.get("image_token_id"), int):
        return None
    channels = _integer(vision, "vision_config.in_channels", vision.get("in_channels", vision.get("in_chans", 3)))
    return ImageFormat(
        token_id=_integer(hf, "image_token_id"),
        start_id=_integer(hf, "vision_start_token_id", minimum=0),
        end_id=_integer(hf, "vision_end_token_id", minimum=0),
        size=_integer(vision, "vision_config.patch_size"),
        temporal=_integer(vision, "vision_config.temporal_patch_size", vision.get("temporal_patch_size", 2)),
        merge=_integer(vision, "vision_config.spatial_merge_size", vision.get("spatial_merge_size", 2)),
        channels=channels,
        **_normalization(processor, channels, QWENS),
    )


def read_format(config: Config) -> ImageFormat | None:
    """What an image is to the model of these options; None: it takes no images.  Raises StartError."""
    directory = Path(config.model.model)
    return image_format(directory, checkpoint.hf_config(directory) | (config.model.hf_overrides or {}))


def processor_config(directory: Path) -> dict[str, Any]:
    """The options of the checkpoint's image processor; empty if there is none."""
    processor = read_json(directory, "preprocessor_config.json")
    if processor:
        return processor
    inner = (read_json(directory, "processor_config.json") or {}).get("image_processor")  # as transformers 5 saves it
    return inner if isinstance(inner, dict) else {}


def _gemma_format(hf: Mapping[str, Any], vision: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageFormat:
    """Gemma 3's: images of one size, with one number of tokens."""

    def token(name: str, absent: int) -> int:
        either = hf.get(f"{name}_token_index", hf.get(f"{name}_token_id"))
        return _integer({}, f"{name}_token_index", absent if either is None else either, minimum=0)

    if processor.get("do_pan_and_scan"):
        raise StartError("the model's image processor: do_pan_and_scan (crops beside an image) is not supported")
    channels = _integer(vision, "vision_config.num_channels", vision.get("num_channels", 3))
    pixels = _integer(vision, "vision_config.image_size", vision.get("image_size", 224))
    size = _integer(vision, "vision_config.patch_size", vision.get("patch_size", 16))
    size_field = processor.get("size") or {"height": pixels, "width": pixels}
    if size_field != {"height": pixels, "width": pixels}:
        raise StartError(
            f"the model's image processor: size must be {pixels} by {pixels} as image_size, found {size_field!r}"
        )
    across = isqrt(_integer(hf, "mm_tokens_per_image", hf.get("mm_tokens_per_image", 256)))
    side = pixels // size
    return ImageFormat(
        token_id=token("image", 262144),
        start_id=token("boi", 255999),
        end_id=token("eoi", 256000),
        size=size,
        temporal=1,
        merge=side // across,
        channels=channels,
        **_normalization(processor, channels, GEMMAS),
        axes=False,
        side=side,
        bidirectional=True,
    )


def _normalization(
    processor: Mapping[str, Any], channels: int, absent: Mapping[str, tuple[float, ...]]
) -> dict[str, Any]:
    """`mean`, `std` and `rescale` of an image processor.  `absent`: what it takes without `image_mean`, `image_std`."""
    normalizes, rescales = (processor.get(name, True) is not False for name in ("do_normalize", "do_rescale"))
    return {
        "mean": _numbers(processor, "image_mean", channels, absent) if normalizes else (0.0,) * channels,
        "std": _numbers(processor, "image_std", channels, absent) if normalizes else (1.0,) * channels,
        "rescale": _number("rescale_factor", processor.get("rescale_factor", 1 / 255)) if rescales else 1.0,
    }


def _integer(values: Mapping[str, Any], path: str, value: Any = None, *, minimum: int = 1) -> int:
    value = values.get(path.rpartition(".")[2]) if value is None else value
    if type(value) is not int or value < minimum:
        raise StartError(f"config.json: {path} must be an integer of at least {minimum}, found {value!r}")
    return value


def _numbers(
    values: Mapping[str, Any], name: str, count: int, absent: Mapping[str, tuple[float, ...]]
) -> tuple[float, ...]:
    numbers = values.get(name)
    numbers = [absent[name][channel % len(absent[name])] for channel in range(count)] if numbers is None else numbers
    if not isinstance(numbers, list) or len(numbers) != count:
        raise StartError(f"preprocessor_config.json: {name} must be a list of {count} numbers, found {numbers!r}")
    return tuple(_number(name, one) for one in numbers)


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise StartError(f"preprocessor_config.json: {name} must have positive numbers, found {value!r}")
    return float(value)


def encode_image(patches: NDArray[Any], grid: Grid) -> bytes:
    """The data of a feature: `patches` [grid.patches, patch_elements], uint8 pixels or normalized float32."""
    return HEADER.pack(*grid, DTYPES.index(patches.dtype)) + np.ascontiguousarray(patches).tobytes()


def decode_image(encoded: bytes, kind: ImageFormat) -> tuple[NDArray[np.float32], Grid]:
    """Normalized patches [grid.patches, patch_elements], and the grid, of the data that `check_image` has passed."""
    *sizes, number = HEADER.unpack_from(encoded)
    patches = np.frombuffer(encoded, DTYPES[number], offset=HEADER.size).reshape(-1, kind.patch_elements)
    if DTYPES[number].kind == "u":
        factor, summand = kind.normalization()
        return patches.astype(np.float32) * factor + summand, Grid(*sizes)
    return patches.astype(np.float32), Grid(*sizes)


def check_image(feature: Feature, kind: ImageFormat, field: str = "features") -> None:
    """Raise RequestError naming `field` unless the data is an image with as many embeddings as the feature has
    placeholders."""
    if len(feature.data) < HEADER.size:
        raise RequestError(f"{field}: an image has no grid", field=field)
    *sizes, number = HEADER.unpack_from(feature.data)
    grid, merge = Grid(*sizes), kind.merge
    if grid.t != 1 or not all(0 < side < 1 << 15 and side % merge == 0 for side in (grid.h, grid.w)):
        raise RequestError(
            f"{field}: the grid of an image must be (1, h, w), h and w multiples of {merge}, got {tuple(grid)}",
            field=field,
        )
    if kind.side and (grid.h, grid.w) != (kind.side, kind.side):
        raise RequestError(
            f"{field}: the grid of an image must be (1, {kind.side}, {kind.side}), got {tuple(grid)}", field=field
        )
    if not 0 <= number < len(DTYPES):
        raise RequestError(f"{field}: the dtype of an image must be uint8 or float32", field=field)
    needed = HEADER.size + grid.patches * kind.patch_elements * DTYPES[number].itemsize
    if len(feature.data) != needed:
        raise RequestError(
            f"{field}: an image of grid {tuple(grid)} needs {grid.patches} patches of {kind.patch_elements} pixels",
            field=field,
        )
    if kind.num_tokens(grid) != feature.length:
        raise RequestError(
            f"{field}: an image of grid {tuple(grid)} has {kind.num_tokens(grid)} tokens, got a run of "
            f"{feature.length} placeholders",
            field=field,
            code="placeholder_mismatch",
        )
    if DTYPES[number].kind == "f" and not np.isfinite(np.frombuffer(feature.data, "<f4", offset=HEADER.size)).all():
        raise RequestError(f"{field}: pixels must be finite", field=field)
