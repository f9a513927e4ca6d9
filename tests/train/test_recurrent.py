"""Layers with recurrent states in the trainer: the values of the ops, gradients that depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.train.references import cosine
from tokserve import ops
from tokserve.families.recurrent import replay
from tokserve.families.recurrent.layers import GatedDelta, GatedDeltaSpec, Recurrent, ShortConv, ShortConvSpec
from tokserve.families.state_space import replay as state_space_replay
from tokserve.families.state_space.layers import StateSpace, StateSpaceSpec
from tokserve.layers.options import LayerOptions
from tokserve.train.batch import PackedBatch
from tokserve.train.layers.recurrent import recurrence
from tokserve.train.tree import pack

HIDDEN = 32
OPTIONS = LayerOptions(torch.float32)
DELTA: dict[str, Any] = {"heads": 4, "dim": 24, "key_heads": 2, "key_dim": 16, "taps": 4, "eps": 1e-6}
GROUPED = GatedDeltaSpec(**DELTA, grouped=True, names=(("in_proj_qkvz", 256),), rate_names=(("in_proj_ba", 8),))
FLAT = GatedDeltaSpec(
    **DELTA,
    grouped=False,
    names=(("in_proj_qkv", 160), ("in_proj_z", 96)),
    rate_names=(("in_proj_b", 4), ("in_proj_a", 4)),
)
SCAN = StateSpaceSpec(
    heads=4, dim=16, groups=2, size=8, taps=4, eps=1e-5, norm_size=32, conv_bias=True, limits=(0.01, 2.0)
)
LAYERS: dict[str, Callable[[], Recurrent]] = {
    "delta-grouped": lambda: GatedDelta(HIDDEN, GROUPED, OPTIONS),
    "delta": lambda: GatedDelta(HIDDEN, FLAT, OPTIONS),
    "conv": lambda: ShortConv(HIDDEN, ShortConvSpec(3, bias=True), OPTIONS),
    "state-space": lambda: StateSpace(HIDDEN, SCAN, OPTIONS),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Recurrent:
    """A layer with weights for its recurrence alone."""
    layer_with_weights = LAYERS[request.param]()
    for number, (name, parameter) in enumerate(layer_with_weights.vectors().items()):
        values = drawn(*parameter.shape, seed=number)
        parameter.load(values.abs() + 0.5 if name in ("A_log", "norm.weight") else values * 0.5)
    return layer_with_weights


def vectors(layer: Recurrent, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The values that `layer` was given, as leaves."""
    values = {}
    for number, (name, parameter) in enumerate(layer.vectors().items()):
        drawn_values = drawn(*parameter.shape, seed=number)
        drawn_values = drawn_values.abs() + 0.5 if name in ("A_log", "norm.weight") else drawn_values * 0.5
        values[name] = drawn_values.to(dtype).requires_grad_()
    return values


def projected(layer: Recurrent, tokens: int, seed: int = 7) -> list[Tensor]:
    return [drawn(tokens, linear.outputs, seed=seed + number) for number, linear in enumerate(layer.projections())]


