"""Every op by implementation and shape, as shares of what this machine can do at all, and beside torch's own.

    python -m benchmarks.kernels [--ops linear,linear_int8] [--threads 2] [--seconds 0.3] [--quick] [--all-sets]
        [--json FILE]

Shapes are those of a 0.6B decoder (hidden 1024, inner 3072, 16 query and 8 KV heads of 128, vocabulary 151936).  The
ceilings are measured in the same run: reading memory (the maximum of a float32 array that fits no cache) with one and
all threads, and the best bfloat16 product of square matrices of any library here.  A weight that decoding streams is
taken in turn from copies that together fit no cache.  A time is the lower quartile of the calls', a ceiling the best of
them: the machine may be shared.  More than 100 % of reading: the data was in a cache; of computing: int8.  What only a
device with memory of its own computes with (float8, tables kept there) is in gpu.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.samples.recurrent import columns
from tokserve import _C
from tokserve.ops import registry
from tokserve.ops.registry import OPS
from tokserve.runner import device

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, PAGE = 1024, 3072, 16, 8, 128, 151936, 16
BF16 = torch.bfloat16
CACHES = 256 << 20  # bytes that fit no cache of this machine
WEIGHTS = {"qkv": (4096, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
HEAD = {"lm_head": (VOCAB, HIDDEN)}
PACKING = {
    "linear": "pack_linear",
    "gated_linear": "pack_gated",
    "linear_int8": "pack_linear_int8",
    "gated_linear_int8": "pack_gated_int8",
}
SHARDS = {"qkv": (2048, 1024, 1024), "gate_up": (INNER, INNER), "down": (HIDDEN,)}
RANK = 16

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One shape of one op.  `make` prepares a call of an implementation; `torch`: an equivalent call of torch's own."""

    op: str
    shape: str
    traffic: int  # bytes that must be read and written
    operations: int  # floating point or integer, a multiplication and an addition as two
    make: Callable[[str], Call]
    torch: Callable[[], Call] | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table; torch_ratio: torch's time over tokserve's."""

    op: str
    shape: str
    implementation: str
    threads: int
    ms: float
    gb_s: float
    read_share: float
    gop_s: float
    compute_share: float
    torch_ratio: float | None


def seconds(call: Call, budget: float, quantile: float = 0.25) -> float:
    """This quantile of the times that fit into `budget` seconds, three at least."""
    call()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[int(len(times) * quantile)]


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


def in_turn(calls: list[Call]) -> Call:
    """One of the calls at each call."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def plain(
    op: str, shape: str, arguments: tuple[object, ...], *, traffic: int, operations: int, torch_call: Call | None
) -> Case:
    """A case whose arguments are the same for all implementations."""
    return Case(
        op,
        shape,
        traffic,
        operations,
        make=lambda name: lambda: OPS[op].implementations[name].call(*arguments),
        torch=None if torch_call is None else lambda: torch_call,
    )


