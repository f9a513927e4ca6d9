"""One step between the engine and the device: a `StepPlan` down, a `StepResult` up.

Columns of numpy arrays with a row per scheduled request; a slot number is the row's index in every device table.  The
scheduler writes plans without torch, and the runner executes them without policy.  Both are Structs that `encode` and a
decoder with `decode_hook` carry over a wire as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokserve.protocol.columns import ColumnRows
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.kv_spec import KVLayout
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.prompt import Feature

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt32 = NDArray[np.uint32]
UInt8 = NDArray[np.uint8]

OK, NOT_FINITE, NO_LEGAL_TOKEN, WITHHELD = range(4)  # status of a row
DRAWN = -1  # in place of each of a row's drafts: the device's draft model draws them


class DeviceFacts(msgspec.Struct, frozen=True):
    """What the executor knows once the model is loaded.

    `feature_bytes`: kinds of features that it takes, and the bytes of data for each placeholder id, 0 for any number.
    `images`: of a model that reads images.  `whole_prompts`: a step computes all tokens of a prompt or none.
    """

    layout: KVLayout
    vocab_size: int
    weight_version: str
    facts: dict[str, Any]
    feature_bytes: dict[str, int] = {}
    images: ImageFormat | None = None
    whole_prompts: bool = False


class NewRow(msgspec.Struct, frozen=True):
    """A request that enters a slot: at its first admission, or again after a preemption.

    `tokens`: int32[n], the prompt and the output so far; `prompt_len` tells them apart, for penalties.  `stop_ids`: ids
    that `min_tokens` keeps from being sampled (EOS, ignored or not, and stop_token_ids).  `adapter`: the slot of its
    adapter, -1 for none.  `snapshot`, `num_state`: the recurrent state that it begins with, -1 for none, and the
    position of that, which may be one more than it has computed.  `second`: as in `TokenPrompt`.  `columns`: names of
    the columns that it asks for.  `copied_block`: (source, target), a block that is copied before the step; the first
    positions that the request does not compute in `target` are those of `source`.
    """

    slot: int
    request_id: str
    tokens: Int32
    prompt_len: int
    task: SamplingParams | PoolingParams
    seed: int
    stop_ids: tuple[int, ...]
    adapter: int = -1
    features: tuple[Feature, ...] = ()
    snapshot: int = -1
    num_state: int = 0
    second: int = -1
    columns: tuple[str, ...] = ()
    copied_block: tuple[int, int] | None = None


class StepPlan(msgspec.Struct, frozen=True):
    """One step.  Row i computes `num_tokens[i]` positions from `num_computed[i]` on.

    The last `num_drafts[i]` of them are drafts, whose ids are in `draft_token_ids`, all rows one after the other; or
    DRAWN, for all drafts of a row that generates.
    `num_logits[i]`: for how many of the row's last positions a token is sampled: 0 in the middle of a prompt and for
    pooling, else `num_drafts[i]` + 1.  While an earlier step with drafts of the same request is in flight,
    `num_computed` counts all of them; the device subtracts those that were rejected.
    `blocks`: (slot, index in the slot's block table of the first, block ids) added since the last plan (all of a row's
    blocks when it enters).  `freed`: slots freed since the last plan.  `saves`: (slot, position, snapshot): the slot's
    recurrent state becomes the snapshot as it passes the position, if it does.  Order of application: freed, new,
    blocks, copied blocks, rows.
    """

    step: int
    slots: Int32
    num_tokens: Int32
    num_computed: Int32
    num_drafts: Int32
    num_logits: Int32
    draft_token_ids: Int32
    new: list[NewRow] = []
    blocks: list[tuple[int, int, list[int]]] = []
    freed: list[int] = []
    saves: list[tuple[int, int, int]] = []


class GrammarBitmask(msgspec.Struct, frozen=True):
    """Which ids the rows with a grammar may sample in a step: a bit per vocabulary id, the lowest first; 1 is allowed.

    `withheld`: slots of rows that must not sample now, as their mask is late or they have ended; their status is
    WITHHELD and the position is computed again.
    """

    slots: Int32  # [m]
    bits: UInt32  # [m, ceil(V / 32)]
    withheld: Int32  # [k]


class DraftPasses(msgspec.Struct, frozen=True):
    """What the draft model did in a step.  `behind`: the plan rows whose drafts are any ids, as the draft model has yet
    to catch up with their tokens."""

    seconds: float
    num_passes: int
    num_tokens: int  # of all passes
    behind: list[int] = []


class StepResult(msgspec.Struct, frozen=True):
    """What a plan brought, with a row per plan row.

    Row i has `counts[i]` new tokens: accepted drafts and one sampled token, 0 where nothing was sampled.  `token_ids`
    and `columns`, by name, hold all rows' tokens one after the other; a column is there if a row asks for it.
    `status[i]`: OK, NOT_FINITE (the logits held NaN or only -inf), NO_LEGAL_TOKEN (the request's own parameters left
    none) or WITHHELD; unless OK, the row has no token.  `values`, by name and plan row: "prompt_logprobs", the records
    [n, numbers] of the prompt tokens that follow this chunk's positions (token num_computed + 1 ...), as far as
    requested; "pooled", a vector; "routed_experts", uint8 or uint16 [n, layers, experts per token] of the row's last n
    positions, all of them if it enters its slot.  `draft_passes`: None if no row's
    drafts were drawn.  `saved`: the snapshots of the plan's `saves` that were taken.  `totals`: what
    features of the runner count since its start, by the names that their rooms report.
    """

    step: int
    counts: Int32
    token_ids: Int32
    status: UInt8
    columns: dict[str, ColumnRows] = {}
    values: dict[str, dict[int, NDArray[Any]]] = {}
    draft_passes: DraftPasses | None = None
    saved: list[int] = []
    totals: dict[str, int] = {}


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def decode_hook(kind: Any, value: Any) -> Any:
    """Arrays as `encode` packs them."""
    dtype, shape, packed = value
    return np.frombuffer(bytearray(packed), dtype).reshape(shape)  # one that may be written to


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
