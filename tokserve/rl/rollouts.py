"""What a server generates, as numpy arrays: bodies of the token route, and how its replies are read."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .plain import array

INT32 = np.iinfo(np.int32)
TRUNCATED = -2  # the count of a sampling mask that would have had too many ids
Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


def sticky_seeds(prompts: Iterable[Sequence[int]], seed: int = 0) -> list[int]:
    """A seed for each prompt that depends on nothing but the prompt and `seed`.

    With the same seed in the next epoch a rollout meets the same noise, so where the policy has changed little the
    server drafts it from the last one.  Each is still an exact sample of the policy, but those of one prompt are
    correlated over epochs.
    """
    key = int(seed).to_bytes(8, "little", signed=True)
    packed = (array(prompt).astype("<i4").tobytes() for prompt in prompts)
    return [
        int.from_bytes(hashlib.blake2b(ids, digest_size=8, key=key).digest(), "little") % (1 << 62) for ids in packed
    ]


@dataclass(slots=True)
class TokenColumns:
    """One value for each token of an output, or of a piece of it.  `logprobs` are in the requested mode.

    With `return_sampling_mask`, else None, by token: `sampling_mask`, the ascending ids that it was drawn from, None
    for the whole vocabulary and where there were too many (`mask_truncated`); `sampling_logprobs`, its logprob among
    them; `kept_logprob`, the logprob of all of them in the model's distribution at the temperature.
    """

    token_ids: Ids  # int32 [tokens]
    logprobs: Floats  # float32 [tokens]
    sampling_mask: list[Ids | None] | None
    mask_truncated: NDArray[np.bool_] | None
    sampling_logprobs: Floats | None
    kept_logprob: Floats | None


@dataclass(slots=True)
class Rollout:
    """One choice of one prompt, with the columns of `TokenColumns`.

    `finish_reason`: stop, length, abort, deadline, repetition or error.  `weight_versions`: (version, start, end):
    which version of the weights made which of `token_ids`; an empty span is of a version that computed KV which later
    tokens depend on, and none of them, so with one span everything is of one version.  `prompt_weight_versions`:
    likewise of `prompt_ids`, by what computed their KV.
    """

    prompt_index: int
    index: int
    prompt_ids: Ids
    token_ids: Ids
    logprobs: Floats
    finish_reason: str
    weight_versions: list[tuple[str, int, int]]
    sampling_mask: list[Ids | None] | None = None
    mask_truncated: NDArray[np.bool_] | None = None
    sampling_logprobs: Floats | None = None
    kept_logprob: Floats | None = None
    prompt_weight_versions: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class CandidateScores:
    """Logprobs at the positions of one sequence, with a row for each scored token.

    `ids` int32 [rows, K]: the candidates, -1 for none.  `logprobs` [rows, K]: theirs, -inf for none.  `rest` [rows]: of
    all other ids together.  `token_logprobs` [rows]: of the sequence's own tokens.
    """

    ids: Ids
    logprobs: Floats
    rest: Floats
    token_logprobs: Floats


@dataclass(slots=True)
class RolloutDelta:
    """Tokens of a choice since its last delta, which may be none.  `finish_reason` and `weight_versions` (of the whole
    output) come with the choice's last one."""

    index: int
    tokens: TokenColumns
    finish_reason: str | None
    weight_versions: list[tuple[str, int, int]]


