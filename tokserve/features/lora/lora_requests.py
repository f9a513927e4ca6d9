"""The adapters of requests in the Python API: which of them must be loaded before a request is sent.

The engine knows adapters by name only.  A `LoRARequest` also has an id and a directory: with another id, another
directory or new files it means other weights, and what was loaded under the name is loaded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokserve.base.errors import RequestError, StartError
from tokserve.checkpoint import ADAPTER_FILES, locate_adapter
from tokserve.protocol.adapter_choice import AdapterChoice, LoRARequest
from tokserve.protocol.messages import Status

FIELD = "lora_request"


def each_adapter(lora_request: AdapterChoice | Sequence[AdapterChoice], count: int) -> list[AdapterChoice]:
    """One for all of `count` prompts, or one each.  Raises RequestError, also for two adapters under one name: only one
    of them can be loaded."""
    one = lora_request is None or isinstance(lora_request, LoRARequest | str)
    listed: Any = [lora_request] * count if one else lora_request
    if not isinstance(listed, Sequence) or not all(isinstance(entry, LoRARequest | str | None) for entry in listed):
        raise RequestError("lora_request must be a LoRARequest, a name, or a list of these", field=FIELD)
    if len(listed) != count:
        raise RequestError(f"there are {count} prompts and {len(listed)} lora requests", field=FIELD)
    with_path: dict[str, LoRARequest] = {}
    for entry in listed:
        if isinstance(entry, LoRARequest) and entry.path:
            first = with_path.setdefault(entry.lora_name, entry)
            if (first.path, first.lora_int_id) != (entry.path, entry.lora_int_id):
                raise RequestError(
                    f"lora_request: two adapters have the name {entry.lora_name!r}: number {first.lora_int_id} in "
                    f"{first.path} and number {entry.lora_int_id} in {entry.path}; one name has one adapter at a time",
                    field=FIELD,
                )
    return list(listed)


class _Load(NamedTuple):
    """What was loaded under a name: `stamp` is the state of its files then, None if they cannot be seen from here."""

    path: str
    number: int
    stamp: Any
    generation: int


class AdapterLoads:
    """What this client has loaded, by name.  `load` loads a directory under a name; `status` is the engine's state as
    of now."""

    def __init__(self, load: Callable[[str, str], Awaitable[Any]], status: Callable[[], Awaitable[Status]]) -> None:
        self._load = load
        self._status = status
        self._loads: dict[str, _Load] = {}
        self._lock = asyncio.Lock()

    async def ensure(self, request: LoRARequest) -> bool:
        """Load the adapter unless it is loaded as it is now; returns whether it was loaded.  Raises RequestError."""
        async with self._lock:  # two requests for a new adapter load it once
            request = replace(request, lora_path=await asyncio.to_thread(_located, request.path))
            stamp = _stamp(request.path)
            if not request.load_inplace and self._is_loaded(request, stamp, await self._status()):
                return False
            await self._load(request.lora_name, request.path)
            generations = _generations(await self._status())
            generation = generations.get(request.lora_name, ("", 0))[1]
            self._loads[request.lora_name] = _Load(request.path, request.lora_int_id, stamp, generation)
            return True

    def _is_loaded(self, request: LoRARequest, stamp: Any, status: Status) -> bool:
        path, generation = _generations(status).get(request.lora_name, ("", 0))
        if path != request.path:
            return False
        known = self._loads.get(request.lora_name)
        if known is None or known.generation != generation:  # another client's load, of files that may have changed
            return stamp is None
        return (known.number, known.stamp) == (request.lora_int_id, stamp)


def _generations(status: Status) -> dict[str, tuple[str, int]]:
    return {adapter.name: (adapter.path, adapter.generation) for adapter in status.adapters}


def _located(path: str) -> str:
    try:
        return locate_adapter(path)
    except StartError as error:
        raise RequestError(f"lora_request: {error}", field=FIELD) from None


def _stamp(path: str) -> Any:
    """The state of an adapter's files; None if there are none."""
    try:
        stats = [(Path(path) / name).stat() for name in ADAPTER_FILES]
    except (OSError, ValueError):
        return None
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
