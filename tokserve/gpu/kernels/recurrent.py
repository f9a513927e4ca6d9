"""Layers with a recurrent state on the GPU: a program for each row and head takes the row's tokens one after the other.

Some columns of a head's state, which do not touch the others, are in a program's registers.  Inputs are put in the
order of the ring's entries first, and the rings are brought up to date in a launch of their own, since several programs
read the same entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT, cdiv, next_power_of_2, warps
from tokserve.gpu.kernels.sums import tree_sum
from tokserve.ops import recurrent, state_space

COLUMNS = 32  # of a state in a program
CHANNELS = 256  # of a program that convolves or copies


@triton.jit
def convolve(
    entries, ring, weight, channel, inside, position, first, channels, entry, TAPS: tl.constexpr, WINDOW: tl.constexpr
):
    """The convolution at a position, of some channels.  `entries`: of position `first` and those after it."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        after = channel * 0 + (position - first - (TAPS - 1) + tap)  # from the first new token on
        at = first + after
        new = tl.load(entries + after * entry + channel, mask=inside & (after >= 0), other=0.0)
        earlier = inside & (after < 0) & (at >= 0)
        old = tl.load(ring + (at + WINDOW) % WINDOW * entry + channel, mask=earlier, other=0.0)
        value = tl.where(after >= 0, new.to(tl.float32), old.to(tl.float32))
        total += tl.load(weight + tap * channels + channel, mask=inside, other=0.0) * value
    return total


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    more = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, more)


@triton.jit(do_not_specialize=["saves"])
def gated_delta_kernel(
    entries,
    weight,
    a_log,
    dt_bias,
    state,
    ring,
    reads,
    query_start,
    seq_lens,
    state_rows,
    starts,
    ends,
    save_ptr,
    saves,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """One row, some columns of one value head's state: what is read from it for each token [T,HEADS,VALUE]."""
    number, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + number).to(tl.int64)
    count = tl.load(query_start + number + 1) - token
    index = tl.load(state_rows + number)
    if (count > 0) & (index >= 0):
        length, start, end = tl.load(seq_lens + number), tl.load(starts + number), tl.load(ends + number)
        first = length - count
        keys: tl.constexpr = HEADS // GROUP * KEY
        entry: tl.constexpr = CHANNELS + 2 * HEADS
        key, value = tl.arange(0, KEY_BLOCK), tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
        is_key, is_value = key < KEY, value < VALUE
        inside = is_key[:, None] & is_value[None, :]
        place = head * KEY * VALUE + key[:, None] * VALUE + value[None, :]
        size: tl.constexpr = HEADS * KEY * VALUE
        memory = tl.zeros([KEY_BLOCK, VALUE_BLOCK], tl.float32)
        if start > 0:
            memory = tl.load(state + index * size + place, mask=inside, other=0.0)
        ring_row, rows = ring + index * WINDOW * entry, entries + token * entry
        rate = tl.exp(tl.load(a_log + head))
        bias = tl.load(dt_bias + head)
        for position in range(tl.minimum(start, first), length):
            q = silu(
                convolve(
                    rows,
                    ring_row,
                    weight,
                    head // GROUP * KEY + key,
                    is_key,
                    position,
                    first,
                    CHANNELS,
                    entry,
                    TAPS,
                    WINDOW,
                )
            )
            k = silu(
                convolve(
                    rows,
                    ring_row,
                    weight,
                    keys + head // GROUP * KEY + key,
                    is_key,
                    position,
                    first,
                    CHANNELS,
                    entry,
                    TAPS,
                    WINDOW,
                )
            )
            q = q * tl.rsqrt(tree_sum(q * q) + NORM_EPS) * (KEY**-0.5)
            k = k * tl.rsqrt(tree_sum(k * k) + NORM_EPS)
            if position >= start:
                v = silu(
                    convolve(
                        rows,
                        ring_row,
                        weight,
                        2 * keys + head * VALUE + value,
                        is_value,
                        position,
                        first,
                        CHANNELS,
                        entry,
                        TAPS,
                        WINDOW,
                    )
                )
                if position >= first:
                    both = rows + (position - first) * entry + CHANNELS + head
                else:
                    both = ring_row + position % WINDOW * entry + CHANNELS + head
                b, a = tl.load(both).to(tl.float32), tl.load(both + HEADS).to(tl.float32)
                memory = memory * tl.exp(-rate * softplus(a + bias))
                change = (v - tl.sum(memory * k[:, None], 0)) / (1.0 + tl.exp(-b))
                memory = memory + k[:, None] * change[None, :]
                if position + 1 == end:
                    tl.store(state + index * size + place, memory, mask=inside)
                for save in range(saves):
                    owner, until = tl.load(save_ptr + 3 * save), tl.load(save_ptr + 3 * save + 1)
                    if (owner == number) & (until == position + 1):
                        target = tl.load(save_ptr + 3 * save + 2).to(tl.int64)
                        tl.store(state + target * size + place, memory, mask=inside)
            if position >= first:
                at = ((token + position - first) * HEADS + head) * VALUE + value
                tl.store(reads + at, tl.sum(memory * q[:, None], 0), mask=is_value)


