"""Captured functions of ops: a replay computes what the function computes from the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests import needs
from tokserve import ops
from tokserve.ops.cpu.capture import CaptureMemory, NotCapturable, capture
from tokserve.ops.registry import load_extension

load_extension("cpu")
pytestmark = needs.EXTENSION.skips()

HEADS, KV_HEADS, DIM, HIDDEN, PAGE, BLOCKS, VOCAB = 4, 2, 32, 96, 16, 8, 200


@pytest.fixture(params=[1, 2], autouse=True)
def bound(request: pytest.FixtureRequest) -> Iterator[None]:
    """The compiled ops, on one and on two threads."""
    ops.bind("cpu", threads=request.param)
    yield
    ops.bind("cpu", {"*": "torch"}, threads=1)


class Layer:
    """The ops of one layer of a model, on tensors at fixed addresses, whose contents `fill` sets."""

    def __init__(self, rows: int, dtype: torch.dtype, *, int8: bool) -> None:
        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)

        self.rows, self.int8 = rows, int8
        pack = ops.pack_linear_int8 if int8 else ops.pack_linear
        self.embed = ops.pack_linear(weight(VOCAB, HIDDEN))
        self.qkv, self.out = pack(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)), pack(weight(HIDDEN, HEADS * DIM))
        self.gate_up = (ops.pack_gated_int8 if int8 else ops.pack_gated)(weight(2 * HIDDEN, HIDDEN))
        self.down, self.up = weight(2, 2, 8, HIDDEN), weight(2, 8, HIDDEN)
        self.ranks, self.scales = torch.tensor([[8, 5], [0, 8]], dtype=torch.int32), torch.ones(2, 2)
        self.norm, self.head_norm, self.bias = weight(HIDDEN), weight(DIM), weight(HIDDEN)
        self.table = torch.randn(PAGE * BLOCKS, DIM)
        self.keys, self.values = (torch.zeros(BLOCKS, KV_HEADS, PAGE, DIM, dtype=dtype) for _ in range(2))
        self.ids, self.positions, self.slots = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
        self.starts, self.lens = torch.arange(rows + 1, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
        self.adapters = torch.zeros(rows, dtype=torch.int32)
        self.tables = torch.arange(rows * 4, dtype=torch.int32).view(rows, 4) % BLOCKS

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.ids.random_(VOCAB)
        self.positions.random_(PAGE * 4)
        self.lens.copy_(self.positions + 1)
        self.adapters.random_(-1, 2)
        self.tables.random_(BLOCKS)
        pages = self.tables.gather(1, self.positions[:, None] // PAGE)[:, 0]
        self.slots.copy_(pages * PAGE + self.positions % PAGE)
        self.keys.normal_()
        self.values.normal_()

    def linear(self, x: Tensor, packed: object, bias: Tensor | None = None) -> Tensor:
        return ops.linear_int8(x, packed, bias) if self.int8 else ops.linear(x, packed, bias)

    def __call__(self) -> Tensor:
        residual = ops.embedding(self.ids, self.embed)
        x = ops.rms_norm(residual, self.norm, 1e-5)
        q = ops.norm_rope_store(
            self.linear(x, self.qkv),
            self.head_norm,
            self.head_norm,
            1e-5,
            self.table,
            self.positions,
            self.keys,
            self.values,
            self.slots,
        )
        mixed = ops.paged_attention(q, self.keys, self.values, self.tables, self.starts, self.lens, 0.2, 0)
        x = self.linear(mixed.view(self.rows, HEADS * DIM), self.out, self.bias)
        ops.add_lora(x, residual, self.adapters, self.down, self.up, self.ranks, self.scales, (60, HIDDEN - 60))
        x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
        gated = ops.gated_linear_int8 if self.int8 else ops.gated_linear
        x, _ = ops.add_rms_norm(gated(x, self.gate_up, None, "silu"), residual, self.norm, 1e-5)
        return ops.linear(x, self.embed, None, torch.float32)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_replay_is_the_function(rows: int, dtype: torch.dtype, int8: bool) -> None:
    layer = Layer(rows, dtype, int8=int8)
    layer.fill(0)
    captured, replay = capture(layer, CaptureMemory(1 << 20))
    assert torch.equal(captured, layer())
    for seed in (1, 2):
        layer.fill(seed)
        replay()
        replayed = captured.clone(), layer.keys.clone(), layer.values.clone()
        layer.fill(seed)
        assert torch.equal(replayed[0], layer())
        assert torch.equal(replayed[1], layer.keys) and torch.equal(replayed[2], layer.values)


def test_captured_functions_share_one_memory() -> None:
    memory = CaptureMemory(1 << 20)
    layers = [Layer(rows, torch.float32, int8=False) for rows in (3, 1, 8)]
    graphs = []
    for layer in layers:
        layer.fill(0)
        graphs.append(capture(layer, memory))
    for seed in (1, 2):
        for layer, (captured, replay) in zip(layers, graphs, strict=True):
            layer.fill(seed)
            replay()
            replayed = captured.clone()
            layer.fill(seed)
            assert torch.equal(replayed, layer())


def test_freed_tensors_leave_their_memory_to_later_ones() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)

    def deep(layers: int) -> Callable[[], Tensor]:
        def function() -> Tensor:
            y = x
            for _ in range(layers):
                y = ops.rms_norm(y, weight, 1e-5).view(64, 4).view(4, 64)
            return y

        return function

    memory = CaptureMemory(3 * x.nbytes)  # a layer's input, its output, and one more
    captured, replay = capture(deep(50), memory)
    x.normal_()
    replay()
    assert torch.equal(captured, deep(50)())


@pytest.mark.parametrize("kind", ["torch", "op", "memory"])
def test_what_cannot_be_captured_raises_and_leaves_nothing_behind(kind: str) -> None:
    layer = Layer(2, torch.float32, int8=False)
    layer.fill(0)
    rows, greedy = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    functions: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: layer() * 2,
        "op": lambda: ops.sample(layer(), rows, rows, greedy),
        "memory": layer,
    }
    reason = {"torch": "torch's mul", "op": "an op that cannot be captured", "memory": "more than 1000 bytes"}
    with pytest.raises(NotCapturable, match=reason[kind]):
        capture(functions[kind], CaptureMemory(1000 if kind == "memory" else 1 << 20))
    expected = functions[kind]()
    assert torch.equal(functions[kind](), expected)
    captured, _ = capture(layer, CaptureMemory(1 << 20))
    assert torch.equal(captured, layer())


@pytest.mark.parametrize(
    ("name", "value"), [("ids", VOCAB), ("positions", -1), ("slots", BLOCKS * PAGE), ("lens", 65), ("adapters", 2)]
)
def test_contents_are_checked_at_each_replay(name: str, value: int) -> None:
    layer = Layer(3, torch.float32, int8=False)
    layer.fill(0)
    captured, replay = capture(layer, CaptureMemory(1 << 20))
    getattr(layer, name)[1] = value
    with pytest.raises(ValueError, match=r"outside|longer|no slot"):
        replay()
    layer.fill(3)
    replay()
    replayed = captured.clone()
    layer.fill(3)
    assert torch.equal(replayed, layer())
