"""Images of requests to embeddings, by the model's tower, and a cache of them by the images' hashes."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from tokserve import ops
from tokserve.features.images.vision import decode_image
from tokserve.models.decoder import Decoder
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.prompt import Feature


class ImageEncoder:
    """`max_bytes`: of embeddings that are kept for images that come again; the least recently used go first.
    `threads`: for torch's operations of the tower.  Everything that was computed is forgotten when weights change."""

    def __init__(self, kind: ImageFormat, max_bytes: int, threads: int) -> None:
        self.kind = kind
        self._max_bytes, self._threads = max_bytes, threads
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = self.hits = self.encoded = 0

    def __call__(self, model: Decoder, feature: Feature) -> Tensor:
        """Embeddings [1 + layers, length, hidden] of a feature that `vision.check_image` has passed."""
        known = self._cache.get(feature.hash)
        if known is not None:
            self.hits += 1
            self._cache.move_to_end(feature.hash)
            return known
        assert model.tower is not None
        patches, grid = decode_image(feature.data, self.kind)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            embeddings = model.tower(torch.from_numpy(patches).to(ops.torch_device), grid)
        finally:
            torch.set_num_threads(threads)
        self.encoded += 1
        self._keep(feature.hash, embeddings)
        return embeddings

    def forget(self) -> None:
        """Forget all embeddings: the weights are others."""
        self._cache.clear()
        self.num_bytes = 0

    def _keep(self, name: bytes, embeddings: Tensor) -> None:
        if embeddings.nbytes > self._max_bytes:
            return
        self._cache[name] = embeddings
        self.num_bytes += embeddings.nbytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._cache.popitem(last=False)[1].nbytes
