"""The reference of state-space layers (Mamba-2), whose states go on as those of `ops/recurrent.py` do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokserve.ops.recurrent import TOLERANCE, convolve, state_walks
from tokserve.ops.registry import op
from tokserve.ops.serial import one_thread


@op(tolerance=TOLERANCE)
def scan_states(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    norm_weight: Tensor | None,
    norm_size: int,
    eps: float,
    low: float,
    high: float,
    state: Tensor,
    ring: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_rows: Tensor,
    start: Tensor,
    end: Tensor,
    saves: Tensor,
) -> Tensor:
    """State-space duality (Dao and Gu, arXiv 2405.21060) with its convolution and gated norm.

    x [T,N] are projections: the gate z and the input u of H heads of P elements, B and C of G groups of N elements, and
    dt [H], in the order z, u, B, C, dt.  u, B and C pass a causal convolution of K taps, `conv_weight` [K,C] and
    `conv_bias` [C], and SiLU.  For each head, with B and C of its group, the state S [N,P], zero at position 0, becomes

        step = min(max(softplus(dt + dt_bias), low), high)
        S = exp(-exp(a_log) step) S + B (step u)
        output = C S + skip u

    and is rounded to x's dtype.  Outputs are multiplied by silu(z); then, unless `norm_weight` [H*P] is None, each
    `norm_size` of a token's are divided by their root mean square, with `eps`, and multiplied by the weight.

    Returns the outputs [T,H*P].  `a_log`, `dt_bias`, `skip` [H] and other weights are float32.  In place: `state`
    [S,H,N,P] float32 and `ring` [S,W,C+H], whose entries are u, B, C and dt before the convolution.  The rest is as for
    `gated_delta`.
    """
    heads, size, dim = state.shape[1:]
    inner, channels = heads * dim, conv_weight.shape[1]
    gates, entries = x[:, :inner], x[:, inner:]
    out = x.new_zeros(x.shape[0], inner)
    with one_thread():
        for row in state_walks(entries, ring, query_start, seq_lens, state_rows, start, end, saves, conv_weight):
            memory = state[row.index].clone() if row.start else torch.zeros_like(state[0])
            for position, window in row.windows():
                mixed = convolve(window[:, :channels], conv_weight) + (0.0 if conv_bias is None else conv_bias)
                mixed = mixed * torch.sigmoid(mixed)
                u = mixed[:inner].view(heads, dim)
                b, c = mixed[inner:].view(2, -1, size, 1).repeat_interleave(2 * size * heads // (channels - inner), 1)
                if position >= row.start:
                    step = functional.softplus(window[-1, channels:].float() + dt_bias).clamp(low, high)[:, None, None]
                    memory = memory * torch.exp(-torch.exp(a_log)[:, None, None] * step) + b * (step * u[:, None])
                    for target in row.passed(position + 1):
                        state[target] = memory
                if position >= row.first:
                    token = row.token + position - row.first
                    out[token] = ((memory * c).sum(1) + skip[:, None] * u).view(-1).to(x.dtype)
            row.keep()
        return gate_outputs(out, gates, norm_weight, norm_size, eps)


def gate_outputs(out: Tensor, gates: Tensor, norm_weight: Tensor | None, norm_size: int, eps: float) -> Tensor:
    """Outputs times SiLU of their gates, [T,H*P] each, and the norm of each `norm_size` of a token's."""
    gates = gates.float()
    gated = out.float() * (gates * torch.sigmoid(gates))
    if norm_weight is not None:
        parts = gated.view(len(out), -1, norm_size)
        scale = torch.rsqrt(parts.square().mean(2, keepdim=True) + eps)
        gated = (parts * scale).view_as(gated) * norm_weight
    return gated.to(out.dtype)