@triton.jit
def gate_reads_kernel(reads, gates, norm_weight, eps, out, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one token: the norm of what was read, gated."""
    value = tl.arange(0, BLOCK)
    inside = value < VALUE
    at = tl.program_id(0).to(tl.int64) * VALUE + value
    read = tl.load(reads + at, mask=inside, other=0.0)
    root = tl.rsqrt(tree_sum(read * read) / VALUE + eps)
    weight = tl.load(norm_weight + value, mask=inside, other=0.0)
    gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (read * root * weight * silu(gate)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["saves"])
def keep_inputs_kernel(
    entries,
    ring,
    query_start,
    seq_lens,
    state_rows,
    save_ptr,
    saves,
    ENTRY: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one row: the inputs that go with snapshots into their rings, then the new ones into its own."""
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < ENTRY
    token = tl.load(query_start + number).to(tl.int64)
    count = tl.load(query_start + number + 1) - token
    index = tl.load(state_rows + number)
    if (count > 0) & (index >= 0):
        length = tl.load(seq_lens + number)
        first = length - count
        rows, ring_row = entries + token * ENTRY + channel, ring + index * WINDOW * ENTRY + channel
        for save in range(saves):
            if tl.load(save_ptr + 3 * save) == number:
                until = tl.load(save_ptr + 3 * save + 1)
                target = ring + tl.load(save_ptr + 3 * save + 2).to(tl.int64) * WINDOW * ENTRY + channel
                for position in range(tl.maximum(0, until - TAPS), until):
                    if position >= first:
                        one = tl.load(rows + (position - first) * ENTRY, mask=inside, other=0.0)
                    else:
                        one = tl.load(ring_row + position % WINDOW * ENTRY, mask=inside, other=0.0)
                    tl.store(target + position % WINDOW * ENTRY, one, mask=inside)
        for position in range(tl.maximum(first, length - WINDOW), length):
            one = tl.load(rows + (position - first) * ENTRY, mask=inside, other=0.0)
            tl.store(ring_row + position % WINDOW * ENTRY, one, mask=inside)


@triton.jit
def short_conv_kernel(
    entries,
    x,
    weight,
    bias,
    ring,
    out,
    query_start,
    seq_lens,
    state_rows,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one row."""
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    token = tl.load(query_start + number).to(tl.int64)
    count = tl.load(query_start + number + 1) - token
    index = tl.load(state_rows + number)
    if (count > 0) & (index >= 0):
        length = tl.load(seq_lens + number)
        first = length - count
        rows, ring_row = entries + token * CHANNELS, ring + index * WINDOW * CHANNELS
        for position in range(first, length):
            mixed = convolve(rows, ring_row, weight, channel, inside, position, first, CHANNELS, CHANNELS, TAPS, WINDOW)
            if HAS_BIAS:
                mixed += tl.load(bias + channel, mask=inside, other=0.0)
            at = token + position - first
            gate = tl.load(x + (3 * at + 1) * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + at * CHANNELS + channel, (gate * mixed).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["saves"])
def scan_states_kernel(
    entries,
    weight,
    conv_bias,
    a_log,
    dt_bias,
    skip,
    low,
    high,
    state,
    ring,
    reads,
    query_start,
    seq_lens,
    state_rows,
    starts,
    ends,
    save_ptr,
    saves,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    ENTRY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """One row, some columns of one head's state: its outputs without their gates [T,HEADS,DIM]."""
    number, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + number).to(tl.int64)
    count = tl.load(query_start + number + 1) - token
    index = tl.load(state_rows + number)
    if (count > 0) & (index >= 0):
        length, start, end = tl.load(seq_lens + number), tl.load(starts + number), tl.load(ends + number)
        first = length - count
        inner: tl.constexpr = HEADS * DIM
        of_group: tl.constexpr = (CHANNELS - inner) // 2
        key, value = tl.arange(0, SIZE_BLOCK), tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
        is_key, is_value = key < SIZE, value < DIM
        inside = is_key[:, None] & is_value[None, :]
        place = head * SIZE * DIM + key[:, None] * DIM + value[None, :]
        size: tl.constexpr = HEADS * SIZE * DIM
        memory = tl.zeros([SIZE_BLOCK, DIM_BLOCK], tl.float32)
        if start > 0:
            memory = tl.load(state + index * size + place, mask=inside, other=0.0)
        ring_row, rows = ring + index * WINDOW * ENTRY, entries + token * ENTRY
        rate, bias, direct = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
        b_channel = inner + head // GROUP * SIZE + key
        c_channel, u_channel = b_channel + of_group, head * DIM + value
        for position in range(tl.minimum(start, first), length):
            b = convolve(rows, ring_row, weight, b_channel, is_key, position, first, CHANNELS, ENTRY, TAPS, WINDOW)
            c = convolve(rows, ring_row, weight, c_channel, is_key, position, first, CHANNELS, ENTRY, TAPS, WINDOW)
            u = convolve(rows, ring_row, weight, u_channel, is_value, position, first, CHANNELS, ENTRY, TAPS, WINDOW)
            if HAS_BIAS:
                b += tl.load(conv_bias + b_channel, mask=is_key, other=0.0)
                c += tl.load(conv_bias + c_channel, mask=is_key, other=0.0)
                u += tl.load(conv_bias + u_channel, mask=is_value, other=0.0)
            b, c, u = silu(b), silu(c), silu(u)
            if position >= start:
                if position >= first:
                    dt = tl.load(rows + (position - first) * ENTRY + CHANNELS + head).to(tl.float32)
                else:
                    dt = tl.load(ring_row + position % WINDOW * ENTRY + CHANNELS + head).to(tl.float32)
                step = tl.minimum(tl.maximum(softplus(dt + bias), low), high)
                memory = memory * tl.exp(-rate * step) + b[:, None] * (step * u)[None, :]
                if position + 1 == end:
                    tl.store(state + index * size + place, memory, mask=inside)
                for save in range(saves):
                    owner, until = tl.load(save_ptr + 3 * save), tl.load(save_ptr + 3 * save + 1)
                    if (owner == number) & (until == position + 1):
                        target = tl.load(save_ptr + 3 * save + 2).to(tl.int64)
                        tl.store(state + target * size + place, memory, mask=inside)
            if position >= first:
                at = ((token + position - first) * HEADS + head) * DIM + value
                read = tl.sum(memory * c[:, None], 0) + direct * u
                tl.store(reads + at, read.to(reads.dtype.element_ty), mask=is_value)


@triton.jit
def gate_outputs_kernel(
    out, gates, stride, norm_weight, eps, GROUPS: tl.constexpr, SIZE: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token, in place: gated, then divided by their root mean square."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = group * SIZE + column
    gate = tl.load(gates + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    place = out + token * GROUPS * SIZE + at
    gated = tl.load(place, mask=inside, other=0.0).to(tl.float32) * silu(gate)
    if HAS_NORM:
        root = tl.rsqrt(tree_sum(gated * gated) / SIZE + eps)
        gated = gated * root * tl.load(norm_weight + at, mask=inside, other=0.0)
    tl.store(place, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_heads_kernel(mixed, x, out, x_stride, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    at = (token * HEADS + head) * DIM + column
    gate = tl.load(x + token * x_stride + (2 * head + 1) * DIM + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty), mask=inside)


@recurrent.gated_delta.implement("triton", device="cuda")
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
    """The reference, but for the order of sums over the elements of a key."""
    heads, key_dim, value_dim = state.shape[1:]
    taps, channels = conv_weight.shape
    sizes = recurrent.Sizes(heads, key_dim, value_dim, channels)
    entries, gates = (part.contiguous() for part in sizes.split(x, rates, grouped))
    reads = x.new_zeros((x.shape[0], heads, value_dim), dtype=torch.float32)  # zero for rows without a state
    out = x.new_empty(x.shape[0], heads * value_dim)
    if len(seq_lens) and len(x):
        key_block, value_block = next_power_of_2(key_dim), next_power_of_2(value_dim)
        columns = min(COLUMNS, value_block)
        gated_delta_kernel[(len(seq_lens), heads, cdiv(value_dim, columns))](
            entries,
            conv_weight,
            a_log,
            dt_bias,
            state,
            ring,
            reads,
            query_start,
            seq_lens,
            state_rows,
            start,
            end,
            saves,
            len(saves),
            heads,
            heads // sizes.key_heads,
            key_dim,
            value_dim,
            channels,
            taps,
            ring.shape[1],
            key_block,
            columns,
            recurrent.NORM_EPS,
            num_warps=4,
            **EXACT,
        )
        gate_reads_kernel[(x.shape[0] * heads,)](
            reads, gates, norm_weight, eps, out, value_dim, value_block, num_warps=warps(value_block), **EXACT
        )
        _keep_inputs(entries, ring, query_start, seq_lens, state_rows, saves, taps)
    return out


@recurrent.short_conv.implement("triton", device="cuda")
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
    """The reference."""
    taps, channels = conv_weight.shape
    before, _, inner = x.chunk(3, dim=1)
    entries = (before.float() * inner.float()).to(x.dtype)
    out = torch.zeros_like(entries)
    if len(seq_lens) and len(x):
        short_conv_kernel[(len(seq_lens), cdiv(channels, CHANNELS))](
            entries,
            x,
            conv_weight,
            conv_weight if bias is None else bias,
            ring,
            out,
            query_start,
            seq_lens,
            state_rows,
            channels,
            taps,
            ring.shape[1],
            bias is not None,
            CHANNELS,
            num_warps=warps(CHANNELS),
            **EXACT,
        )
        _keep_inputs(entries, ring, query_start, seq_lens, state_rows, saves, taps)
    return out


@state_space.scan_states.implement("triton", device="cuda")
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
    """The reference, but for the order of sums over the elements of a group's B and C."""
    heads, size, dim = state.shape[1:]
    taps, channels = conv_weight.shape
    inner = heads * dim
    entries, out = x[:, inner:].contiguous(), x.new_zeros(x.shape[0], inner)  # zero for rows without a state
    if len(seq_lens) and len(x):
        dim_block, block = min(COLUMNS, next_power_of_2(dim)), next_power_of_2(norm_size)
        scan_states_kernel[(len(seq_lens), heads, cdiv(dim, dim_block))](
            entries,
            conv_weight,
            conv_weight if conv_bias is None else conv_bias,
            a_log,
            dt_bias,
            skip,
            low,
            high,
            state,
            ring,
            out,
            query_start,
            seq_lens,
            state_rows,
            start,
            end,
            saves,
            len(saves),
            heads,
            heads * 2 * size // (channels - inner),
            size,
            dim,
            channels,
            taps,
            ring.shape[1],
            channels + heads,
            conv_bias is not None,
            next_power_of_2(size),
            dim_block,
            num_warps=4,
            **EXACT,
        )
        gate_outputs_kernel[(x.shape[0], inner // norm_size)](
            out,
            x,
            x.stride(0),
            conv_weight if norm_weight is None else norm_weight,
            eps,
            inner // norm_size,
            norm_size,
            norm_weight is not None,
            block,
            num_warps=warps(block),
            **EXACT,
        )
        _keep_inputs(entries, ring, query_start, seq_lens, state_rows, saves, taps)
    return out


@recurrent.gate_heads.implement("triton", device="cuda")
def gate_heads(mixed: Tensor, x: Tensor) -> Tensor:
    tokens, heads, dim = mixed.shape
    out = mixed.new_empty(tokens, heads * dim)
    if tokens:
        block = next_power_of_2(dim)
        gate_heads_kernel[(tokens, heads)](
            mixed, x, out, x.stride(0), heads, dim, block, num_warps=warps(block), **EXACT
        )
    return out


def _keep_inputs(
    entries: Tensor, ring: Tensor, query_start: Tensor, seq_lens: Tensor, state_rows: Tensor, saves: Tensor, taps: int
) -> None:
    width = entries.shape[1]
    keep_inputs_kernel[(len(seq_lens), cdiv(width, CHANNELS))](
        entries,
        ring,
        query_start,
        seq_lens,
        state_rows,
        saves,
        len(saves),
        width,
        taps,
        ring.shape[1],
        CHANNELS,
        num_warps=warps(CHANNELS),
        **EXACT,
    )
