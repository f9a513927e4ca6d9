"""What the results of all ranks of one call are together, and what each rank is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tokserve.base.errors import Conflict

SAME = ("receive_update", "plan_chain", "checkpoint_checksums", "weights_checksum", "finish_update")


def args_of(method: str, args: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """The arguments of a call by rank: each has a number of its own in a trainer's process group, and a file of its own
    for its profile, `rank1-NAME` beside the first one's."""
    if method == "write_profile":
        file = Path(args["path"])
        names = [file.name, *(f"rank{rank}-{file.name}" for rank in range(1, size))]
        return [{**args, "path": str(file.with_name(name))} for name in names]
    if method != "init_weight_transfer" or type(args.get("options", {}).get("rank_offset")) is not int:
        return [args] * size
    options = args["options"]
    return [{**args, "options": {**options, "rank_offset": options["rank_offset"] + rank}} for rank in range(size)]


def copy_args(method: str, args: dict[str, Any], block_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """The arguments of a copy of KV blocks by rank: of blocks from another server each rank gets its part, which has
    `block_bytes` of its own."""
    if method != "write_blocks":
        return [args] * len(block_bytes)
    places = [slice(start, end) for start, end in pairwise(accumulate(block_bytes, initial=0))]
    return [{**args, "contents": [content[place] for content in args["contents"]]} for place in places]


def results(method: str, replies: Sequence[Any]) -> Any:
    """One result of the ranks'.  Raises Conflict if ranks that must agree do not."""
    if method in SAME and any(reply != replies[0] for reply in replies):
        raise Conflict(f"{method}: the ranks of the model disagree")
    return _MERGE.get(method, _first)(replies)


def _first(replies: Sequence[Any]) -> Any:
    return replies[0]


def _sums(replies: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(reply.get(name, 0) for reply in replies) for name in {n: 0 for one in replies for n in one}}


def _by_rank(replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {f"rank{rank}.{name}": value for rank, reply in enumerate(replies) for name, value in reply.items()}


def _identity(replies: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The parts of the KV's identity: what all ranks have in common, or a digest of what each has."""
    parts = {}
    for name in replies[0]:
        values = [reply[name] for reply in replies]
        digest = hashlib.sha256("\n".join(values).encode()).hexdigest()
        parts[name] = values[0] if len(set(values)) == 1 else digest
    return parts


def _in_all(replies: Sequence[Sequence[bytes]]) -> list[bytes]:
    """The keys that every rank has."""
    others = [set(reply) for reply in replies[1:]]
    return [key for key in replies[0] if all(key in other for other in others)]


def _coordinates(replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Deltas are possible if no rank refuses them."""
    refusals = [reply["delta_refusal"] for reply in replies if reply["delta_refusal"] is not None]
    return {**replies[0], "delta_refusal": refusals[0] if refusals else None}


def _written(replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge replies to `write_files`: a block is there if each rank has written its part."""
    num_keys = len(replies[0]["written"]) + replies[0]["failed"]
    written = _in_all([reply["written"] for reply in replies])
    deleted = list({key: None for reply in replies for key in reply["deleted"]})
    seconds = max(reply["seconds"] for reply in replies)
    return {"written": written, "deleted": deleted, "failed": num_keys - len(written), "seconds": seconds}


def _read(replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge replies to `read_files`: blocks count of which each rank has read its part."""
    worst = {name: max(reply[name] for reply in replies) for name in ("damaged", "seconds")}
    return {"count": min(reply["count"] for reply in replies), **worst}


def _blocks(replies: Sequence[Sequence[bytes]]) -> list[bytes]:
    """The contents of blocks, put together from their parts."""
    return [b"".join(parts) for parts in zip(*replies, strict=True)]


_MERGE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "memory": _sums,
    "kv_identity": _identity,
    "save_blocks": max,
    "load_blocks": max,
    "use_identity": _in_all,
    "write_files": _written,
    "read_files": _read,
    "read_blocks": _blocks,
    "checksums": _by_rank,
    "weight_coordinates": _coordinates,
    "begin_update": all,
    "is_same_update": all,
    "collective_rpc": list,
    "apply_model": list,
}
