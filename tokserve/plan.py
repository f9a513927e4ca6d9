"""What the engine and the device say to each other: one `StepPlan` down, one `StepResult` up, per step.

Columns of numpy arrays, a row per scheduled request; the slot number is the row's place in every
device table.  The scheduler writes plans without torch, the runner executes them without policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokserve.params import SamplingParams

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one attention layer stores per token: K and V of `heads` x `dim` elements of `dtype`.

    `window` > 0: attention reads only the last `window` tokens.
    """

    heads: int
    dim: int
    dtype: str
    window: int = 0

    def bytes_per_token(self) -> int:
        """Bytes of K plus V for one token of one layer."""
        return 2 * self.heads * self.dim * {"float32": 4, "float8_e4m3fn": 1}.get(self.dtype, 2)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The cache a model needs: a spec per layer, and how many pages of how many tokens there are."""

    specs: tuple[KVSpec, ...]
    num_blocks: int
    block_size: int

    def bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.block_size * sum(spec.bytes_per_token() for spec in self.specs)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the executor knows once the model is loaded."""

    layout: KVLayout
    vocab_size: int
    weight_version: str
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that enters a slot (first admission, or again after a preemption).

    `tokens`: prompt and the output so far.  `prompt_len` tells them apart, for penalties.
    `stop_ids`: ids that `min_tokens` keeps from being drawn (EOS, ignored or not, and stop_token_ids).
    `seed`: never None; the request's own or one drawn by the front end.  `adapter`: the slot of its adapter, -1: none.
    """

    slot: int
    rid: str
    tokens: Int32
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class Masks:
    """What rows may draw in a step: a bit per vocabulary id, the lowest first; 1 is allowed."""

    slots: Int32  # [m]
    words: UInt32  # [m, ceil(V / 32)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.  Columns `slots .. samples` have a row per scheduled request, in order.

    Row i computes positions num_computed[i] .. num_computed[i] + num_tokens[i] - 1.  `samples[i]`: the
    last of them is the newest token, so a new token is drawn; its result is written to the slot's next
    position on the device.  `blocks`: (slot, index in the slot's block table of the first, block ids)
    appended since the last plan (all of a row's blocks when it enters).  `done`: slots freed since the last plan.
    `masks`: of the rows with `samples` whose request has a grammar; None if there are none.
    Order of application: done, new, blocks, columns.
    """

    step: int
    slots: Int32
    num_tokens: Int32
    num_computed: Int32
    samples: NDArray[np.bool_]
    new: list[NewRow] = field(default_factory=list)
    blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    masks: Masks | None = None

    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return int(self.num_tokens.sum())

    def summary(self) -> str:
        """One line for the log of a crash; no token values."""
        return (
            f"step {self.step}: {len(self.slots)} rows, {self.total_tokens()} tokens, {len(self.new)} new, "
            f"slots {self.slots.tolist()}, num_tokens {self.num_tokens.tolist()}, "
            f"num_computed {self.num_computed.tolist()}"
        )


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Logprobs of n rows; columns of the top part past a row's own width are unspecified.

    A row's width is top-k plus the ids asked for by name, in that order.
    """

    token_logprobs: Float32  # [n]
    ranks: Int32  # [n], 1 = most probable
    top_ids: Int32  # [n, width]
    top_logprobs: Float32  # [n, width]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan.  `token_ids`, `finite` and `logprobs` have a row per plan row with `samples`,
    in plan order; `logprobs` is None if no row asked for any.  `finite` False: there was nothing to draw from, and
    the token is meaningless; with `forbidden` (None: nowhere) because of the request's parameters, else because the
    logits held NaN or only -inf.  `prompt_logprobs`: plan row -> rows for the prompt tokens that follow this chunk's
    positions (token num_computed + 1 ..), restricted to those that the request asks for.
    """

    step: int
    token_ids: Int32
    finite: NDArray[np.bool_]
    logprobs: LogprobRows | None = None
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    forbidden: NDArray[np.bool_] | None = None
