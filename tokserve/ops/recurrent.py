"""References of layers whose memory of a sequence has a fixed size: the gated delta rule and the short convolution.

A row's state belongs to a position: it holds what the tokens before that position leave behind.  Every token is taken
by itself, in order, in float32, so the bits of a token and of a state depend on the tokens up to it alone, not on where
a chunk ends.

The last inputs of a convolution are in a ring: input p of state row s is `ring[s, p % W]`.  A row that goes back to an
earlier position needs no copy of its ring, and the inputs of drafts are in it, so the state need not include them: it
stops at `end`, and the next step brings it up to date from the ring before its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tokserve.ops.registry import op
from tokserve.ops.serial import one_thread

TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (8e-3, 1.6e-2), torch.float16: (1e-3, 2e-3)}
NORM_EPS = 1e-6  # of the norms of queries and keys


@op(tolerance=TOLERANCE)
def gated_delta(
    x: Tensor,
    rates: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    grouped: bool,
    state: Tensor,
    ring: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_rows: Tensor,
    start: Tensor,
    end: Tensor,
    saves: Tensor,
) -> Tensor:
    """The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464) with its convolution and output norm.

    x [T,N] are projections: q and k of Hk heads of Dk, v and the gate z of Hv heads of Dv, one after the other, or
    `grouped`: by key head its q, k, v and z.  `rates` [T,2*Hv] are b, then a, or by key head its b and a.  q, k, v [C]
    pass a causal convolution of K taps, `conv_weight` [K,C], and SiLU; then q and k are divided by their norms, q by
    sqrt(Dk) too.  For each v head the state S [Dk,Dv], zero at position 0, becomes, in this order,

        S = exp(-exp(a_log) softplus(a + dt_bias)) S
        S = S + k (sigmoid(b) (v - k S))
        output = rms_norm(q S) * norm_weight * silu(z)

    Returns the outputs [T,Hv*Dv].  `a_log`, `dt_bias` [Hv], `norm_weight` [Dv] and `conv_weight` are float32.

    In place: `state` [S,Hv,Dk,Dv] float32 and `ring` [S,W,C+2*Hv], whose entries are q, k, v, b, a.  Row r of the batch
    has state row `state_rows[r]` int64.  On entry that is the state of position `start[r]` int32, on return of
    `end[r]`, at most the row's length.  A row without a state has a negative `state_rows[r]`; its outputs are zero.
    `start` may be less than the row's first position, by at most W - K tokens, which are then taken from the ring; or
    more by one: the first token is in the state, and its output is made again.
    `saves` [n,3] int32, ascending: as batch row saves[i,0], negative for none, passes position saves[i,1], its state
    is copied to state row saves[i,2].
    """
    sizes = Sizes(state.shape[1], state.shape[2], state.shape[3], conv_weight.shape[1])
    entries, gates = sizes.split(x, rates, grouped)
    out = x.new_zeros(x.shape[0], sizes.heads * sizes.value_dim)
    with one_thread():
        for row in state_walks(entries, ring, query_start, seq_lens, state_rows, start, end, saves, conv_weight):
            memory = state[row.index].clone() if row.start else torch.zeros_like(state[0])
            for position, window in row.windows():
                q, k, v, b, a = sizes.parts(window, conv_weight)
                if position >= row.start:
                    memory = delta_rule(memory, k, v, -torch.exp(a_log) * functional.softplus(a + dt_bias), b)
                    for target in row.passed(position + 1):
                        state[target] = memory
                if position >= row.first:
                    read = (memory * q[:, :, None]).sum(1)  # [Hv,Dv]
                    scale = torch.rsqrt(read.square().mean(1, keepdim=True) + eps)
                    token = row.token + position - row.first
                    gate = gates[token].float()
                    out[token] = (read * scale * norm_weight * (gate * torch.sigmoid(gate))).view(-1).to(x.dtype)
            row.keep()
    return out


@op(tolerance=TOLERANCE)
def short_conv(
    x: Tensor,
    conv_weight: Tensor,
    bias: Tensor | None,
    ring: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_rows: Tensor,
    start: Tensor,
    end: Tensor,
    saves: Tensor,
) -> Tensor:
    """A gated causal convolution: c * (conv(b * u) + bias) of x [T,3C], which are b, c and u; [T,C].

    `conv_weight` [K,C] and `bias` [C] are float32.  `ring` [S,W,C] keeps the products b * u, and is all that a state
    has; the rest is as for `gated_delta`.
    """
    before, after, inner = x.chunk(3, dim=1)
    entries = (before.float() * inner.float()).to(x.dtype)
    out = torch.zeros_like(entries)
    for row in state_walks(entries, ring, query_start, seq_lens, state_rows, start, end, saves, conv_weight):
        for position, window in row.windows():
            for _ in row.passed(position + 1):
                pass
            if position >= row.first:
                token = row.token + position - row.first
                mixed = convolve(window, conv_weight)
                out[token] = (after[token].float() * (mixed if bias is None else mixed + bias)).to(x.dtype)
        row.keep()
    return out


@op(tolerance=TOLERANCE)
def gate_heads(mixed: Tensor, x: Tensor) -> Tensor:
    """mixed [T,H,D] times sigmoid(gate): [T,H*D].  The gate of head h is x[:, (2h+1)*D : (2h+2)*D], x [T,N]."""
    tokens, heads, dim = mixed.shape
    gate = x[:, : 2 * heads * dim].reshape(tokens, heads, 2, dim)[:, :, 1].float()
    return (mixed.float() / (1 + torch.exp(-gate))).to(x.dtype).view(tokens, heads * dim)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a gated delta layer: v heads, elements of a key and of a value, channels of the convolution."""

    heads: int
    key_dim: int
    value_dim: int
    channels: int

    @property
    def key_heads(self) -> int:
        return (self.channels - self.heads * self.value_dim) // (2 * self.key_dim)

    def split(self, x: Tensor, rates: Tensor, grouped: bool) -> tuple[Tensor, Tensor]:
        """Entries of the ring [T,C+2*Hv], and gates [T,Hv,Dv]."""
        values = self.heads * self.value_dim
        if not grouped:
            mixed, gates = torch.split(x, [self.channels, values], 1)
        else:
            of_head, group = values // self.key_heads, self.heads // self.key_heads
            parts = x.reshape(-1, self.key_heads, 2 * self.key_dim + 2 * of_head)
            *qkv, gates = torch.split(parts, [self.key_dim, self.key_dim, of_head, of_head], 2)
            mixed = torch.cat([part.flatten(1) for part in qkv], 1)
            rates = torch.cat([part.flatten(1) for part in rates.reshape(-1, self.key_heads, 2 * group).chunk(2, 2)], 1)
        return torch.cat((mixed, rates), 1), gates.reshape(-1, self.heads, self.value_dim)

    def parts(self, window: Tensor, conv_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The parts of the last of K entries: q and k [Hv,Dk], v [Hv,Dv], b and a [Hv], in float32."""
        mixed = convolve(window[:, : self.channels], conv_weight)
        mixed = mixed * torch.sigmoid(mixed)
        keys = self.key_heads * self.key_dim
        queries, k, v = torch.split(mixed, [keys, keys, self.heads * self.value_dim])

        def unit(heads: Tensor) -> Tensor:
            heads = heads.view(-1, self.key_dim)
            heads = heads * torch.rsqrt(heads.square().sum(1, keepdim=True) + NORM_EPS)
            return heads.repeat_interleave(self.heads // self.key_heads, 0)

        b, a = window[-1, self.channels :].float().chunk(2)
        return unit(queries) * self.key_dim**-0.5, unit(k), v.view(self.heads, self.value_dim), b, a


def delta_rule(memory: Tensor, k: Tensor, v: Tensor, log_rate: Tensor, b: Tensor) -> Tensor:
    """The memory [Hv,Dk,Dv] after one more token."""
    memory = memory * torch.exp(log_rate)[:, None, None]
    change = (v - (memory * k[:, :, None]).sum(1)) * torch.sigmoid(b)[:, None]  # [Hv,Dv]
    return memory + k[:, :, None] * change[:, None, :]


def convolve(window: Tensor, weight: Tensor) -> Tensor:  # [K,C] twice -> [C] float32
    """The last output of a convolution, oldest input first."""
    total = torch.zeros(weight.shape[1])
    for tap in range(weight.shape[0]):
        total = total + window[tap].float() * weight[tap]
    return total


@dataclass(slots=True)
class StateWalk:
    """One row of a batch: its positions from `begin` on, where the state goes on or the first output is made.

    `index`: its state row; `token`: of the batch, its first, at position `first`.  `inputs`: the ring's entries of the
    positions from `begin` - K + 1 on; those before position 0 are zero.
    """

    index: int
    token: int
    first: int
    length: int
    start: int
    end: int
    saves: dict[int, int]
    inputs: Tensor
    ring: Tensor
    taps: int

    @property
    def begin(self) -> int:
        return min(self.start, self.first)

    def windows(self) -> Iterator[tuple[int, Tensor]]:
        """Each position with the last K inputs [K,C]."""
        for position in range(self.begin, self.length):
            offset = position - self.begin
            yield position, self.inputs[offset : offset + self.taps]

    def passed(self, position: int) -> Iterator[int]:
        """State rows that the state of this position belongs into; the entries that go with it are copied."""
        if position == self.end:
            yield self.index
        if position in self.saves:
            target = self.saves[position]
            self._put(target, range(max(0, position - self.taps), position))
            yield target

    def keep(self) -> None:
        """Put the new inputs into the row's own ring."""
        self._put(self.index, range(max(self.first, self.length - self.ring.shape[1]), self.length))

    def _put(self, target: int, positions: range) -> None:
        for position in positions:
            self.ring[target, position % self.ring.shape[1]] = self.inputs[position - self.begin + self.taps - 1]


def state_walks(
    entries: Tensor,
    ring: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_rows: Tensor,
    start: Tensor,
    end: Tensor,
    saves: Tensor,
    conv_weight: Tensor,
) -> Iterator[StateWalk]:
    """The rows of a batch that have tokens.  Raises ValueError for a state that cannot go on from where it is."""
    taps, width = conv_weight.shape[0], ring.shape[1]
    saved = saves.tolist()
    columns = zip(
        query_start.tolist(),
        query_start[1:].tolist(),
        seq_lens.tolist(),
        state_rows.tolist(),
        start.tolist(),
        end.tolist(),
        strict=False,
    )
    for number, (token, after, length, index, begin, stop) in enumerate(columns):
        if after == token or index < 0:
            continue
        first = length - (after - token)
        if not (first - (width - taps) <= begin <= first + 1 and begin <= stop <= length):
            raise ValueError(f"row {number} computes from position {first} on, but its state is that of {begin}")
        low = min(begin, first) - taps + 1
        inputs = entries.new_zeros(length - low, entries.shape[1])
        for position in range(max(0, low), first):
            inputs[position - low] = ring[index, position % width]
        inputs[first - low :] = entries[token:after]
        targets = {position: target for row, position, target in saved if row == number}
        yield StateWalk(index, token, first, length, begin, stop, targets, inputs, ring, taps)