def prompt_ids(number: int, prompt: Sequence[int], name: str = "prompts") -> Ids:
    """The ids of a prompt.  Raises ValueError for text, floats, ids beyond 32 bits, and a single id."""
    ids = array(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{name}[{number}] must be a list of token ids, got {prompt!r}; one prompt is [ids]")
    if ids.size and (ids.min() < INT32.min or ids.max() > INT32.max):
        raise ValueError(f"{name}[{number}] holds an id that does not fit in 32 bits")
    return ids.astype("<i4")


def candidate_ids(number: int, candidates: Any, count: int) -> Ids:
    """A set of candidates for each of `count` rows, [rows, K], of lists that may differ in length or an array; -1 is
    none.  Raises ValueError."""
    rows = array(candidates) if hasattr(candidates, "shape") else None
    if rows is None:
        width = max((len(row) for row in candidates), default=0)
        rows = np.array([[*row, *[-1] * (width - len(row))] for row in candidates]).reshape(len(candidates), width)
    if rows.ndim != 2 or len(rows) != count or (rows.size and rows.dtype.kind not in "iu"):
        raise ValueError(f"candidates[{number}] must be {count} rows of ids, one for each scored token")
    if rows.size and (rows.min() < -1 or rows.max() > INT32.max):
        raise ValueError(f"candidates[{number}] must hold ids, or -1 for none")
    return rows.astype("<i4")


def pack_npy(values: NDArray[Any]) -> bytes:
    """The bytes of an `.npy` file."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def read_candidates(ids: Ids, reply: Mapping[str, Any]) -> CandidateScores:
    """The scores of a whole reply."""
    names = ("prompt_token_id_logprobs", "prompt_rest_logprobs", "prompt_token_logprobs")
    return CandidateScores(ids, *(np.load(io.BytesIO(reply[name]), allow_pickle=False) for name in names))


def aborted_rollout(number: int, index: int, prompt: Ids, *, masks: bool = False) -> Rollout:
    """A choice of a prompt that was aborted before it was sent: no tokens, of no weights.  `masks`: whether it has the
    columns of `return_sampling_mask`."""
    return read_rollout(number, prompt, _aborted_choice(index, masks))


def aborted_delta(index: int, *, masks: bool = False) -> RolloutDelta:
    """The last delta of a choice of a stream that was aborted before it was sent."""
    return read_delta(_aborted_choice(index, masks))


def _aborted_choice(index: int, masks: bool) -> dict[str, Any]:
    """A choice of a reply, without tokens."""
    columns = {"sampling_mask": {"counts": b"", "ids": b""}, "sampling_logprobs": b"", "kept_logprob": b""}
    return {"index": index, "token_ids": b"", "logprobs": None, "finish_reason": "abort"} | (columns if masks else {})


def read_rollout(number: int, prompt: Ids, choice: Mapping[str, Any]) -> Rollout:
    """A choice of a whole reply."""
    columns = read_columns(choice)
    return Rollout(
        number,
        choice["index"],
        prompt,
        columns.token_ids,
        columns.logprobs,
        choice["finish_reason"],
        _spans(choice),
        columns.sampling_mask,
        columns.mask_truncated,
        columns.sampling_logprobs,
        columns.kept_logprob,
        _spans(choice, "prompt_weight_versions"),
    )


def read_delta(choice: Mapping[str, Any]) -> RolloutDelta:
    """A choice of an event."""
    return RolloutDelta(choice["index"], read_columns(choice), choice["finish_reason"], _spans(choice))


def read_columns(choice: Mapping[str, Any]) -> TokenColumns:
    """The columns of a choice, whole or of an event."""
    logprobs = choice["logprobs"]
    values = floats(b"" if logprobs is None else logprobs["token_logprobs"])
    columns = TokenColumns(packed_array(choice["token_ids"], "<i4"), values, None, None, None, None)
    if "sampling_mask" in choice:
        counts = packed_array(choice["sampling_mask"]["counts"], "<i4")
        parts = np.split(packed_array(choice["sampling_mask"]["ids"], "<i4"), np.maximum(counts, 0).cumsum())
        columns.sampling_mask = [
            None if count < 0 else ids for count, ids in zip(counts.tolist(), parts[:-1], strict=True)
        ]
        columns.mask_truncated = counts == TRUNCATED
        columns.sampling_logprobs = floats(choice["sampling_logprobs"])
        columns.kept_logprob = floats(choice["kept_logprob"])
    return columns


def floats(values: bytes | str | Sequence[float]) -> Floats:
    """A column of float32."""
    return packed_array(values, "<f4")


def packed_array(values: bytes | str | Sequence[Any], dtype: str) -> NDArray[Any]:
    """A column: packed bytes, the same in base64, or a list."""
    if isinstance(values, str):
        values = base64.b64decode(values)
    return np.frombuffer(values, dtype) if isinstance(values, bytes) else np.asarray(values, dtype)


def _spans(choice: Mapping[str, Any], name: str = "weight_versions") -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in choice.get(name) or ()]
