"""What the engine keeps of a weight update, and of which versions there were."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from tokserve.base.errors import RequestError
from tokserve.engine.admin.lease import Lease

MAX_VERSION = 256
MAX_REMEMBERED = 4096  # versions


@dataclass(slots=True, eq=False)
class Update:
    """An open weight update.
    `closed`: nothing more may come, or it is the whole one of a single call.  `source`: the directory that its tensors
    come from, if they come from one, and `stamp` the state of its files.  `streams`: the safetensors bodies that belong
    to it, by name; one that began before it, or beside another update, does not.  `is_delta`: it changes elements of
    the weights that serve, so there is nothing beside them; `spoiled`: a worker call may have changed them since.
    `checksum`: what the result must have, if the call that opened it knows.  `lease`: how long it stays open without a
    call of its holder, which may show the `update_id`.  `num_bytes`: of the tensors that came, or of the bodies that
    they came in; `way`: how they did.  `adapter`: the name of the one whose tensors these are, None: the model's;
    `is_model`: it is to stand before the model.  `recompute_kv`: its commit has the KV of requests in flight computed
    again."""

    lease: Lease
    update_id: str = field(default_factory=lambda: secrets.token_hex(8))
    num_bytes: int = 0
    way: str = "disk"
    is_delta: bool = False
    recompute_kv: bool = False
    spoiled: bool = False
    decided: bool = False
    checksum: str | None = None
    adapter: str | None = None
    is_model: bool = False
    closed: bool = False
    source: str | None = None
    stamp: str | None = None
    streams: set[str] = field(default_factory=set)


class VersionHistory:
    """The names of the last versions, with the checksums of their weights where those are known."""

    def __init__(self) -> None:
        self._checksums: dict[str, str | None] = {}

    def is_reused(self, version: str, checksum: str | None) -> bool:
        """Whether earlier weights had the version and are not known to be these; None: a checksum is not known."""
        return version in self._checksums and (checksum is None or self._checksums[version] != checksum)

    def add(self, version: str, checksum: str | None) -> None:
        """The version serves now."""
        self._checksums.pop(version, None)
        self._checksums[version] = checksum
        if len(self._checksums) > MAX_REMEMBERED:
            del self._checksums[next(iter(self._checksums))]


def check_version(version: str | None, field: str = "weight_version") -> None:
    """Raise RequestError for a name that no version may have; None stands for the default."""
    if version is not None and not 0 < len(version) <= MAX_VERSION:
        raise RequestError(f"a weight version must have 1 to {MAX_VERSION} characters", field=field)
    if version is not None and not version.isprintable():
        raise RequestError("a weight version must have printable characters only", field=field)
