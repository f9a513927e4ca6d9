"""The Triton kernels of gradients: near the references, and with == where a sum has to have one order."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from tests.ops.test_exact import randn  # noqa: E402
from tests.ops.test_triton import DEVICE, DTYPES, INTERPRETED, on_device, to_cpu, to_device  # noqa: E402
from tests.train.references import cosine  # noqa: E402
from tokserve.ops import gradients  # noqa: E402
from tokserve.ops.registry import OPS  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # relative error of a gradient
TREE = [(-1, 30), (0, 36), (1, 3), (0, 5), (-1, 5)]  # (parent, or -1; tokens) by node
OF_A_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)] if INTERPRETED else DTYPES
)


def tree(nodes: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """query_start, paths and path_start of nodes."""
    starts, paths = [0, *accumulate(count for _, count in nodes)], []
    for number, (parent, count) in enumerate(nodes):
        before = paths[parent] if parent >= 0 else []
        paths.append([*before, *range(starts[number], starts[number] + count)])
    path_start = torch.tensor([0, *accumulate(map(len, paths))])
    return torch.tensor(starts), torch.tensor([token for path in paths for token in path]), path_start


def drawn(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    """grad, q, k and v."""
    counts = (heads, heads, kv_heads, kv_heads)
    return [randn(dtype, seed, tokens, count, dim) for seed, count in enumerate(counts)]


@OF_A_DTYPE
@pytest.mark.parametrize(
    ("window", "softcap", "dim"),
    [(0, 0.0, 16), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((9, 2.0, 24), (37, 0.0, 40)))],
)
def test_attention_of_a_tree_is_near_float64(window: int, softcap: float, dim: int, dtype: torch.dtype) -> None:
    inputs, shape = drawn(dtype, 79, 4 if softcap else 2, 2 if softcap else 1, dim), tree(TREE)
    actual = on_device("attention_gradients")(*inputs, *shape, 0.3, window, softcap)
    wide = [x.double() for x in inputs]
    expected = gradients.attention_gradients.reference(*wide, *shape, 0.3, window, softcap)
    for gradient, reference in zip(actual, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient.double() - reference).norm() / reference.norm() < CLOSE[dtype]
        assert cosine(gradient, reference) > (0.9999999 if dtype == torch.float32 else 0.9999)


@pytest.mark.slow
@OF_A_DTYPE
def test_a_sequences_attention_gradients_have_the_same_bits_in_a_batch(dtype: torch.dtype) -> None:
    """A group with a common prefix among other sequences, and by itself; v is a slice of a wider tensor."""
    call = on_device("attention_gradients")
    batch = [(-1, 3), (-1, 66), (1, 2), (-1, 5)]
    grad, q, k, v = drawn(dtype, 76, 2, 1, 16)
    wide = torch.cat([k, v, q], 1)[:, 1:2]
    together = call(grad, q, k, wide, *tree(batch), 0.3, 0)
    for rows, nodes in ((slice(0, 3), batch[:1]), (slice(3, 71), [(-1, 66), (0, 2)])):
        alone = call(*(x[rows] for x in (grad, q, k, v)), *tree(nodes), 0.3, 0)
        assert all(torch.equal(one, all_rows[rows]) for one, all_rows in zip(alone, together, strict=True))


@OF_A_DTYPE
def test_rows_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    product, norm, centered, activation = (
        on_device(name) for name in ("matrix_product", "norm_gradients", "layer_norm_gradients", "activation_gradients")
    )
    grad, x, weight = (randn(dtype, seed, *shape) for seed, shape in enumerate([(33, 40), (33, 40), (40,)]))
    matrix, both = randn(dtype, 3, 40, 20), randn(dtype, 4, 33, 80)
    calls = [
        lambda rows: product(grad[rows], matrix, torch.float32),
        lambda rows: norm(grad[rows], x[rows], weight, 1e-5, x[rows])[0],
        lambda rows: centered(grad[rows], x[rows], weight, 1e-5, x[rows])[0],
        lambda rows: activation(grad[rows], both[rows], "silu", True),
    ]
    for call in calls:
        all_rows = call(slice(0, 33))
        for rows in (slice(4, 5), slice(3, 20)):
            assert torch.equal(call(rows), all_rows[rows])


@OF_A_DTYPE
def test_gradients_of_experts_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """Rows of an expert with more than a tile of them, and of one with none between; and the same with fewer."""
    of_weights, rows, route = (
        on_device(name) for name in ("expert_weight_gradients", "row_products", "route_gradients")
    )
    call: Any = OPS["expert_products"].implementations["triton"].call
    counts, shapes = [3, 0, 140], [(143, 40), (143, 24), (3, 40, 24)]
    grad, x, weights = (randn(dtype, seed, *shape) for seed, shape in enumerate(shapes))
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    fewer = torch.tensor([0, 0, 1, 61], dtype=torch.int32)
    chosen = torch.cat([torch.arange(1), torch.arange(40, 100)])
    for transposed in (False, True):
        stored = [one.t().contiguous() if transposed else one for one in weights]
        on_card = [to_device(one) for one in stored]
        both = to_cpu(call(to_device(grad), on_card, to_device(starts), transposed, torch.float32))
        expected = gradients.expert_products.reference(grad, stored, starts, transposed, torch.float32)
        torch.testing.assert_close(both, expected, atol=1e-4, rtol=1e-4)
        # the one row of the first expert is now one of the second, of the same weight
        on_card[1] = on_card[0]
        part = to_cpu(call(to_device(grad[chosen]), on_card, to_device(fewer), transposed, torch.float32))
        assert torch.equal(part, both[chosen])
    total = of_weights(grad, x, starts)
    expected = gradients.expert_weight_gradients.reference(grad, x, starts)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)
    assert not total[1].any()
    alone = of_weights(grad[3:], x[3:], torch.tensor([0, 140], dtype=torch.int32))
    assert torch.equal(alone[0], total[2])
    logits, of_choices = randn(torch.float32, 4, 20, 24), randn(torch.float32, 5, 20, 3)
    ids = logits.sort(dim=-1, descending=True).indices[:, :3].int().contiguous()
    for sigmoid in (False, True):
        every = route(of_choices, logits, ids, sigmoid, True, 0.0, 2.5)
        assert torch.equal(route(of_choices[4:9], logits[4:9], ids[4:9], sigmoid, True, 0.0, 2.5), every[4:9])
    assert torch.equal(rows(grad[4:9], grad[5:10]), rows(grad[:-1], grad[1:])[4:9])


def test_long_sums_have_one_order() -> None:
    """The weight and bias of norms over several parts of rows, rows by place, and a row's mass over several blocks."""
    rows = 20
    grad, x, weight = randn(torch.float32, 1, rows, 2050), randn(torch.float32, 2, rows, 2050), torch.ones(2050)
    _, of_weight = on_device("norm_gradients")(grad, x, weight, 1e-5)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(of_weight.double(), (grad.double() * normed).sum(0), atol=1e-5, rtol=1e-5)
    centered = x.double() - x.double().mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)
    _, of_weight, of_bias = on_device("layer_norm_gradients")(grad, x, weight, 1e-5)
    torch.testing.assert_close(of_weight.double(), (grad.double() * normed).sum(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_bias.double(), grad.double().sum(0), atol=1e-5, rtol=1e-5)
    places = torch.tensor([3, 0, 3, 3, 1] * 4)
    expected = torch.zeros(5, 2050)
    for row, place in zip(grad, places.tolist(), strict=True):
        expected[place] += row
    assert torch.equal(on_device("sum_rows")(grad, places, 5), expected)
    logits = 4.0 * randn(torch.float32, 5, 2, 9000)
    softmax: Any = OPS["softmax"].implementations["triton"].call
    wide = to_cpu(softmax(to_device(logits.clone())))
    torch.testing.assert_close(wide.double(), logits.double().softmax(-1), atol=1e-7, rtol=1e-5)
    assert torch.equal(to_cpu(softmax(to_device(logits[1:].clone()))), wide[1:])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
def test_slopes_far_from_zero_are_finite(activation: str) -> None:
    x = torch.tensor([[-3e4, -90.0, -0.0, 90.0, 3e4]], device=DEVICE)
    call: Any = OPS["activation_gradients"].implementations["triton"].call
    actual = to_cpu(call(torch.ones_like(x), x, activation))
    expected = gradients.activation_gradients.reference(torch.ones(1, 5), x.cpu(), activation)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