def linear_case(op: str, label: str, tokens: int, out_dtype: torch.dtype | None = None) -> Case:
    """An int8 product's rival in torch is the bfloat16 product it replaces, a gated one's the one without the gate."""
    rows, columns = (WEIGHTS | HEAD)[label]
    gated = op.startswith("gated_")
    x, weight = randn(tokens, columns), randn(rows, columns)
    size = 1 if op.endswith("_int8") else 2
    copies = max(1, min(24, CACHES // (rows * columns * size))) if tokens < 64 else 1

    def make(name: str) -> Call:
        pack, call = OPS[PACKING[op]].implementations[name].call, OPS[op].implementations[name].call
        packed = [pack(weight) for _ in range(copies if name != registry.REFERENCE else 1)]
        last = "silu" if gated else out_dtype
        return in_turn([lambda p=one: call(x, p, None, last) for one in packed])  # type: ignore[misc]

    def torch_call() -> Call:
        weights = [weight.clone() for _ in range(max(1, min(12, CACHES // weight.nbytes)) if tokens < 64 else 1)]
        return in_turn([lambda w=one: F.linear(x, w) for one in weights])  # type: ignore[misc]

    moved = rows * columns * size + tokens * columns * 2 + tokens * rows * (4 if out_dtype else 1 if gated else 2)
    return Case(op, f"{label} [{rows},{columns}] x {tokens}", moved, 2 * rows * columns * tokens, make, torch_call)


def lora_case(label: str, tokens: int, adapters: int) -> Case:
    """Rows of several adapters side by side; torch's own: two products for each adapter and shard."""
    sizes, columns = SHARDS[label], WEIGHTS[label][1]
    shards, outputs = len(sizes), sum(sizes)
    used = adapters * RANK * (shards * columns + outputs)
    x, out = randn(tokens, columns), randn(tokens, outputs)
    copies = max(1, min(64, CACHES // (2 * used))) if tokens < 64 else 1
    down, up = randn(adapters, shards, RANK, columns), randn(adapters, RANK, outputs)
    factors = [(down.clone(), up.clone()) for _ in range(copies)]
    slots = (torch.arange(tokens) * adapters // tokens).int()
    ranks, scales = torch.full((adapters, shards), RANK, dtype=torch.int32), torch.ones(adapters, shards)

    def make(name: str) -> Call:
        call = OPS["add_lora"].implementations[name].call
        return in_turn([lambda p=pair: call(out, x, slots, *p, ranks, scales, sizes) for pair in factors])  # type: ignore[misc]

    def one(first: Tensor, second: Tensor) -> None:
        for slot in range(adapters):
            rows = slots == slot
            inner = (F.linear(x[rows], first[slot, shard]) for shard in range(shards))
            parts = zip(inner, second[slot].split(sizes, 1), strict=True)
            out[rows] += torch.cat([adapter @ part for adapter, part in parts], 1)

    moved = 2 * (used + tokens * (columns + 2 * outputs))
    work = 2 * tokens * RANK * (shards * columns + outputs)
    shape = f"{label}, rank {RANK}, {adapters} adapters, {tokens} rows"
    return Case("add_lora", shape, moved, work, make, lambda: in_turn([lambda p=pair: one(*p) for pair in factors]))  # type: ignore[misc]


def embedding_case(tokens: int) -> Case:
    ids, weight = torch.arange(tokens) * 7919 % 32768, randn(32768, HIDDEN)

    def make(name: str) -> Call:
        packed = OPS["pack_linear"].implementations[name].call(weight)
        return lambda: OPS["embedding"].implementations[name].call(ids, packed)

    size = 2 * tokens * HIDDEN * 2
    return Case("embedding", f"{tokens} of [32768,{HIDDEN}]", size, 0, make, lambda: lambda: F.embedding(ids, weight))


def elementwise_cases(tokens: int) -> Iterator[Case]:
    x, residual, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), randn(HIDDEN)
    both = randn(tokens, 2 * INNER)
    gate, up = both.chunk(2, -1)
    q, k = randn(tokens, HEADS, DIM), randn(tokens, KV_HEADS, DIM)
    table, positions = torch.randn(4096, DIM), torch.arange(tokens)
    row, wide = x.nbytes, both.nbytes
    yield plain(
        "rms_norm",
        f"[{tokens},{HIDDEN}]",
        (x, weight, 1e-6),
        traffic=2 * row,
        operations=4 * x.numel(),
        torch_call=lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-6),
    )
    yield plain(
        "add_rms_norm",
        f"[{tokens},{HIDDEN}]",
        (x, residual, weight, 1e-6),
        traffic=4 * row,
        operations=5 * x.numel(),
        torch_call=lambda: F.rms_norm(x + residual, (HIDDEN,), weight, 1e-6),
    )
    yield plain(
        "silu_mul",
        f"[{tokens},2x{INNER}]",
        (both,),
        traffic=wide * 3 // 2,
        operations=5 * gate.numel(),
        torch_call=lambda: F.silu(gate) * up,
    )
    yield plain(
        "gelu_mul",
        f"[{tokens},2x{INNER}]",
        (both,),
        traffic=wide * 3 // 2,
        operations=9 * gate.numel(),
        torch_call=lambda: F.gelu(gate, approximate="tanh") * up,
    )
    yield plain(
        "rope",
        f"[{tokens},{HEADS}+{KV_HEADS},{DIM}]",
        (q, k, table, positions),
        traffic=2 * (q.nbytes + k.nbytes) + tokens * DIM * 4,
        operations=3 * (q.numel() + k.numel()),
        torch_call=None,
    )
    qkv, slots = randn(tokens, (HEADS + 2 * KV_HEADS) * DIM), torch.arange(tokens)
    caches = [randn(-(-tokens // PAGE), KV_HEADS, PAGE, DIM) for _ in range(2)]
    norms = randn(2, DIM).unbind()
    arguments = (qkv, *norms, 1e-6, table, positions, *caches, slots)
    yield plain(
        "norm_rope_store",
        f"[{tokens},{HEADS}+2x{KV_HEADS},{DIM}]",
        arguments,
        traffic=2 * qkv.nbytes + tokens * DIM * 4,
        operations=7 * (q.numel() + k.numel()),
        torch_call=None,
    )
    yield plain(
        "quantize_rows", f"[{tokens},{HIDDEN}]", (x,), traffic=row * 3 // 2, operations=3 * x.numel(), torch_call=None
    )


def gradient_cases(rows: int, length: int) -> Iterator[Case]:
    """The gradient cases of `rows` sequences of `length` tokens."""
    tokens = rows * length
    cuts, path = torch.arange(0, tokens + 1, length), torch.arange(tokens)
    grad, q = randn(2, tokens, HEADS, DIM).unbind()
    k, v = randn(2, tokens, KV_HEADS, DIM).unbind()
    yield plain(
        "attention_gradients",
        f"{rows} of {length}",
        (grad, q, k, v, cuts, path, cuts, DIM**-0.5, 0),
        traffic=4 * (q.nbytes + k.nbytes),
        operations=5 * HEADS * DIM * tokens * length,
        torch_call=None,
    )
    both = randn(tokens, 2 * INNER)
    yield plain(
        "activation_gradients",
        f"[{tokens},2x{INNER}]",
        (both[:, :INNER].contiguous(), both, "silu", True),
        traffic=both.nbytes * 5 // 2,
        operations=9 * tokens * INNER,
        torch_call=None,
    )
    x = randn(tokens, HIDDEN)
    yield plain(
        "norm_gradients",
        f"[{tokens},{HIDDEN}]",
        (x, x, torch.ones(HIDDEN), 1e-6),
        traffic=3 * x.nbytes,
        operations=12 * x.numel(),
        torch_call=None,
    )


def attention_cases(rows: int, queries: int, length: int) -> Iterator[Case]:
    """`rows` requests of `length` tokens, the last `queries` of each asked."""
    pages = -(-length // PAGE)
    caches = [randn(rows * pages, KV_HEADS, PAGE, DIM) for _ in range(2)]
    tables = torch.randperm(rows * pages).view(rows, pages).int()
    q, starts = randn(rows * queries, HEADS, DIM), torch.arange(rows + 1).int() * queries
    lens = torch.full((rows,), length, dtype=torch.int32)
    dense_q = randn(rows, HEADS, queries, DIM)
    keys, values = randn(rows, KV_HEADS, length, DIM), randn(rows, KV_HEADS, length, DIM)
    seen = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    pairs = rows * int(seen.sum())
    yield plain(
        "paged_attention",
        f"{rows} x {queries} of {length}",
        (q, *caches, tables, starts, lens, DIM**-0.5, 0),
        traffic=2 * rows * length * KV_HEADS * DIM * 2 + 2 * q.nbytes,
        operations=4 * HEADS * DIM * pairs,
        torch_call=lambda: F.scaled_dot_product_attention(dense_q, keys, values, attn_mask=seen, enable_gqa=True),
    )
    k, v = randn(rows * queries, KV_HEADS, DIM), randn(rows * queries, KV_HEADS, DIM)
    slots = torch.randperm(rows * pages * PAGE)[: rows * queries]
    yield plain(
        "store_kv",
        f"[{rows * queries},{KV_HEADS},{DIM}]",
        (k, v, *caches, slots),
        traffic=4 * k.nbytes,
        operations=0,
        torch_call=None,
    )


def recurrent_cases(rows: int, tokens: int) -> Iterator[Case]:
    """`rows` requests that compute `tokens` each, with the heads of Qwen3-Next and the channels of LFM2."""
    key_heads, heads, dim, channels, count = 16, 32, 128, 2048, rows * tokens
    batch = columns(((tokens, 100 + tokens, 100, 100 + tokens),) * rows, ())
    width = 2 * (key_heads + heads) * dim
    state, ring = torch.zeros(rows, heads, dim, dim), randn(rows, 37, width - heads * dim + 2 * heads)
    vector, shape = torch.randn(heads), f"{rows} x {tokens}"
    yield plain(
        "gated_delta",
        f"{shape} of {heads} heads [{dim},{dim}]",
        (
            randn(count, width),
            randn(count, 2 * heads),
            torch.randn(4, width - heads * dim),
            vector,
            vector,
            torch.randn(dim),
            1e-6,
            True,
            state,
            ring,
            *batch,
        ),
        traffic=2 * state.nbytes,
        operations=7 * count * heads * dim * dim,
        torch_call=None,
    )
    x = randn(count, 3 * channels)
    yield plain(
        "short_conv",
        f"{shape} of {channels}",
        (x, torch.randn(3, channels), None, randn(rows, 36, channels), *batch),
        traffic=x.nbytes * 4 // 3,
        operations=8 * count * channels,
        torch_call=None,
    )


def scan_case(rows: int, tokens: int) -> Case:
    """`rows` requests that compute `tokens` each, with the state-space layer of Granite 4 Tiny."""
    heads, size, dim, count = 48, 128, 64, rows * tokens
    inner, vector = heads * dim, torch.randn(heads)
    channels, state = inner + 2 * size, torch.zeros(rows, heads, size, dim)
    return plain(
        "scan_states",
        f"{rows} x {tokens} of {heads} heads [{size},{dim}]",
        (
            randn(count, inner + channels + heads),
            torch.randn(4, channels),
            torch.randn(channels),
            *(vector, vector, vector),
            torch.ones(inner),
            inner,
            *(1e-5, 0.0, float("inf")),
            state,
            randn(rows, 37, channels + heads),
            *columns(((tokens, 100 + tokens, 100, 100 + tokens),) * rows, ()),
        ),
        traffic=2 * state.nbytes,
        operations=5 * count * heads * size * dim,
        torch_call=None,
    )


def sampling_cases(rows: int) -> Iterator[Case]:
    logits, index = torch.randn(rows, VOCAB) * 3, torch.arange(rows)
    shape, size, count = f"[{rows},{VOCAB}]", logits.nbytes, logits.numel()
    ones = torch.ones(rows)
    nucleus = logits.masked_fill(logits < 9.0, float("-inf"))  # about 200 ids of a row
    history, lens = torch.randint(0, VOCAB, (rows, 300)).int(), torch.full((rows,), 300, dtype=torch.int32)
    yield plain(
        "sample",
        shape,
        (logits, index, index, index < 0),
        traffic=size,
        operations=count,
        torch_call=lambda: torch.multinomial(logits.softmax(-1), 1),
    )
    yield plain(
        "draw",
        shape,
        (logits, index, index, index < 0, ones, False, 0),
        traffic=size,
        operations=3 * count,
        torch_call=lambda: (torch.multinomial(logits.softmax(-1), 1), logits.log_softmax(-1)),
    )
    yield plain(
        "logprobs",
        shape,
        (logits, index, 5, None, None),
        traffic=size,
        operations=2 * count,
        torch_call=lambda: logits.log_softmax(-1).topk(5),
    )
    yield plain(
        "filter_logits",
        shape,
        (logits, (ones * 50).int(), ones * 0.9, ones * 0.01),
        traffic=2 * size,
        operations=2 * count,
        torch_call=lambda: logits.sort(-1),
    )
    yield plain(
        "sampling_mask",
        shape,
        (logits, nucleus, nucleus.argmax(-1), index < 0, ones, 1024),
        traffic=5 * size,
        operations=4 * count,
        torch_call=None,
    )
    yield plain(
        "penalize",
        shape,
        (logits, history, lens // 2, lens, ones * 0.5, ones * 0.5, ones * 1.1),
        traffic=2 * size,
        operations=count,
        torch_call=None,
    )


def cases(quick: bool, selected: set[str]) -> Iterator[Case]:
    """Decode alone, decode in a batch, prefill; some of ops that are not wanted are left out."""
    for tokens in (1, 512) if quick else (1, 16, 512):
        yield from elementwise_cases(tokens)
        if "embedding" in selected:
            yield embedding_case(tokens)
    products = [op for op in PACKING if op in selected]
    for op, tokens in itertools.product(products, (1, 16, 512) if quick else (1, 4, 16, 64, 512)):
        for label in ("gate_up",) if quick or op.startswith("gated_") else WEIGHTS:
            yield linear_case(op, label, tokens)
        if tokens <= 16 and not quick and not op.startswith("gated_"):
            yield linear_case(op, "lm_head", tokens, torch.float32)
    for tokens, adapters in ((1, 1), (16, 4), (512, 1)) if "add_lora" in selected else ():
        for label in ("gate_up",) if quick else SHARDS:
            yield lora_case(label, tokens, adapters)
    for rows, queries, length in ((1, 1, 1024), (16, 1, 1024), (1, 512, 512), (1, 512, 4096)):
        yield from attention_cases(rows, queries, length)
    for rows, tokens in ((1, 1), (8, 1), (1, 512)) if selected & {"gated_delta", "short_conv"} else ():
        yield from recurrent_cases(rows, tokens)
    for rows, tokens in ((1, 1), (16, 1), (1, 512)) if "scan_states" in selected else ():
        yield scan_case(rows, tokens)
    for rows, length in ((8, 256),) if quick else ((8, 256), (1, 2048)):
        yield from gradient_cases(rows, length)
    for rows in (1,) if quick else (1, 16):
        yield from sampling_cases(rows)


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    _C.set_threads(count)


def read_ceiling(threads: int) -> float:
    """GB/s."""
    torch.set_num_threads(threads)
    array = torch.ones(CACHES // 4)
    return array.nbytes / seconds(array.max, 1.0, 0.0) / 1e9


def compute_ceiling(threads: int) -> float:
    """GFLOP/s of the best bfloat16 product of [1024,1024] with [1024,1024]: torch's or ours."""
    use_threads(threads)
    x, weight = randn(1024, 1024), randn(1024, 1024)
    packed = OPS["pack_linear"].implementations["cpp"].call(weight)
    linear = OPS["linear"].implementations["cpp"].call
    best = min(seconds(call, 1.0, 0.0) for call in (lambda: F.linear(x, weight), lambda: linear(x, packed, None)))
    return 2 * 1024**3 / best / 1e9


def measure(case: Case, sets: list[str], threads: int, budget: float, read: float, compute: float) -> Iterator[Row]:
    """A row for each implementation, torch's own included."""

    def row(name: str, took: float, rival: float | None) -> Row:
        moved, done = case.traffic / took / 1e9, case.operations / took / 1e9
        ratio = None if rival is None else round(rival / took, 2)
        return Row(
            case.op,
            case.shape,
            name,
            threads,
            round(took * 1e3, 4),
            round(moved, 2),
            round(moved / read, 3),
            round(done, 1),
            round(done / compute, 3),
            ratio,
        )

    use_threads(threads)
    rival = None
    if case.torch is not None:
        rival = seconds(case.torch(), budget)
        yield row("(torch's own)", rival, None)
    for name in sets:
        _C.select(name)
        yield row(f"cpp {name}", seconds(case.make("cpp"), budget), rival)
    if case.operations < 2e9:  # the reference is for reading, not for speed: large shapes would take minutes
        yield row("torch reference", seconds(case.make(registry.REFERENCE), budget), rival)


HEADER = """| op | shape | implementation | ms | GB/s | of read | GFLOP/s | of compute | torch's time / ours |
|---|---|---|---|---|---|---|---|---|"""


def line(r: Row) -> str:
    """A row of a Markdown table."""
    ratio = "" if r.torch_ratio is None else f"{r.torch_ratio:.2f}"
    return (
        f"| {r.op} | {r.shape} | {r.implementation} | {r.ms:.4g} | {r.gb_s:.3g} | {r.read_share:.0%} "
        f"| {r.gop_s:.3g} | {r.compute_share:.0%} | {ratio} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", help="names, with commas between; default: all")
    parser.add_argument("--threads", type=int, default=device.set_threads(None), help="default: all cores")
    parser.add_argument("--seconds", type=float, help="for each measurement; default: 0.3, with --quick 0.05")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter measurements")
    parser.add_argument("--all-sets", action="store_true", help="every instruction set this machine runs")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    reason = registry.load_extension("cpu")
    selected = set(options.ops.split(",")) if options.ops else set(OPS)
    if reason or selected - set(OPS):
        parser.error(reason or f"unknown ops: {', '.join(sorted(selected - set(OPS)))}; there are: {', '.join(OPS)}")
    read = {n: read_ceiling(n) for n in (1, options.threads)}
    compute = compute_ceiling(options.threads)
    print(f"{device.name()}, {options.threads} threads, torch {torch.__version__}")
    reading = ", ".join(f"{speed:.1f} GB/s with {n} threads" for n, speed in read.items())
    print(f"ceilings: read {reading}; bf16 {compute:.0f} GFLOP/s\n")
    sets = _C.instruction_sets() if options.all_sets else _C.instruction_sets()[:1]
    budget = options.seconds or (0.05 if options.quick else 0.3)
    rows: list[Row] = []
    print(HEADER, flush=True)
    with torch.inference_mode():
        for case in cases(options.quick, selected):
            if case.op not in selected:
                continue
            for row in measure(case, sets, options.threads, budget, max(read.values()), compute):
                rows.append(row)
                print(line(row), flush=True)
    if options.json:
        facts = {"device": device.name(), "threads": options.threads, "torch": torch.__version__}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                facts | {"read_gb_s": read, "bf16_gflop_s": compute, "rows": [asdict(r) for r in rows]}, file, indent=1
            )


if __name__ == "__main__":
    main()
