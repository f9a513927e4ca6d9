"""The exactness contract, with ==: a row's bits do not depend on other rows, on chunks or on threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import pages
from tests.ops.packing import pack_arguments
from tests.ops.samples import samples
from tests.ops.samples.common import normal as randn
from tests.tiers import paired
from tokserve import ops  # noqa: F401  (declares the ops)
from tokserve.ops import registry
from tokserve.ops.registry import OPS

registry.load_extension("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MOST = 70  # rows
PACKING = {
    "linear": "pack_linear",
    "linear_int8": "pack_linear_int8",
    "gated_linear": "pack_gated",
    "gated_linear_int8": "pack_gated_int8",
}
Outputs = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every(*names: str) -> pytest.MarkDecorator:
    """Parametrise over (op name, function) of all implementations of these ops that run here; references are slow."""
    return pytest.mark.parametrize(
        ("name", "call"),
        [
            pytest.param(
                name,
                OPS[name].implementations[one].call,
                id=f"{name}-{one}",
                marks=[pytest.mark.slow] if one == "torch" and len(OPS[name].available("cpu")) > 1 else [],
            )
            for name in names
            for one in OPS[name].available("cpu")
        ],
    )


def outputs(result: Tensor | Outputs) -> Outputs:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def same(left: Outputs, right: Outputs) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))


def rows_are_batch_invariant(call: Callable[[Tensor], Tensor | Outputs], count: int = MOST, trials: int = 16) -> None:
    """`call` maps row numbers [M] to their outputs; a row's outputs depend neither on M nor on the other rows."""
    all_rows = outputs(call(torch.arange(count)))
    rng = random.Random(count)
    sizes = [1, 2, 3, count - 1, *(rng.randint(1, count) for _ in range(trials))]
    for size in sizes:
        rows = torch.tensor(rng.choices(range(count), k=size))
        same(outputs(call(rows)), tuple(x[rows] for x in all_rows))
    for threads in (2, 5):
        torch.set_num_threads(threads)
        same(outputs(call(torch.arange(count))), all_rows)
        same(outputs(call(torch.arange(1))), tuple(x[:1] for x in all_rows))
    torch.set_num_threads(1)


@pytest.mark.parametrize(("width", "dtype"), paired([1, 5, 33, 64, 192, 1001], DTYPES))
@every(
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "add_residual",
    "cap",
    "scale_by_position",
    "norm_values",
    "gate_inputs",
    "activate",
    "silu_mul",
    "gelu_mul",
    "activation_gradients",
    "norm_gradients",
    "layer_norm_gradients",
)
def test_elementwise_rows_are_batch_invariant(name: str, call: Any, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        randn(dtype, 1, MOST, 2 * width) * 4,
        randn(dtype, 3, MOST, 2 * width),
        randn(dtype, 2, 2 * width),
    )
    calls: dict[str, Callable[[Tensor], Tensor | Outputs]] = {
        "rms_norm": lambda r: call(x[r], weight, 1e-6),
        "add_rms_norm": lambda r: call(x[r], residual[r], weight, 1e-6),
        "layer_norm": lambda r: call(x[r], weight, residual[0], 1e-6),
        "add_layer_norm": lambda r: call(x[r], residual[r], weight, residual[0], 1e-6, 0.3),
        "add_residual": lambda r: call(x[r], residual[r], 0.3),
        "cap": lambda r: call(x[r], 1.5, 3.0),
        "scale_by_position": lambda r: call(x[r].unsqueeze(1), r * 7, 0.3, 5, 1),
        "norm_values": lambda r: call(x[r], 1, width, 1e-6, True),
        "gate_inputs": lambda r: call(x[r], torch.cat((residual[r], x[r]), 1), 1, "gelu_tanh"),
        "activate": lambda r: call(x[r], "gelu"),
        "silu_mul": lambda r: call(x[r]),
        "gelu_mul": lambda r: call(x[r]),
        "activation_gradients": lambda r: call(residual[r, :width].contiguous(), x[r], "gelu_tanh", True),
        "norm_gradients": lambda r: call(residual[r], x[r], weight, 1e-6, x[r])[0],
        "layer_norm_gradients": lambda r: call(residual[r], x[r], weight, 1e-6, x[r])[0],
    }
    rows_are_batch_invariant(calls[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 257, 5000])
