"""One command for several engines: what each engine is sent, and what their answers amount to.

Where one engine refuses and another does not, `UNDONE_BY` names the command that takes the others back, and the error
says which engine refused.  `coordinator` sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tokserve.base.errors import Conflict, EngineDead, NotFound, RequestError

PART = "."  # between the engines' ids of an update
UNDONE_BY: dict[str, tuple[str, dict[str, Any]]] = {
    "update_weights": ("abort_weight_update", {}),
    "begin_weight_stream": ("abort_weight_update", {}),
    "feed_weights": ("abort_weight_update", {}),
    "init_weight_transfer_engine": ("shutdown_weight_transfer_engine", {}),
    # the lease has expired on one engine: it expires on the others
    "extend_pause": ("pause", {"mode": "keep", "clear_cache": False, "lease": 1e-3, "take_over": True}),
}


class Answer(NamedTuple):
    """What one engine replied, or why it refused."""

    rank: int
    result: Any = None
    error: RequestError | None = None


def args_for(method: str, args: Mapping[str, Any], rank: int, size: int, num_ranks: int = 1) -> dict[str, Any]:
    """The arguments of a command for one engine of `size`: its part of an update's id, the first of its `num_ranks` in
    a process group, its entry of a list with one per engine.  Raises RequestError."""
    arguments = dict(args)
    if isinstance(update_id := arguments.get("update_id"), str):
        parts = update_id.split(PART)
        arguments["update_id"] = parts[rank] if len(parts) == size else update_id
    if method == "init_weight_transfer_engine":
        info = arguments.get("init_info")
        if isinstance(info, Mapping) and type(info.get("rank_offset")) is int:
            arguments["init_info"] = {**info, "rank_offset": info["rank_offset"] + rank * num_ranks}
    if method == "update_weights" and isinstance(arguments.get("update"), list):
        updates = arguments["update"]
        if len(updates) != size:
            raise RequestError(
                f"update_info must have an entry for each of {size} ranks, got {len(updates)}", field="update_info"
            )
        arguments["update"] = updates[rank]
    return arguments


def outcome(method: str, args: Mapping[str, Any], answers: Sequence[Answer], size: int) -> Any:
    """What the answers of all engines are together.  Raises the error of an engine that refused."""
    alive = [answer for answer in answers if not isinstance(answer.error, EngineDead)]
    if not alive:
        raise answers[0].error or EngineDead()
    if method == "unload_lora_adapter" and any(answer.error is None for answer in alive):
        alive = [answer for answer in alive if not isinstance(answer.error, NotFound)]  # one that was replaced
    refused = [answer for answer in alive if answer.error is not None]
    if refused:
        raise _refusal(refused, len(alive))
    return _MERGE.get(method, _first)(alive, args, size)


def is_mixed(answers: Sequence[Answer]) -> bool:
    """Whether one engine refused, and another did not."""
    kinds = {answer.error is None for answer in answers if not isinstance(answer.error, EngineDead)}
    return len(kinds) == 2


def _refusal(refused: Sequence[Answer], num_alive: int) -> RequestError:
    """The error for the caller; it names engines if not all of them gave the same."""
    error = refused[0].error
    assert error is not None
    messages = [answer.error.message for answer in refused if answer.error is not None]
    if len(refused) < num_alive or len(set(messages)) > 1:
        error.message = "; ".join(
            f"engine {answer.rank}: {message}" for answer, message in zip(refused, messages, strict=True)
        )
        error.args = (error.message,)
    return error


Merge = Callable[[Sequence[Answer], Mapping[str, Any], int], Any]


def _first(answers: Sequence[Answer], args: Mapping[str, Any], size: int) -> Any:
    return answers[0].result


def _all_equal(answers: Sequence[Answer], args: Mapping[str, Any], size: int) -> Any:
    for answer in answers[1:]:
        if answer.result != answers[0].result:
            raise Conflict(f"engines {answers[0].rank} and {answer.rank} have different weights")
    return answers[0].result


def _joined_ids(answers: Sequence[Answer], args: Mapping[str, Any], size: int) -> Any:
    ids = [""] * size
    for answer in answers:
        ids[answer.rank] = answer.result["update_id"]
    return answers[0].result | {"update_id": PART.join(ids)}


def _lists(answers: Sequence[Answer], args: Mapping[str, Any], size: int) -> Any:
    return [result for answer in answers for result in answer.result]


def _maxima(answers: Sequence[Answer], args: Mapping[str, Any], size: int) -> Any:
    return {name: max(answer.result[name] for answer in answers) for name in answers[0].result}


def _best(answers: Sequence[Answer], args: Mapping[str, Any], size: int) -> Any:
    """The results of aborts by id: that of the engine that has had the request."""
    results: dict[str, str] = {}
    for answer in answers:
        for request_id, result in answer.result.items():
            if ABORTS.index(result) < ABORTS.index(results.get(request_id, ABORTS[-1])):
                results[request_id] = result
            results.setdefault(request_id, result)
    return results


def _requests(answers: Sequence[Answer], args: Mapping[str, Any], size: int) -> Any:
    rows = [row | {"engine": answer.rank} for answer in answers for row in answer.result["requests"]]
    rows.sort(key=lambda row: -row["age"])
    total = sum(answer.result["total"] for answer in answers)
    return answers[0].result | {"total": total, "requests": rows[: args.get("limit")]}


def _state(answers: Sequence[Answer], args: Mapping[str, Any], size: int) -> Any:
    counts = ("running", "waiting", "in_flight", "steps")
    sums = {name: sum(answer.result[name] for answer in answers) for name in counts}
    return answers[0].result | sums | {"engines": [{"engine": answer.rank} | answer.result for answer in answers]}


ABORTS = ("aborted", "finished", "not_found")
_MERGE: dict[str, Merge] = {
    "weight_checksums": _all_equal,
    "checkpoint_checksums": _all_equal,
    "weights_checksum": _all_equal,
    "weight_coordinates": _all_equal,
    "start_weight_update": _joined_ids,
    "collective_rpc": _lists,
    "apply_model": _lists,
    "kv_event_sources": _lists,
    "leave": lambda answers, args, size: sum(answer.result for answer in answers),
    "add_draft_corpus": _maxima,  # engines keep different outputs of requests besides
    "remove_draft_corpus": _maxima,
    "abort": _best,
    "abort_group": _best,
    "abort_prefix": _best,
    "abort_all": _best,
    "shutdown": _best,
    "requests": _requests,
    "state": _state,
}
