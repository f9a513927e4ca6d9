"""`ServerImages`: the images of a server's requests: their reader, their cache, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokserve.base.errors import Overloaded
from tokserve.features.images.media.cache import NamedImages
from tokserve.features.images.media.sources import ByteCount
from tokserve.protocol.prompt import Feature
from tokserve.server.serving import Serving


class ServerImages:
    """What the routes that take images share; `serving.state_of(ServerImages)` is a server's.

    `reader`: of the model's images; None: it takes none.  `features`: images that requests name instead of sending.
    """

    def __init__(self, serving: Serving) -> None:
        self.reader = serving.llm.images
        self.features = NamedImages(serving.config.media.mm_processor_cache_bytes, lambda image: len(image[1]))
        self._memory = ByteCount(serving.config.media.max_media_memory)

    def reserve(self, features: Sequence[Feature]) -> Callable[[], None]:
        """Count the patches of a request's images until the returned function is called.  Raises Overloaded."""
        size = sum(len(feature.data) for feature in features)
        if not self._memory.add(size):
            raise Overloaded(
                "images of requests in flight use all memory for images (--max-media-memory)",
                retry_after=1,
                code="media_overload",
            )
        return lambda: self._memory.subtract(size)


def reserve(serving: Serving, features: Sequence[Feature]) -> Callable[[], None]:
    """Reserve memory for the images of a request.  Raises Overloaded."""
    return serving.state_of(ServerImages).reserve(features)