@every("rms_norm")
def test_norm_of_an_odd_width_is_batch_invariant(name: str, call: Any, width: int, dtype: torch.dtype) -> None:
    x, weight = randn(dtype, 1, MOST, width), randn(dtype, 2, width)
    rows_are_batch_invariant(lambda r: call(x[r], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rot"), [(4, 2, 64, 64), (3, 1, 80, 32), (1, 1, 6, 2)])
@every("rope")
def test_rope_tokens_are_batch_invariant(
    name: str, call: Any, heads: int, kv_heads: int, dim: int, rot: int, dtype: torch.dtype
) -> None:
    q, k, table = (
        randn(dtype, 1, MOST, heads, dim),
        randn(dtype, 2, MOST, kv_heads, dim),
        randn(torch.float32, 3, 99, rot),
    )
    positions = torch.randint(0, 99, (MOST,), generator=torch.Generator().manual_seed(0))
    rows_are_batch_invariant(lambda rows: call(q[rows], k[rows], table, positions[rows]))


def named(of: str, call: Any) -> str:
    """The name under which `call` implements the op `of`."""
    return next(one for one, i in OPS[of].implementations.items() if i.call is call)


def packing(name: str, of: str, call: Any) -> Any:
    """The implementation of the packing or storing op `name` that belongs to `call`, which implements the op `of`."""
    return OPS[name].implementations[named(of, call)].call


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 257, 5000])
@every("quantize_rows")
def test_quantized_rows_are_batch_invariant(name: str, call: Any, width: int, dtype: torch.dtype) -> None:
    x = randn(dtype, 1, MOST, width)
    x[::9], x[4, -1], x[8, 0] = 0.0, float("inf"), float("nan")
    rows_are_batch_invariant(lambda r: call(x[r]))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    paired([(1, 1), (7, 5), (33, 17), (64, 64), (127, 129), (192, 576), (512, 192), (1000, 3), (96, 1000)], DTYPES),
)
@every("linear", "linear_int8")
def test_linear_rows_are_batch_invariant(name: str, call: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    columns, rows = shape
    x, weight, bias = randn(dtype, 1, MOST, columns), randn(dtype, 2, rows, columns), randn(dtype, 3, rows)
    packed = packing(PACKING[name], name, call)(weight)
    rows_are_batch_invariant(lambda rows: call(x[rows], packed, None, None), trials=8)
    rows_are_batch_invariant(lambda rows: call(x[rows], packed, bias, torch.float32), trials=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "inner"), [(1, 1), (33, 17), (64, 32), (127, 65), (192, 96), (512, 31)])
