"""What one forward pass works on: the only thing that is passed down through a model.

Rows are requests, tokens of all rows lie one after the other.  The runner builds it from its device tables; layers
read it and never keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Tap = Callable[[int, Tensor], None]
Pages = list[tuple[Tensor, ...]]  # per layer: the tensors of its spec; keys and values are each [B, Hk, P, D]


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Tokens whose hidden states are needed after the last layer: the last ones of R' of a batch's rows, any number of
    each.  `query_start`, `seq_lens`, `block_tables` and `bidirectional` are what attention reads of these rows, as in
    `ForwardBatch`."""

    tokens: Tensor  # [n] int64: their indices in the batch, ascending
    query_start: Tensor  # [R' + 1] int32
    seq_lens: Tensor  # [R'] int32
    block_tables: Tensor  # [R', max_blocks] int32
    adapters: Tensor | None = None  # [n] int32
    bidirectional: Tensor | None = None  # [R'] bool


@dataclass(frozen=True, slots=True)
class StateRows:
    """The recurrent states of a batch's rows, as the ops in `ops/recurrent` take them.

    `rows`: the state of each row.  `start` and `end`: the positions that it belongs to before and after.
    `saves`: batch row (negative: none), position, and the state that is to be that position's copy.
    """

    rows: Tensor  # [R] int64
    start: Tensor  # [R] int32
    end: Tensor  # [R] int32
    saves: Tensor  # [n, 3] int32, ascending


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R rows.  Row r owns tokens query_start[r]:query_start[r + 1], its last positions.

    `seq_lens[r]` counts the row's tokens up to and including these.  Page `block_tables[r, i]` of every
    layer's cache holds its positions i*P .. i*P + P - 1 (P tokens in a page); entries past its length
    are never read.  `slot_mapping[t]` = page * P + offset is where token t's key and value go.
    `logits_rows`: the tokens whose hidden states are needed; for the others the last layer computes keys and values
    only.  None: all.  `adapters`: the slot of each token's adapter, negative for none; None: no token has one.
    `routed`: a list to which the layers with experts append the chosen ones [T, k] int32; with it, all tokens are
    computed in all layers.
    `states`: of a model with recurrent states; a layer's are in `kv`.
    `embeds`: tokens whose embeddings are given, not looked up: inputs of the first layer, any multiplier applied.
    `added`: tokens, and what is added to the outputs of the first layers at them.
    `axes`: the tokens' positions in the rope tables by coordinate; None: `positions`, for all.
    `token_types`: of tokens of pairs, 0 for the first text and 1 for the second; None: all are 0.
    `bidirectional`: rows whose tokens see each other, later ones too; None: no row.  A request's tokens may be several
    rows then, one after the other.
    `tap`: called in a forward pass with a number of layers and the hidden states [T, hidden] after so many, 0 to all;
    those after the last one are what the head reads.  The states are overwritten later.  With it, as with `routed`.
    `work`: what `attention_work`, or a kind of layer itself, made of these rows in this pass, by the kind of layer.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32
    block_tables: Tensor  # [R, max_blocks] int32
    slot_mapping: Tensor  # [T] int64
    kv: Pages
    logits_rows: LogitsRows | None = None
    adapters: Tensor | None = None  # [T] int32
    routed: list[Tensor] | None = None
    states: StateRows | None = None
    embeds: tuple[Tensor, Tensor] | None = None  # indices in the batch [m] int64, embeddings [m, hidden]
    added: tuple[Tensor, Tensor] | None = None  # indices in the batch [m] int64, [layers, m, hidden]
    axes: Tensor | None = None  # [3, T] int64
    bidirectional: Tensor | None = None  # [R] bool
    token_types: Tensor | None = None  # [T] int64
    tap: Tap | None = None
    work: dict[tuple[Any, ...], Any] = field(default_factory=dict)
