"""Each op's gradient against float64 autograd of the plain formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.train import references
from tests.train.references import cosine
from tokserve import ops
from tokserve.layers.norm import NormSpec, RMSNorm
from tokserve.train import backward
from tokserve.train.products import Products

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # largest relative error of a gradient
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """float64 gradients of the inputs, given the result's."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad.double())


def assert_close(gradient: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    assert gradient.shape == reference.shape
    error = (gradient.double() - reference).norm() / reference.norm()
    assert error < CLOSE[dtype]
    assert cosine(gradient, reference) > (0.9999 if dtype == torch.float32 else 0.999)


@DTYPES
def test_linear(dtype: torch.dtype) -> None:
    x, grad = drawn(70, 96).to(dtype), drawn(70, 200, seed=1).to(dtype)
    weights = [drawn(130, 96, seed=2).to(dtype).float(), drawn(70, 96, seed=3).to(dtype).float()]
    grad_x, grad_weight = expected(lambda x, *w: x @ torch.cat(w).t(), grad, x, *weights)[:2]
    assert_close(backward.linear_input(grad, weights), grad_x, dtype)
    gradient = backward.linear_weight(grad, x)
    assert gradient.dtype == torch.float32
    assert_close(gradient[:130], grad_weight, torch.float32)  # products of exact operands, summed in float32


@DTYPES
def test_rms_norm(dtype: torch.dtype) -> None:
    x, grad = (3.0 * drawn(300, 64)).to(dtype), drawn(300, 64, seed=1).to(dtype)
    weight = drawn(64, seed=2).to(dtype)
    found = backward.rms_norm(grad, x, weight, 1e-5)
    for gradient, reference in zip(found, expected(partial(references.norm, eps=1e-5), grad, x, weight), strict=True):
        assert_close(gradient, reference, torch.float32)


def test_rope() -> None:
    for rotated in (16, 8):
        x, grad, table = drawn(40, 3, 16), drawn(40, 3, 16, seed=1), drawn(64, rotated, seed=2)
        positions = torch.arange(7, 47)
        (reference,) = expected(lambda x, table=table, p=positions: references.rope(x, table[p].double()), grad, x)
        assert_close(backward.rope(grad, table, positions), reference, torch.float32)


@DTYPES
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gate(name: str, dtype: torch.dtype) -> None:
    both, grad = (2.0 * drawn(300, 64)).to(dtype), drawn(300, 32, seed=1).to(dtype)

    def gate(both: Tensor) -> Tensor:
        return references.activation(name, both[:, :32]) * both[:, 32:]

    (reference,) = expected(gate, grad, both)
    found = (backward.silu_mul if name == "silu" else backward.gelu_mul)(grad, both)
    assert found.dtype == dtype
    assert_close(found, reference, dtype)


@DTYPES
@pytest.mark.parametrize("window", [0, 9, 300])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("start", "count"), [(0, 40), (0, 600), (37, 1), (301, 290)])
def test_attention(start: int, count: int, window: int, dtype: torch.dtype, *, native: bool) -> None:
    q, grad = (drawn(count, 6, 16, seed=seed).to(dtype) for seed in (0, 1))
    k, v = (drawn(start + count, 2, 16, seed=seed).to(dtype) for seed in (2, 3))
    function = partial(references.attention, scale=0.3, window=window)
    found = Products(native=native).attention(grad, q, k, v, start, 0.3, window)
    for gradient, reference in zip(found, expected(function, grad, q, k, v), strict=True):
        assert gradient.dtype == torch.float32
        assert_close(gradient, reference, dtype)


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    grad, both, x, weight = drawn(300, 64), drawn(300, 128, seed=1), drawn(300, 64, seed=2), drawn(64, seed=3)
    for dtype in (torch.float32, torch.bfloat16):
        gradients = [
            lambda rows, dtype=dtype: backward.linear_input(grad[rows].to(dtype), [drawn(64, 40, seed=4)]),
            lambda rows, dtype=dtype: backward.rms_norm(grad[rows].to(dtype), x[rows], weight, 1e-5)[0],
            lambda rows, dtype=dtype: backward.silu_mul(grad[rows].to(dtype), both[rows].to(dtype)),
        ]
        for gradient in gradients:
            whole = gradient(slice(0, 300))
            for rows in (slice(0, 1), slice(3, 150), slice(129, 300)):
                assert torch.equal(gradient(rows), whole[rows])


def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    layer = RMSNorm(64, NormSpec(1e-6), torch.float32)
    layer.load(torch.ones(64))
    arguments = drawn(290, 6, 16), drawn(290, 6, 16, seed=1), drawn(290, 2, 16, seed=2), drawn(290, 2, 16, seed=3)

    def gradients() -> list[Tensor]:
        return [
            *backward.attention(*arguments, 0, 0.3, 0),
            backward.linear_weight(drawn(290, 70), drawn(290, 33, seed=1)),
        ]

    found = []
    for threads in (1, 2):
        ops.bind("cpu", {}, threads)
        found.append(gradients())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
