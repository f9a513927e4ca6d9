"""The process that decodes images and cuts them into patches.

`python -P -m tokserve.features.images.media.worker MODEL SETTINGS` starts it.

It works for one image at a time, under limits of memory, and without torch.  Frames (`frames`) come on its standard
input and leave on its standard output; it ends with its input.
"""

from __future__ import annotations

import io
import logging
import os
import resource
import signal
import sys
import warnings
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokserve.features.images.media import frames
from tokserve.features.images.media.frames import (
    Array,
    BrokenFrame,
    Job,
    Processed,
    Refused,
    WorkerReady,
    WorkerSettings,
)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of Pillow; decoders of others are not reached
MOST_RATIO = 200  # of the sides: what the Qwen processors take
BACKGROUND = (255, 255, 255)  # of images that are partly transparent
MEMORY = 2 << 30  # bytes beside those of the largest image's pixels


class UnreadableImage(Exception):
    """It cannot be taken: `rule` is said of it."""

    def __init__(self, rule: str, code: str = "image_unreadable") -> None:
        super().__init__(rule)
        self.rule, self.code = rule, code


class Preprocessor:
    """The checkpoint's image processor, from transformers."""

    def __init__(self, model: str, settings: WorkerSettings) -> None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # takes long to import, and is not needed
        logging.getLogger("transformers").setLevel(logging.ERROR)
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        warnings.simplefilter("ignore")
        from PIL import Image, ImageOps

        Image.MAX_IMAGE_PIXELS = None  # `_opened` looks at the size
        self._image, self._ops = Image, ImageOps
        self._settings = settings
        self._processor = _processor(model, settings)

    @property
    def settings(self) -> str:
        """All that the patches depend on besides the bytes of an image, as JSON."""
        from PIL import __version__ as pillow
        from transformers import __version__ as transformers

        described = [self._processor.to_dict(), self._settings, pillow, transformers]
        return msgspec.json.encode(described, enc_hook=str, order="sorted").decode()

    def __call__(self, content: memoryview) -> Processed:
        """Raises UnreadableImage."""
        image = self._opened(content)
        size = image.size
        try:
            upright = self._ops.exif_transpose(image)
            patches, grid = self._patches(self._on_white(upright))
        except (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError) as error:
            raise UnreadableImage(f"cannot be decoded: {_first_line(error)}") from None
        return Processed({"pixels": _array(patches), "grid": _array(grid)}, size)

    def _opened(self, content: memoryview) -> Any:
        try:
            image = self._image.open(io.BytesIO(content), formats=FORMATS)
        except (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError):
            raise UnreadableImage(f"must be an image: {', '.join(FORMATS)}") from None
        width, height = image.size
        if width * height > self._settings.max_pixels:
            raise UnreadableImage(
                f"must be an image of at most {self._settings.max_pixels} pixels (--max-image-pixels), and it has "
                f"{width} x {height}",
                "image_too_large",
            )
        if min(width, height) < 1 or max(width, height) > MOST_RATIO * min(width, height):
            raise UnreadableImage(
                f"must have sides of a ratio of at most {MOST_RATIO}, and they are {width} x {height}"
            )
        return image

    def _on_white(self, image: Any) -> Any:
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = self._image.new("RGBA", image.size, (*BACKGROUND, 255))
            image = self._image.alpha_composite(white, image)
        return image.convert("RGB")

    def _patches(self, image: Any) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        """uint8 pixels [n, elements of a patch], and the grid [3]."""
        processed = self._processor(images=[image], return_tensors="np", do_rescale=False, do_normalize=False)
        pixels = np.asarray(processed["pixel_values"]).astype(np.uint8)
        if self._settings.side:
            return _in_patches(pixels[0], self._settings.patch_size, self._settings.merge_size)
        return pixels, np.asarray(processed["image_grid_thw"], np.int32)[0]


def _processor(model: str, settings: WorkerSettings) -> Any:
    from transformers import AutoImageProcessor

    names = ("preprocessor_config.json", "processor_config.json")
    if any(os.path.isfile(os.path.join(model, name)) for name in names):
        load: Any = AutoImageProcessor.from_pretrained
        return load(model, backend="pil", **settings.kwargs)
    if settings.side:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": settings.side, "width": settings.side}, **settings.kwargs)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {name: getattr(settings, name) for name in ("patch_size", "temporal_patch_size", "merge_size")}
    return Qwen2VLImageProcessorPil(**sizes, **settings.kwargs)


def _in_patches(image: NDArray[np.uint8], size: int, merge: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """An image [channels, height, width] in patches, those that become one token side by side, and its grid."""
    channels, height, width = image.shape
    grid = np.array([1, height // size, width // size], np.int32)
    parts = image.reshape(channels, height // size // merge, merge, size, width // size // merge, merge, size)
    return parts.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels * size * size), grid


def _array(values: NDArray[Any]) -> Array:
    return Array(values.dtype.str, values.shape, memoryview(values.tobytes()))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def main() -> None:
    """Serve until the input ends."""
    model, raw = sys.argv[1:]
    settings = msgspec.json.decode(raw, type=WorkerSettings)
    to, at = os.dup(sys.stdout.fileno()), sys.stdin.fileno()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no frame
    os.nice(5)  # the server's own processes come first
    preprocessor = Preprocessor(model, settings)
    limit = MEMORY + 24 * settings.max_pixels
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    frames.send(to, frames.pack(WorkerReady(preprocessor.settings)))
    while True:
        try:
            job = msgspec.msgpack.decode(frames.receive(at), type=Job)
        except BrokenFrame:
            return
        signal.setitimer(signal.ITIMER_PROF, job.seconds)
        try:
            reply: msgspec.Struct = preprocessor(job.content)
        except UnreadableImage as error:
            reply = Refused(error.rule, error.code)
        except MemoryError:
            reply = Refused("needs too much memory to decode", "image_too_large")
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        frames.send(to, frames.pack(reply))


if __name__ == "__main__":
    main()
