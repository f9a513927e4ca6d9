"""What an image is to a checkpoint, as the engine's messages carry it.

Images travel between the server and the engine as the data of a feature of kind `KIND`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

KIND = "image"  # of features
HEADER = struct.Struct("<4i")  # of a feature's data: t, h, w, number of the dtype
Int64 = NDArray[np.int64]


class ImageUrl(NamedTuple):
    """An image in a request.  `field`: the path of its URL in the body; `uuid`: the client's name of the image."""

    url: str
    field: str
    uuid: str | None = None


class Placeholder(NamedTuple):
    """Where the tokens of an image lie in a prompt."""

    offset: int
    length: int


class Grid(NamedTuple):
    """Patches of an image: in time, down and across."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


class ImageFormat(msgspec.Struct, frozen=True):
    """What an image is to a checkpoint.

    `token_id`: of the placeholder that stands `num_tokens` times for an image in a prompt; `start_id`, `end_id`: of the
    tokens before and after.  A patch has `channels` * `temporal` * `size` * `size` pixels, in this order; patches come
    in squares of `merge` by `merge`, row by row, and each square becomes one embedding.  Pixels are 0 to 255, or
    (pixel * `rescale` - `mean`) / `std` by channel in float32.  `axes`: positions of an image's tokens have three axes.
    `side`: patches of every image, down and across; 0: an image may have any grid.  `bidirectional`: the tokens of an
    image attend to each other, to later ones too, so that a step computes all that are missing of it.
    """

    token_id: int
    start_id: int
    end_id: int
    size: int
    temporal: int
    merge: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    axes: bool = True
    side: int = 0
    bidirectional: bool = False

    @property
    def step_tokens(self) -> int:
        """The tokens of an image that one step has to compute together, at most."""
        return self.num_tokens(Grid(1, self.side, self.side)) if self.bidirectional else 0

    @property
    def patch_elements(self) -> int:
        return self.channels * self.temporal * self.size**2

    def num_tokens(self, grid: Grid) -> int:
        """Embeddings of an image."""
        return grid.patches // self.merge**2

    def normalization(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Factor and summand of each element of a patch: pixel * factor + summand; [patch_elements] each."""
        mean, std = np.array(self.mean), np.array(self.std)
        repeats = self.temporal * self.size**2
        factor, summand = np.repeat(self.rescale / std, repeats), np.repeat(-mean / std, repeats)
        return factor.astype(np.float32), summand.astype(np.float32)


def image_grid(encoded: bytes) -> Grid:
    """The grid in the data of a feature of an image."""
    return Grid(*HEADER.unpack_from(encoded)[:3])


def rope_positions(images: Sequence[tuple[int, Grid]], merge: int) -> tuple[Int64, int]:
    """Positions of a prompt's tokens along (t, h, w) up to the end of its last image: int64[3, n]; and what is added to
    the index of every later token to give its position, alike on the three axes.

    `images`: where the tokens of each begin, in order.  A text's tokens count on from the largest position before;
    those of an image share one position in time, and have their row and column from there on.
    """
    parts, position, end = [], 0, 0
    for start, grid in images:
        text = np.arange(position, position + start - end, dtype=np.int64)
        parts.append(np.broadcast_to(text, (3, len(text))))
        position += start - end
        rows, columns = grid.h // merge, grid.w // merge
        parts.append(np.indices((grid.t, rows, columns), dtype=np.int64).reshape(3, -1) + position)
        end = start + grid.t * rows * columns
        position += max(grid.t, rows, columns)
    return np.concatenate(parts, axis=1) if parts else np.empty((3, 0), np.int64), position - end
