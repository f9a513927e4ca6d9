"""Images that clients may refer to by the names they gave them."""

from __future__ import annotations

import threading
from collections import OrderedDict


class FeatureCache:
    """Images by the names that clients gave them: what `features` without data refers to.  The least recently used go
    first.  Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[tuple[str, str], tuple[bytes, bytes]] = OrderedDict()  # hash, and encoded
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, salt: str, name: str) -> tuple[bytes, bytes] | None:
        """The image's hash and its encoded form."""
        with self._lock:
            image = self._images.get((salt, name))
            if image is not None:
                self._images.move_to_end((salt, name))
            return image

    def put(self, salt: str, name: str, image: tuple[bytes, bytes]) -> None:
        """Keep an image; a name has one."""
        if len(image[1]) > self._max_bytes:
            return
        with self._lock:
            before = self._images.pop((salt, name), None)
            self.num_bytes += len(image[1]) - (0 if before is None else len(before[1]))
            self._images[salt, name] = image
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= len(self._images.popitem(last=False)[1][1])