def gradients(
    layer: Recurrent, sequences: Sequence[Sequence[int]], inputs: Sequence[Tensor], grad: Tensor, *, share: bool = True
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The gradients of what is projected, token by token, sequence after sequence, and of the vectors.  `inputs` and
    `grad` have a row for each of these tokens; those of tokens that sequences share are the same."""
    packing = pack([np.array(ids, np.int32) for ids in sequences], share=share)
    index = torch.from_numpy(np.concatenate(packing.index))
    leaves = []
    for part in inputs:
        leaf = torch.zeros(len(packing.input_ids), part.shape[1])
        leaf[index] = part
        leaves.append(leaf.requires_grad_())
    masters = vectors(layer)
    out = recurrence(leaves, layer, PackedBatch(packing, torch.device("cpu")), masters)
    out[index].backward(grad)
    return [leaf.grad[index] for leaf in leaves if leaf.grad is not None], {
        name: master.grad for name, master in masters.items() if master.grad is not None
    }


def test_the_replay_has_the_ops_values(layer: Recurrent) -> None:
    """Over pieces of a sequence, each of which goes on from the memory of the one before."""
    inputs, values = projected(layer, 150), vectors(layer)
    packing = pack([np.arange(150, dtype=np.int32)], share=False)
    expected = recurrence(inputs, layer, PackedBatch(packing, torch.device("cpu")), values)
    memory, parts = None, []
    for start, end in ((0, 1), (1, 37), (37, 101), (101, 150)):
        earlier = min(start, layer.kv_spec().taps - 1)
        pieces = [part[start - earlier : end] for part in inputs]
        out, memory = layer.replay(pieces, earlier, memory, values)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)


def test_chunks_change_gradients_by_rounding_only(layer: Recurrent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against token after token in float64, where the products of a chunk are those of single tokens."""
    inputs, sequence = projected(layer, 150), list(range(150))
    grad = drawn(150, layer.out.inputs, seed=3)
    actual, of_vectors = gradients(layer, [sequence], inputs, grad)
    for module in (replay, state_space_replay):
        monkeypatch.setattr(module, "CHUNK", 1)
    leaves = [part.double().requires_grad_() for part in inputs]
    values = vectors(layer, torch.float64)
    out, _ = layer.replay(leaves, 0, None, values)
    out.backward(grad.double())
    for one, leaf in zip(actual, leaves, strict=True):
        assert leaf.grad is not None and cosine(one, leaf.grad) > 1 - 1e-9
    assert of_vectors.keys() == values.keys()
    for name, leaf in values.items():
        assert leaf.grad is not None and cosine(of_vectors[name], leaf.grad) > 1 - 1e-8, name


def test_gradients_of_a_tree_are_those_of_its_sequences(layer: Recurrent) -> None:
    """Prefixes shorter and longer than a convolution, a sequence that is a prefix of others, nodes of one token."""
    rows = drawn(60, 1, seed=5)
    stem = list(range(40))
    sequences = [stem[:2], [*stem[:2], 50], [*stem, 51, 52], [*stem, 51, 53, 54], [*stem[:20], 55], [56, 57, 58, 59]]
    sequences.sort()
    order = torch.tensor([token for ids in sequences for token in ids])
    inputs = [part[order] for part in projected(layer, 60)]
    grad = drawn(len(order), layer.out.inputs, seed=4) * rows[order]
    shared, separate = (gradients(layer, sequences, inputs, grad, share=share) for share in (True, False))
    totals = [torch.zeros(2, 60, part.shape[1]) for part in inputs]
    # a token's place in the tree is its sequence up to it: the gradients of equal prefixes are added
    for total, one, other in zip(totals, shared[0], separate[0], strict=True):
        counts = torch.zeros(60).index_add_(0, order, torch.ones(len(order)))
        total[0].index_add_(0, order, one)
        total[0] /= counts.clamp(min=1)[:, None]
        total[1].index_add_(0, order, other)
        torch.testing.assert_close(total[0], total[1], rtol=1e-4, atol=1e-5)
    for name, gradient in shared[1].items():
        torch.testing.assert_close(gradient, separate[1][name], rtol=1e-4, atol=1e-4)


def test_a_sequences_gradients_depend_on_no_other_and_on_no_thread(layer: Recurrent) -> None:
    lengths, seeds = (70, 131, 5), (11, 21, 31)
    inputs = [
        torch.cat(pieces) for pieces in zip(*map(lambda n, s: projected(layer, n, s), lengths, seeds), strict=True)
    ]
    grad = drawn(sum(lengths), layer.out.inputs, seed=3)
    sequences = [[1000 * number + token for token in range(length)] for number, length in enumerate(lengths)]
    together, of_vectors = gradients(layer, sequences, inputs, grad)
    start = 0
    for sequence in sequences:
        rows = slice(start, start + len(sequence))
        alone, _ = gradients(layer, [sequence], [part[rows] for part in inputs], grad[rows])
        assert all(torch.equal(one, part[rows]) for one, part in zip(alone, together, strict=True))
        start = rows.stop
    ops.bind("cpu", {}, 2)
    again, again_of_vectors = gradients(layer, sequences, inputs, grad)
    assert all(torch.equal(one, other) for one, other in zip(again, together, strict=True))
    assert all(torch.equal(again_of_vectors[name], one) for name, one in of_vectors.items())


def test_gradients_are_in_float32_whatever_the_process_allows(
    layer: Recurrent, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, grad, backend = projected(layer, 70), drawn(70, layer.out.inputs, seed=3), torch.backends.cuda.matmul
    expected, _ = gradients(layer, [range(70)], inputs, grad)
    seen, replayed = [], layer.replay

    def replay_and_look(*arguments: Any) -> Any:
        seen.append((backend.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision))  # type: ignore[attr-defined]
        return replayed(*arguments)

    monkeypatch.setattr(layer, "replay", replay_and_look)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            actual, _ = gradients(layer, [range(70)], inputs, grad)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("ieee", "ieee")]
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_a_frozen_vector_has_no_gradient(layer: Recurrent) -> None:
    packing = pack([np.arange(9, dtype=np.int32)], share=False)
    masters = vectors(layer)
    frozen, *others = masters
    masters[frozen] = masters[frozen].detach()
    inputs = [part.requires_grad_() for part in projected(layer, 9)]
    recurrence(inputs, layer, PackedBatch(packing, torch.device("cpu")), masters).sum().backward()
    assert masters[frozen].grad is None
    assert all(masters[name].grad is not None for name in others)