@every("gated_linear", "gated_linear_int8")
def test_gated_linear_rows_are_batch_invariant(
    name: str, call: Any, columns: int, inner: int, dtype: torch.dtype
) -> None:
    x, bias = randn(dtype, 1, MOST, columns), randn(dtype, 3, 2 * inner)
    packed = packing(PACKING[name], name, call)(randn(dtype, 2, 2 * inner, columns))
    rows_are_batch_invariant(lambda rows: call(x[rows], packed, None, "silu"), trials=6)
    rows_are_batch_invariant(lambda rows: call(x[rows], packed, bias, "gelu_tanh"), trials=3)
    rows_are_batch_invariant(lambda rows: call(x[rows], packed, bias, None), trials=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "inner", "count", "k"), [(33, 17, 5, 2), (64, 32, 8, 3), (96, 40, 4, 4), (130, 9, 3, 1)]
)
@every("experts", "experts_int8")
def test_rows_of_experts_are_batch_invariant(
    name: str, call: Any, width: int, inner: int, count: int, k: int, dtype: torch.dtype
) -> None:
    """An expert gets none, one or many of the rows, in any order."""
    x, shared, gate = randn(dtype, 1, MOST, width), randn(dtype, 2, MOST, width), randn(torch.float32, 3, MOST, 1)
    raw = (None, None, None, randn(dtype, 4, count, 2 * inner, width), None, randn(dtype, 5, count, width, inner))
    implementation = next(one for one, other in OPS[name].implementations.items() if other.call is call)
    *_, up, _, down = pack_arguments(name, implementation, raw)
    ids = randn(torch.float32, 6, MOST, count).argsort(-1)[:, :k].int().contiguous()
    ids[: MOST // 2, 0], weights = ids[0, 0], randn(torch.float32, 7, MOST, k)  # many rows for one expert
    bias = randn(dtype, 8, count, 2 * inner)
    for activation in ("silu", "clamped_swiglu"):
        rows_are_batch_invariant(
            lambda r, kind=activation: call(x[r], ids[r], weights[r], up, bias, down, None, kind, shared[r], gate[r]),
            trials=4,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@every("experts_wna16")
def test_rows_of_experts_of_integers_are_batch_invariant(name: str, call: Any, dtype: torch.dtype) -> None:
    """Experts of every kind of weight, of several parts, and of floats."""
    implementation = next(one for one, other in OPS[name].implementations.items() if other.call is call)
    for arguments in samples(name, dtype):
        if len(arguments[0]) > 1:
            _, _, _, up, up_bias, down, down_bias, activation, *_ = pack_arguments(name, implementation, arguments)
            x = randn(dtype, 1, MOST, arguments[0].shape[1])
            ids = randn(torch.float32, 6, MOST, len(up)).argsort(-1)[:, :3].int().contiguous()
            ids[: MOST // 2, 0], chosen = ids[0, 0], randn(torch.float32, 7, MOST, 3)
            weights, row_inputs = (up, up_bias, down, down_bias, activation), (x, ids, chosen)
            rows_are_batch_invariant(lambda r, a=row_inputs, w=weights: call(*(t[r] for t in a), *w), trials=3)


@every("route")
def test_routes_are_batch_invariant(name: str, call: Any) -> None:
    logits, bias = randn(torch.float32, 1, MOST, 60), randn(torch.float32, 2, 60)
    rows_are_batch_invariant(lambda r: call(logits[r], bias, 7, True, 6, 3, True, True, 1e-6, 2.5), trials=4)
    rows_are_batch_invariant(lambda r: call(logits[r], None, 7, False, 1, 1, False, False, 0.0, 1.0), trials=4)


@every("route")
def test_equal_scores_go_to_the_lowest_expert(name: str, call: Any) -> None:
    logits = torch.tensor([[0.0] * 8, [1.0, 2.0, 1.0, 2.0, 2.0, 0.0, 1.0, 2.0], [-0.0, 0.0] * 4])
    ids, weights = call(logits, None, 3, False, 1, 1, False, True, 0.0, 1.0)
    assert ids.tolist() == [[0, 1, 2], [1, 3, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((3, 3), 1 / 3))
    grouped, _ = call(logits, torch.zeros(8), 3, True, 4, 2, True, True, 0.0, 1.0)
    assert grouped.tolist() == [[0, 1, 2], [1, 3, 0], [0, 1, 2]]


@every("route")
def test_a_nan_row_is_routed_to_experts(name: str, call: Any) -> None:
    logits = torch.zeros(4, 12)
    logits[0, 3], logits[1], logits[2, 0] = torch.nan, torch.nan, torch.inf
    for arguments in ((None, 5, False, 1, 1, False), (torch.zeros(12), 5, True, 3, 2, True)):
        ids, _ = call(logits, *arguments, True, 0.0, 1.0)
        assert all(len(set(row)) == 5 and min(row) >= 0 and max(row) < 12 for row in ids.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "sizes", "rank"), [(1, (1,), 1), (33, (17,), 5), (192, (96, 1, 130), 8), (64, (200, 9), 18)]
)
@every("add_lora")
def test_rows_of_adapters_are_batch_invariant(
    name: str, call: Any, columns: int, sizes: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    slots, shards, outputs_ = 5, len(sizes), sum(sizes)
    x, base = randn(dtype, 1, MOST, columns), randn(dtype, 2, MOST, outputs_)
    down, up = randn(dtype, 3, slots, shards, rank, columns), randn(dtype, 4, slots, rank, outputs_)
    ranks = torch.tensor([rank, 1, rank, 0, (rank + 1) // 2], dtype=torch.int32)[:, None].repeat(1, shards)
    ranks[1, -1], scales = rank, torch.rand(slots, shards)
    adapters = (torch.arange(MOST) // 3 % (slots + 1) - 1).int()  # runs, as prompts make them

    def added(rows: Tensor, which: Tensor = adapters) -> Tensor:
        out = base[rows]
        call(out, x[rows], which[rows], down, up, ranks, scales, sizes)
        return out

    rows_are_batch_invariant(added, trials=6)
    alone = (adapters < 0) | (adapters == 3)
    assert torch.equal(added(torch.arange(MOST))[alone], base[alone])
    for slot in (0, 4):  # all rows of one adapter, as the only one
        rows = (adapters == slot).nonzero().flatten()
        out = base[rows]
        only = torch.tensor([slot])
        zeros = torch.zeros(len(rows), dtype=torch.int32)
        call(out, x[rows], zeros, *(tensor.index_select(0, only) for tensor in (down, up, ranks, scales)), sizes)
        assert torch.equal(out, added(rows))
    first = 0
    for shard, size in enumerate(sizes):  # a shard, as the only one
        piece = slice(first, first + size)
        its_down, its_ranks, its_scales = (tensor[:, [shard]] for tensor in (down, ranks, scales))
        part = base[:, piece].clone()
        call(part, x, adapters, its_down, up[..., piece].contiguous(), its_ranks, its_scales, (size,))
        assert torch.equal(part, added(torch.arange(MOST))[:, piece])
        first += size


@pytest.mark.parametrize("dtype", DTYPES)
@every("embedding")
def test_embedding_rows_are_batch_invariant(name: str, call: Any, dtype: torch.dtype) -> None:
    packed = packing("pack_linear", name, call)(randn(dtype, 2, MOST, 37))
    rows_are_batch_invariant(lambda rows: call(rows, packed), trials=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot", "page"),
    [(8, 1, 64, 64, 16), (3, 3, 80, 32, 5), (2, 1, 6, 2, 16), (2, 2, 256, 256, 32)],
)
@every("norm_rope_store")
def test_norm_rope_store_tokens_are_batch_invariant(
    name: str, call: Any, heads: int, kv_heads: int, dim: int, rot: int, page: int, dtype: torch.dtype
) -> None:
    qkv, table = randn(dtype, 1, MOST, (heads + 2 * kv_heads) * dim), randn(torch.float32, 3, 99, rot)
    q_weight, k_weight = randn(dtype, 4, 2, dim).unbind()
    positions = torch.randint(0, 99, (MOST,), generator=torch.Generator().manual_seed(0))
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(1))

    def stored(rows: Tensor, *weights: Tensor | None, interleaved: bool = False, norm_last: bool = False) -> Outputs:
        caches = torch.zeros(2, 80 // page + 1, kv_heads, page, dim, dtype=dtype)
        where = slots[: len(rows)]
        q = call(
            qkv[rows], *weights, 1e-6, table, positions[rows], *caches.unbind(), where, 1.0, 1.0, interleaved, norm_last
        )
        written = pages.rows(named("norm_rope_store", call), *caches.unbind())
        k, v = (cache[where // page, :, where % page] for cache in written)
        return q, k, v

    rows_are_batch_invariant(lambda rows: stored(rows, q_weight, k_weight), trials=4)
    rows_are_batch_invariant(lambda rows: stored(rows, None, None, interleaved=True), trials=2)
    rows_are_batch_invariant(lambda rows: stored(rows, q_weight, k_weight, norm_last=True), trials=2)
    norms = (randn(dtype, 5, heads * dim), randn(dtype, 6, kv_heads * dim))
    rows_are_batch_invariant(lambda rows: stored(rows, *norms), trials=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "rows"), [(1008, 16), (1536, 7), (3072, 130)])
@every("linear", "linear_int8", "gated_linear", "gated_linear_int8")
def test_long_sums_do_not_depend_on_threads(name: str, call: Any, columns: int, rows: int, dtype: torch.dtype) -> None:
    """MKL cuts K between threads on Intel processors: here from 384 on, everywhere above 1,000."""
    rows += rows % 2
    x, packed = randn(dtype, 1, MOST, columns), packing(PACKING[name], name, call)(randn(dtype, 2, rows, columns))
    last = torch.float32 if name in ("linear", "linear_int8") else None
    for tokens in (1, 17, MOST):
        torch.set_num_threads(1)
        alone = call(x[:tokens], packed, None, last)
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(call(x[:tokens], packed, None, last), alone)


@every("linear", "linear_int8")
def test_linear_has_the_same_bits_for_any_number_of_rows(name: str, call: Any) -> None:
    x, weight = randn(torch.bfloat16, 1, MOST, 192), randn(torch.bfloat16, 2, 256, 192)
    packed = packing(PACKING[name], name, call)(weight)
    all_rows = call(x, packed, None, None)
    for size in range(1, MOST + 1):
        assert torch.equal(call(x[:size], packed, None, None), all_rows[:size])
        assert torch.equal(call(x[MOST - size :], packed, None, None), all_rows[MOST - size :])


def by_row(masks: Outputs) -> Outputs:
    """Sampling masks with the ids of each row in a row of their own, padded with -1."""
    counts, ids, *rest = masks
    held = counts.clamp(min=0)
    parts = ids[: held.sum()].split(held.tolist())
    table = torch.full((len(counts), 1000), -1, dtype=torch.int32)
    for row, part in zip(table, parts, strict=True):
        row[: len(part)] = part
    return counts, table, *rest


@pytest.mark.parametrize("width", [1, 17, 1000, 5003])
@every("sample", "filter_logits", "penalize", "logprobs", "sample_fused", "sampling_mask")
def test_sampling_rows_are_batch_invariant(name: str, call: Any, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = randn(torch.float32, 1, MOST, width) * 3
    logits[::7] = logits[::7].round()  # ties
    index = torch.arange(MOST)
    seeds, positions = index * 7919 - 9, index * 3
    top_k, top_p, min_p = (index % 5 * 300).int(), 1.0 - (index % 4) * 0.15, index % 3 * 0.01
    history = torch.randint(0, width, (MOST, 40), generator=generator).int()
    lens = (index % 41).int()
    history[torch.arange(40) >= lens[:, None]] = -1
    strength = (index % 6) * 0.2
    ids = torch.randint(0, width, (MOST,), generator=generator)
    cut = logits.masked_fill(logits < logits.amax(-1, keepdim=True) - index[:, None], -float("inf"))
    calls: dict[str, Callable[[Tensor], Tensor | Outputs]] = {
        "sample": lambda r: call(logits[r], seeds[r], positions[r], (index % 4 == 0)[r]),
        "sample_fused": lambda r: call(
            logits[r], seeds[r], positions[r], (index % 4 == 0)[r], strength[r], False, min(width, 5)
        ),
        "filter_logits": lambda r: call(logits[r], top_k[r], top_p[r], min_p[r]),
        "penalize": lambda r: call(
            logits[r], history[r], lens[r] // 3, lens[r], strength[r], 1 - strength[r], 0.5 + strength[r]
        ),
        "logprobs": lambda r: call(logits[r], ids[r], min(width, 5), ids[r][:, None], strength[r]),
        "sampling_mask": lambda r: by_row(
            call(logits[r], cut[r], cut.argmax(-1)[r], (index % 4 == 0)[r], strength[r], min(width, 300))
        ),
    }
    rows_are_batch_invariant(calls[name], trials=5)


@every("logprobs", "filter_logits", "sample_fused", "rms_norm", "add_rms_norm", "quantize_rows")
def test_a_row_longer_than_what_torch_gives_one_thread_is_batch_invariant(name: str, call: Any) -> None:
    logits, weight = randn(torch.float32, 4, 3, 40001), randn(torch.float32, 5, 40001)
    logits[:, 5] = 12.0  # the sum of exp is near 1, where its logarithm shows every bit
    tenth, off = torch.full((3,), 0.1), torch.zeros(3)
    calls: dict[str, Callable[[Tensor], Tensor | Outputs]] = {
        "logprobs": lambda r: call(logits[r], r, 3, None, None),
        "filter_logits": lambda r: call(logits[r], off[r].int(), tenth[r], off[r]),
        "sample_fused": lambda r: call(logits[r], r, r, off[r].bool(), None, False, 3),
        "rms_norm": lambda r: call(logits[r], weight, 1e-6),
        "add_rms_norm": lambda r: call(logits[r], logits[r].flip(1), weight, 1e-6),
        "quantize_rows": lambda r: call(logits[r]),
    }
    rows_are_batch_invariant(calls[name], count=3, trials=2)


class Paged:
    """Sequences of random q, k, v whose keys lie in scattered pages; what is in no sequence is NaN.

    `store`: the store_kv of the attention under test.
    """

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        page: int,
        window: int,
        dtype: torch.dtype,
        store: Any,
    ) -> None:
        blocks = -(-max(lengths) // page)
        order = torch.randperm(len(lengths) * blocks, generator=torch.Generator().manual_seed(page))
        self.tables = order.view(len(lengths), blocks).int()
        self.lengths, self.scale, self.window, self.store = lengths, dim**-0.5, window, store
        self.sinks = randn(torch.float32, 80, heads) if dim == 80 else None
        self.q = [randn(dtype, row, length, heads, dim) for row, length in enumerate(lengths)]
        self.kv = [randn(dtype, 90 + row, 2, length, kv_heads, dim) for row, length in enumerate(lengths)]
        self.caches = torch.full((2, len(order), kv_heads, page, dim), float("nan"), dtype=dtype)

    def attend(self, call: Any, parts: list[tuple[int, int, int]], both_ways: list[bool] | None = None) -> list[Tensor]:
        """Store and attend positions start..end-1 of row, for each (row, start, end), in one call.  `both_ways`: parts
        whose queries see all of their keys."""
        page = self.caches.shape[3]
        for row, start, end in parts:
            positions = torch.arange(start, end)
            slots = self.tables[row].long()[positions // page] * page + positions % page
            self.store(*self.kv[row][:, start:end].unbind(), *self.caches.unbind(), slots)
        rows, starts, ends = ([part[i] for part in parts] for i in range(3))
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        query_start = torch.tensor([0, *sizes]).cumsum(0).int()
        q = torch.cat([self.q[row][start:end] for row, start, end in parts])
        lens = torch.tensor(ends, dtype=torch.int32)
        result = call(
            q,
            self.caches[0],
            self.caches[1],
            self.tables[rows],
            query_start,
            lens,
            self.scale,
            self.window,
            1.0,
            5.0 if self.scale < 0.12 else 0.0,  # soft cap
            self.sinks,
            *([] if both_ways is None else [torch.tensor(both_ways)]),
        )
        return list(result.split(sizes))

    def forget(self) -> None:
        self.caches.fill_(float("nan"))


def cuts(rng: random.Random, length: int, longest: int) -> list[tuple[int, int]]:
    points = [0]
    while points[-1] < length:
        points.append(min(length, points[-1] + rng.randint(1, longest)))
    return list(pairwise(points))


SHAPES = [  # query heads, KV heads, head dim, page, window
    (1, 1, 32, 16, 0),
    (2, 1, 64, 16, 0),
    (4, 4, 64, 32, 50),
    (6, 2, 80, 16, 0),
    (8, 2, 96, 7, 0),
    (5, 1, 128, 16, 130),
    (12, 2, 64, 1, 3),
    (7, 1, 40, 48, 0),
    (2, 1, 37, 16, 20),
    (8, 1, 256, 256, 0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@every("paged_attention")
def test_attention_in_chunks_is_attention_at_once(name: str, call: Any, shape: tuple[int, ...]) -> None:
    heads, kv_heads, dim, page, window = shape
    dtype = DTYPES[dim % 3]
    lengths = [300, 17, 129, 260]
    store = packing("store_kv", name, call)
    paged = Paged(lengths, heads, kv_heads, dim, page=page, window=window, dtype=dtype, store=store)
    all_rows = [paged.attend(call, [(row, 0, length)])[0] for row, length in enumerate(lengths)]
    assert all(part.isfinite().all() for part in all_rows)
    rng = random.Random(dim)
    for longest in (5, 64, 300):
        paged.forget()
        waiting = [cuts(rng, length, longest) for length in lengths]
        while any(waiting):  # some of the rows go on by a chunk, all in one call
            rows = [row for row, chunks in enumerate(waiting) if chunks and rng.random() < 0.7]
            rng.shuffle(rows)
            parts = [(row, *waiting[row].pop(0)) for row in rows]
            for (row, start, end), part in zip(parts, paged.attend(call, parts) if parts else [], strict=True):
                assert torch.equal(part, all_rows[row][start:end])
    torch.set_num_threads(2)
    assert torch.equal(paged.attend(call, [(0, 0, lengths[0])])[0], all_rows[0])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@every("paged_attention")
def test_chunks_of_a_bidirectional_row_equal_the_whole_row(name: str, call: Any, shape: tuple[int, ...]) -> None:
    heads, kv_heads, dim, page, window = shape
    lengths = [270, 40]
    store = packing("store_kv", name, call)
    paged = Paged(lengths, heads, kv_heads, dim, page=page, window=window, dtype=DTYPES[dim % 3], store=store)
    all_rows = paged.attend(call, [(0, 0, 270)], [True])[0]
    causal = paged.attend(call, [(1, 0, 40)])[0]
    assert all_rows.isfinite().all()
    for start in (1, 5, 100, 255, 269):
        rest, other = paged.attend(call, [(0, start, 270), (1, 0, 40)], [True, False])
        assert torch.equal(rest, all_rows[start:]) and torch.equal(other, causal)
    assert torch.equal(paged.attend(call, [(0, 0, 270)])[0][-1], all_rows[-1])  # the last sees no later key
    assert not torch.equal(paged.attend(call, [(0, 0, 270)])[0][0], all_rows[0])


@pytest.mark.parametrize("dtype", DTYPES)
@every("paged_attention")
def test_attention_step_by_step_is_attention_at_once(name: str, call: Any, dtype: torch.dtype) -> None:
    lengths = [140] * 3
    store = packing("store_kv", name, call)
    paged = Paged(lengths, 4, 2, 64, page=16, window=0, dtype=dtype, store=store)
    all_rows = [paged.attend(call, [(row, 0, length)])[0] for row, length in enumerate(lengths)]
    paged.forget()
    for at in range(lengths[0]):
        for row, part in enumerate(paged.attend(call, [(row, at, at + 1) for row in range(3)])):
            assert torch.equal(part[0], all_rows[row][at])


@every("paged_attention")
def test_attention_of_many_rows_is_that_of_each(name: str, call: Any) -> None:
    lengths = [1 + 13 * row % 200 for row in range(MOST)]
    store = packing("store_kv", name, call)
    paged = Paged(lengths, 4, 2, 64, page=16, window=0, dtype=torch.bfloat16, store=store)
    alone = [paged.attend(call, [(row, 0, length)])[0] for row, length in enumerate(lengths)]
    for seed in range(4):
        rows = random.Random(seed).sample(range(MOST), 10 + 20 * seed)
        parts = [(row, lengths[row] - 1, lengths[row]) for row in rows]
        for row, part in zip(rows, paged.attend(call, parts), strict=True):
            assert torch.equal(part[0], alone[row][-1])


@pytest.mark.parametrize("dtype", DTYPES)
@every("gated_delta", "scan_states", "short_conv")
def test_states_do_not_depend_on_chunks_or_drafts(name: str, call: Any, dtype: torch.dtype) -> None:
    """A row whole, in chunks, and with drafts some of which stay, beside another: outputs, memory and rings."""
    length, taps, spare, channels = 41, 3, 7, 2 * 2 * 12 + 4 * 20
    entry, has_memory = channels + (4 if name == "scan_states" else 8), name != "short_conv"
    rng = random.Random(length)
    width = {"gated_delta": channels + 80, "scan_states": entry + 80, "short_conv": 3 * entry}[name]
    x = randn(dtype, 1, 2 * length, width)
    rates = randn(dtype, 2, 2 * length, 8)
    weights = randn(torch.float32, 3, taps, channels), randn(torch.float32, 4, 4), randn(torch.float32, 5, 4)
    norm, bias = randn(torch.float32, 6, 20), randn(torch.float32, 7, entry)

    def states() -> tuple[Tensor, ...]:
        return torch.full((4, 4, 12, 20), torch.nan), torch.full((4, taps + spare, entry), torch.nan, dtype=dtype)

    def run(kept: tuple[Tensor, ...], work: list[tuple[int, int, int, int, int]], saves: list[list[int]]) -> Tensor:
        """Rows as (state row, first and last token, positions of the state before and after)."""
        tokens = torch.tensor(
            [t for row, first, last, _, _ in work for t in range(row * length + first, row * length + last)]
        )
        counts = torch.tensor([0, *(last - first for _, first, last, _, _ in work)]).cumsum(0).int()
        rows, _, lens, start, end = (torch.tensor(column) for column in zip(*work, strict=True))
        columns = counts, lens.int(), rows, start.int(), end.int(), torch.tensor(saves).view(-1, 3).int()
        if name == "short_conv":
            wide = randn(torch.float32, 8, taps, entry)
            return call(x[tokens], wide, bias, kept[1], *columns)  # type: ignore[no-any-return]
        if name == "scan_states":
            vectors = bias[:channels], *weights[1:], weights[2], norm.repeat(4)
            return call(x[tokens], weights[0], *vectors, 80, 1e-6, 0.0, 9.0, *kept, *columns)  # type: ignore[no-any-return]
        return call(x[tokens], rates[tokens], *weights, norm, 1e-6, True, *kept, *columns)  # type: ignore[no-any-return]

    all_rows = states()
    expected = run(all_rows, [(0, 0, length, 0, length)], [[0, 16, 2]])
    for trial in range(4):
        kept = states()
        outputs, computed, at = torch.empty_like(expected), 0, 0
        while computed < length:
            count = min(length - computed, rng.choice([1, 1, 2, 9]))
            drafts = min(length - computed - count, rng.choice([0, 0, 3, spare - 1]) if computed else 0)
            last, end = computed + count + drafts, computed + count
            other_rows = [(1, 0, 5, 0, 5)] if trial % 2 else []
            saves = [[0, 16, 2]] if at < 16 <= end else []
            outputs[computed:last] = run(kept, [(0, computed, last, at, end), *other_rows], saves)[: last - computed]
            at, computed = end, end + rng.randint(0, drafts)
        same((outputs,), (expected,))
        if at == length:
            same((kept[1][0],), (all_rows[1][0],))
            same((kept[0][0],) if has_memory else (), (all_rows[0][0],) if has_memory else ())
        window = [p % (taps + spare) for p in range(16 - taps, 16)]
        same((kept[0][2], kept[1][2, window]), (all_rows[0][2], all_rows[1][2, window]))
        again = run(kept, [(0, length - 1, length, at, at)], []) if at == length else expected[-1:]
        same((again,), (expected[-1:],))
