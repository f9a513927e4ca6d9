"""`ServerPooling`: what the vectors of a server's model mean."""

from __future__ import annotations

from tokserve.features.pooling.pooled_outputs import pooler_of
from tokserve.server.serving import Serving


class ServerPooling:
    """`serving.state_of(ServerPooling)` is a server's.  `rules`: None for a model that generates."""

    def __init__(self, serving: Serving) -> None:
        self.rules = pooler_of(serving.config.model)
