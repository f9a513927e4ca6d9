"""Tiny models that read images, images for them, and what transformers computes of both."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tests.tiny_models import tiny_gemma_vision_config, tiny_vision_config, write_checkpoint
from tokserve.features.images.vision import encode_image
from tokserve.protocol.images import KIND, Grid, ImageFormat
from tokserve.protocol.prompt import Feature


def patches(kind: ImageFormat, grid: Grid, seed: int) -> NDArray[Any]:
    """Pixels of a random image, uint8 [n, patch_elements]: smooth, with noise."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 200, (grid.patches, 1)) + rng.integers(0, 56, (grid.patches, kind.patch_elements))
    return base.astype(np.uint8)


def normalized(kind: ImageFormat, pixels: NDArray[Any]) -> NDArray[np.float32]:
    factor, summand = kind.normalization()
    return pixels.astype(np.float32) * factor + summand


class Picture:
    """An image of a grid; `seed` says what is on it."""

    def __init__(self, kind: ImageFormat, height: int, width: int, seed: int = 0) -> None:
        self.kind, self.grid, self.seed = kind, Grid(1, height, width), seed
        self.pixels = patches(kind, self.grid, seed)

    @property
    def length(self) -> int:
        return self.kind.num_tokens(self.grid)

    def array(self) -> NDArray[np.float32]:
        """The normalized image [channels, height, width]."""
        kind, merge = self.kind, self.kind.merge
        shape = (self.grid.h // merge, self.grid.w // merge, merge, merge, kind.channels, kind.size, kind.size)
        patches = normalized(kind, self.pixels).reshape(shape)
        return patches.transpose(4, 0, 2, 5, 1, 3, 6).reshape(
            kind.channels, self.grid.h * kind.size, self.grid.w * kind.size
        )

    def feature(self, start: int, *, raw: bool = False) -> Feature:
        content = self.pixels if raw else normalized(self.kind, self.pixels)
        name = f"{self.seed}:{self.grid}".encode()
        return Feature(KIND, name, start, self.length, encode_image(content, self.grid))


def prompt_of(parts: list[list[int] | Picture], *, raw: bool = False) -> tuple[list[int], tuple[Feature, ...]]:
    """Token ids and features of texts and images, one after the other; an image is between its start and end."""
    ids: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, Picture):
            features.append(part.feature(len(ids) + 1, raw=raw))
            ids += [part.kind.start_id, *[part.kind.token_id] * part.length, part.kind.end_id]
        else:
            ids += part
    return ids, tuple(features)


def oracle(directory: Path) -> Any:
    """The checkpoint in transformers."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def oracle_logits(model: Any, ids: list[int], pictures: list[Picture]) -> Tensor:  # [T, vocab]
    input_ids = torch.tensor([ids])
    more: dict[str, Any] = {}
    if pictures and pictures[0].kind.side:
        tokens = (input_ids == pictures[0].kind.token_id).int()
        more = {"pixel_values": torch.from_numpy(np.stack([picture.array() for picture in pictures]))}
        with torch.inference_mode():
            all_logits: Tensor = model(input_ids=input_ids, token_type_ids=tokens, **more).logits
        return all_logits[0]
    if pictures:
        pixels = np.concatenate([normalized(picture.kind, picture.pixels) for picture in pictures])
        more = {
            "pixel_values": torch.from_numpy(pixels),
            "image_grid_thw": torch.tensor([picture.grid for picture in pictures]),
        }
    kinds = (
        (input_ids == pictures[0].kind.token_id).int() if pictures else torch.zeros_like(input_ids, dtype=torch.int32)
    )
    with torch.inference_mode():
        logits: Tensor = model(input_ids=input_ids, mm_token_type_ids=kinds, **more).logits
    return logits[0]


MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>")  # renderers wants them
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "size": {"shortest_edge": 256, "longest_edge": 16384},
}
GEMMA_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.6],
    "do_pan_and_scan": None,
}
QWEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
TEXT_PART = "{%- for part in message.content if part.type == 'text' %}\n            {{- part.text }}"
EITHER_PART = (
    "{%- for part in message.content %}\n            {{- '<|vision_start|><|image_pad|><|vision_end|>' "
    "if part.type == 'image' else part.text }}"
)
GEMMA_MARKS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")


def write_served(directory: Path, family: str = "qwen3_vl") -> Path:
    """A tiny model that reads images with the demo model's tokenizer, whose template takes images."""
    from tokserve.checkpoint import DEMO_DIR

    gemma = family == "gemma3"
    kind = ("image_token_index", "boi_token_index", "eoi_token_index") if gemma else QWEN_IDS
    tokenizer = json.loads((DEMO_DIR / "tokenizer.json").read_text())
    first = 1 + max(token["id"] for token in tokenizer["added_tokens"])
    model = tiny_gemma_vision_config() if gemma else tiny_vision_config(family)
    write_checkpoint(directory, model | dict(zip(kind, range(first, first + len(kind)), strict=True)))
    special = tokenizer["added_tokens"][0]
    marks = enumerate((*(GEMMA_MARKS if gemma else MARKS), *TOOLS), first)
    tokenizer["added_tokens"] += [special | {"id": number, "content": mark} for number, mark in marks]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DEMO_DIR / "tokenizer_config.json").read_text())
    assert TEXT_PART in config["chat_template"]
    part = EITHER_PART.replace("".join(MARKS[place] for place in (2, 0, 3)), GEMMA_MARKS[1]) if gemma else EITHER_PART
    config["chat_template"] = config["chat_template"].replace(TEXT_PART, part)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(GEMMA_PROCESSOR if gemma else PROCESSOR))
    return directory


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()
