"""What the results of all ranks of one call are together, and what each rank is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokserve.errors import Conflict

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


_MERGE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "memory": _sums,
    "checksums": _by_rank,
    "begin_update": all,
    "is_same_update": all,
    "collective_rpc": list,
    "apply_model": list,
}
