"""Sessions as trainers read them: trees of turns, and sequences with a loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from tokserve.features.masks.columns import FORM
from tokserve.features.masks.reply import MaskWriter
from tokserve.features.sessions.turns import Span, StoredTurn
from tokserve.protocol.columns import Column
from tokserve.server.replies.logprobs import clamped
from tokserve.server.replies.reply_fields import WeightVersion

Format = Literal["arrays", "base64"]
Shared = Literal["once", "all"]
Encoding = Literal["json", "msgpack"]


class TreeTurn(msgspec.Struct, kw_only=True):
    """A turn.  `parent`: the turn that it continues, null for a root; `continues`: why it is a root, null otherwise.

    The prompt is the parent's prompt, the parent's `token_ids` and `new_prompt_ids`.  In the format base64, ids and
    logprobs are little-endian int32 and float32: base64 in JSON, byte strings in msgpack.  `messages` are JSON text in
    msgpack if that cannot have them: integers of more than 64 bits.
    """

    turn_id: str
    parent: str | None
    continues: str | None
    new_prompt_ids: list[int] | bytes
    token_ids: list[int] | bytes
    token_logprobs: list[float] | bytes
    logprobs_mode: str
    model: str
    weight_versions: list[WeightVersion]
    prompt_weight_versions: list[WeightVersion]
    finish_reason: str
    stop_detail: str | None
    seed: int
    request_id: str
    created: float
    metadata: dict[str, Any]
    sampling_mask: Any = UNSET
    sampling_logprobs: list[float] | bytes | UnsetType = UNSET
    kept_logprob: list[float] | bytes | UnsetType = UNSET
    routed_experts: bytes | UnsetType = UNSET
    messages: Any = UNSET
    message: dict[str, Any] | UnsetType = UNSET


class Tree(msgspec.Struct, kw_only=True):
    """All turns of a session; a parent comes before its children."""

    session_id: str
    state: str
    metadata: dict[str, Any]
    turns: list[TreeTurn]


class LeafSequence(msgspec.Struct, kw_only=True):
    """The ids from a root to a leaf.  `loss_mask`: 1 for ids that were sampled and count here; `logprobs`: 0.0 for ids
    of prompts; `weight_versions`: of positions in `token_ids`."""

    turns: list[str]
    token_ids: list[int] | bytes
    loss_mask: list[int] | bytes
    logprobs: list[float] | bytes
    logprobs_mode: str
    weight_versions: list[WeightVersion]
    finish_reason: str
    metadata: dict[str, Any]


class Sequences(msgspec.Struct, kw_only=True):
    """A row for each leaf of a session, in the order of the leaves."""

    session_id: str
    metadata: dict[str, Any]
    sequences: list[LeafSequence]


def tree_turn(turn: StoredTurn, form: Format, *, messages: Encoding | None = None) -> TreeTurn:
    """A turn as the tree has it; `messages`: how those of the turn are encoded, None: they are left out."""
    prompt, answer = turn.prompt, turn.answer
    reply = TreeTurn(
        turn_id=turn.turn_id,
        parent=prompt.parent,
        continues=prompt.because,
        new_prompt_ids=_ids(prompt.new_ids, form),
        token_ids=_ids(answer.token_ids, form),
        token_logprobs=_floats(answer.token_logprobs, form),
        logprobs_mode=answer.mode,
        model=prompt.context.model,
        weight_versions=_versions(answer.weight_versions),
        prompt_weight_versions=_versions(answer.prompt_weight_versions),
        finish_reason=answer.finish_reason,
        stop_detail=answer.stop_detail,
        seed=answer.seed,
        request_id=answer.request_id,
        created=turn.created,
        metadata=turn.metadata,
    )
    if answer.mask_rows is not None:
        column = Column(answer.mask_rows, FORM.stride, answer.mask_ids)
        for name, value in MaskWriter().tokens(column, form).items():
            setattr(reply, name, value)
    if answer.routed_experts is not None:
        reply.routed_experts = answer.routed_experts
    if messages is not None:
        reply.messages, reply.message = _messages(prompt.messages, messages), answer.message
    return reply


def _messages(stored: bytes, encoding: Encoding) -> msgspec.Raw:
    if encoding == "json":
        return msgspec.Raw(stored)
    try:
        return msgspec.Raw(msgspec.msgpack.encode(msgspec.json.decode(stored)))
    except (OverflowError, RecursionError):
        return msgspec.Raw(msgspec.msgpack.encode(stored.decode()))


def leaf_sequences(turns: Sequence[StoredTurn], form: Format, shared: Shared) -> list[LeafSequence]:
    """The sequences of a tree, given with parents before their children.  `shared`: a sampled token of several leaves
    counts in the first, or in all."""
    by_id = {turn.turn_id: turn for turn in turns}
    inner = {turn.prompt.parent for turn in turns}
    counted: set[str] = set()
    sequences = []
    for leaf in turns:
        if leaf.turn_id in inner:
            continue
        path = [leaf]
        while (parent := path[-1].prompt.parent) is not None:
            path.append(by_id[parent])
        path.reverse()
        sequences.append(_sequence(path, form, counted if shared == "once" else set()))
        counted.update(turn.turn_id for turn in path)
    return sequences


def _sequence(path: Sequence[StoredTurn], form: Format, counted: set[str]) -> LeafSequence:
    """The sequence of the turns of a path; `counted`: turns that count in another sequence."""
    ids, masks, logprobs, versions, length = [], [], [], [], 0
    for turn in path:
        prompt, answer = turn.prompt.new_ids, turn.answer
        num_prompt, num_tokens = len(prompt) // 4, len(answer.token_ids) // 4
        ids += [prompt, answer.token_ids]
        masks += [np.zeros(num_prompt, np.uint8), np.full(num_tokens, turn.turn_id not in counted, np.uint8)]
        logprobs += [bytes(4 * num_prompt), answer.token_logprobs or bytes(4 * num_tokens)]
        start = length + num_prompt
        versions += [(name, start + begin, start + end) for name, begin, end in answer.weight_versions]
        length = start + num_tokens
    mask = np.concatenate(masks)
    last = path[-1]
    return LeafSequence(
        turns=[turn.turn_id for turn in path],
        token_ids=_ids(b"".join(ids), form),
        loss_mask=mask.tolist() if form == "arrays" else mask.tobytes(),
        logprobs=_floats(b"".join(logprobs), form),
        logprobs_mode=last.answer.mode,
        weight_versions=_versions(versions),
        finish_reason=last.answer.finish_reason,
        metadata=last.metadata,
    )


def _versions(spans: Sequence[Span]) -> list[WeightVersion]:
    return [WeightVersion(*span) for span in spans]


def _ids(packed: bytes, form: Format) -> list[int] | bytes:
    return packed if form == "base64" else np.frombuffer(packed, "<i4").tolist()


def _floats(packed: bytes, form: Format) -> list[float] | bytes:
    return packed if form == "base64" else clamped(packed)
