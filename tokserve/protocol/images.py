"""What an image is to a checkpoint, as the engine's messages carry it.

Images travel between the server and the engine as the data of a feature of kind `KIND`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

KIND = "image"  # of features


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
