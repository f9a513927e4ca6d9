"""`ApiProcess`: which of the server's processes that serve HTTP this is."""

from __future__ import annotations

import msgspec


class ApiProcess(msgspec.Struct, frozen=True):
    """Identifies one of the server's API processes (`index`), with what all of them share.

    `created`: when the server started, in seconds of Unix time.  `counters`: the descriptor of the shared table.
    `services`: addresses of what the supervisor hosts for its processes, by the name of a room.
    """

    index: int
    created: int
    counters: int | None
    services: dict[str, str] = {}
