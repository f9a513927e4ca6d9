"""Each op's gradient against float64 autograd of the plain formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiers import paired, slow_cases
from tests.train import references
from tests.train.references import cosine
from tokserve import ops
from tokserve.layers.norm import NormSpec, RMSNorm
from tokserve.ops import gradients
from tokserve.train.layers import backward

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
    grad_x, grad_weight = expected(partial(references.norm, eps=1e-5), grad, x, weight)
    for upstream, carried in ((grad, None), (grad.float(), 0.1 * x)):
        actual, of_weight = ops.norm_gradients(upstream, x, weight, 1e-5, carried)
        assert actual.dtype == dtype
        assert_close(actual, grad_x if carried is None else grad_x + carried.double(), dtype)
        assert_close(of_weight, grad_weight, torch.float32)


@DTYPES
def test_layer_norm(dtype: torch.dtype) -> None:
    x, grad = (3.0 * drawn(300, 64) + 1.0).to(dtype), drawn(300, 64, seed=1).to(dtype)
    weight, bias = drawn(64, seed=2).to(dtype), drawn(64, seed=3).to(dtype)
    plain = partial(torch.nn.functional.layer_norm, eps=1e-5)
    grad_x, *others = expected(lambda x, *vectors: plain(x, (64,), *vectors), grad, x, weight, bias)
    for upstream, carried in ((grad, None), (grad.float(), 0.1 * x)):
        actual, *vectors = ops.layer_norm_gradients(upstream, x, weight, 1e-5, carried)
        assert actual.dtype == dtype
        assert_close(actual, grad_x if carried is None else grad_x + carried.double(), dtype)
        for vector, reference in zip(vectors, others, strict=True):
            assert_close(vector, reference, torch.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    for rotated in (16, 8):
        grads, table = (drawn(40, 3, 16), drawn(40, 1, 16, seed=1)), drawn(64, rotated, seed=2)
        positions = torch.arange(7, 47)
        actual = backward.rope(*grads, table, positions, interleaved=interleaved)
        turn = partial(turned, table=table[positions].double(), interleaved=interleaved)
        for grad, gradient in zip(grads, actual, strict=True):
            (reference,) = expected(turn, grad, grad)  # linear: the same anywhere
            assert_close(gradient, reference, torch.float32)


def turned(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    if not interleaved:
        return references.rope(x, table)
    half = table.shape[-1] // 2
    halves = torch.cat([x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]], -1)
    out = references.rope(halves, table)
    pairs = torch.stack([out[..., :half], out[..., half : 2 * half]], -1).flatten(-2)
    return torch.cat([pairs, out[..., 2 * half :]], -1)


@DTYPES
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gate(name: str, dtype: torch.dtype) -> None:
    both, grad = (2.0 * drawn(300, 64)).to(dtype), drawn(300, 32, seed=1).to(dtype)

    def gate(both: Tensor) -> Tensor:
        return references.activation(name, both[:, :32]) * both[:, 32:]

    (reference,) = expected(gate, grad, both)
    actual = ops.activation_gradients(grad, both, name, True)
    assert actual.dtype == dtype
    assert_close(actual, reference, dtype)


@DTYPES
@pytest.mark.parametrize(
    ("stretch", "options"), paired([(0, 40), (0, 600), (37, 1), (301, 290)], [*product([300, 9, 0], [1.5, 0.0])])
)
def test_attention(stretch: tuple[int, int], options: tuple[int, float], dtype: torch.dtype) -> None:
    """One sequence in one node, or in two of which the first has no gradient of its own."""
    (start, count), (window, softcap) = stretch, options
    q, grad = (drawn(start + count, 6, 16, seed=seed).to(dtype) for seed in (0, 1))
    grad[:start] = 0.0
    k, v = (drawn(start + count, 2, 16, seed=seed).to(dtype) for seed in (2, 3))
    cuts = torch.tensor([0, start, start + count])
    paths = torch.cat([torch.arange(start), torch.arange(start + count)])
    path_start = torch.tensor([0, start, 2 * start + count])
    actual = ops.attention_gradients(grad, q, k, v, cuts, paths, path_start, 0.3, window, softcap)
    function = partial(references.attention, scale=0.3, window=window, softcap=softcap)
    for gradient, reference in zip(actual, expected(function, grad, q, k, v), strict=True):
        assert gradient.dtype == torch.float32
        assert_close(gradient, reference, dtype)


def test_the_reference_of_attentions_gradient_in_float64() -> None:
    """Branches of a tree, against autograd of each sequence by itself."""
    q, grad = (drawn(40, 4, 8, seed=seed).double() for seed in (0, 1))
    k, v = (drawn(40, 2, 8, seed=seed).double() for seed in (2, 3))
    paths = [range(11), range(20), [*range(11), *range(20, 40)]]
    cuts, path_start = torch.tensor([0, 11, 20, 40]), torch.tensor([0, 11, 31, 62])
    flat = torch.tensor([token for path in paths for token in path])
    for window, softcap in ((0, 0.0), (7, 2.0)):
        op = gradients.attention_gradients.reference
        actual = op(grad, q, k, v, cuts, flat, path_start, 0.3, window, softcap)

        def all_rows(q: Tensor, k: Tensor, v: Tensor, window: int = window, softcap: float = softcap) -> Tensor:
            parts = [
                references.attention(q[first:last], k[list(path)], v[list(path)], 0.3, window, softcap)
                for path, (first, last) in zip(paths, pairwise(cuts.tolist()), strict=True)
            ]
            return torch.cat(parts)

        for gradient, reference in zip(actual, expected(all_rows, grad, q, k, v), strict=True):
            assert gradient.dtype == torch.float64
            assert (gradient - reference).abs().max() < 1e-12


def with_gradient(forward: Callable[..., Tensor], backward: Callable[..., tuple[Tensor, ...]]) -> Any:
    """A function whose gradient is `backward`, of the result's gradient and the inputs."""

    class Checked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    return Checked.apply


def double(*shape: int, seed: int) -> Tensor:
    return drawn(*shape, seed=seed).double().requires_grad_()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
def test_gradcheck_of_activations(name: str, gated: bool) -> None:
    """Finite differences in float64 of the reference, against the reference of its gradient; so the next two."""
    function = with_gradient(
        lambda x: ops.elementwise.activate.reference(x, name, gated),
        lambda grad, x: gradients.activation_gradients.reference(grad, x, name, gated),
    )
    assert torch.autograd.gradcheck(function, double(5, 8, seed=1))


def test_gradcheck_of_norms() -> None:
    function = with_gradient(
        lambda x, weight: ops.elementwise.rms_norm.reference(x, weight, 1e-5),
        lambda grad, x, weight: gradients.norm_gradients.reference(grad, x, weight, 1e-5),
    )
    assert torch.autograd.gradcheck(function, (double(6, 9, seed=1), double(9, seed=2)))
    centered = with_gradient(
        lambda x, weight, bias: torch.nn.functional.layer_norm(x, (9,), weight, bias, 1e-5),
        lambda grad, x, weight, bias: gradients.layer_norm_gradients.reference(grad, x, weight, 1e-5),
    )
    assert torch.autograd.gradcheck(centered, (double(6, 9, seed=1), double(9, seed=2), double(9, seed=3)))


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("normalize", "added"), [(False, 0.0), (True, 0.0), (True, 0.1)])
def test_gradcheck_of_a_routers_weights(sigmoid: bool, normalize: bool, added: float) -> None:
    """The choice itself stays."""
    logits = double(5, 8, seed=1)
    ids = logits.detach().sort(dim=-1, descending=True).indices[:, :3].int()

    def weights(logits: Tensor) -> Tensor:
        scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
        chosen = scores.gather(1, ids.long())
        return 2.5 * (chosen / (chosen.sum(-1, keepdim=True) + added) if normalize else chosen)

    function = with_gradient(
        weights,
        lambda grad, logits: gradients.route_gradients.reference(grad, logits, ids, sigmoid, normalize, added, 2.5),
    )
    assert torch.autograd.gradcheck(function, logits)


@pytest.mark.parametrize(("window", "softcap"), slow_cases([(3, 1.5), (0, 0.0), (3, 0.0), (0, 1.5)], (3, 1.5)))
def test_gradcheck_of_attention(window: int, softcap: float) -> None:
    cuts, path = torch.tensor([0, 7]), torch.arange(7)
    function = with_gradient(
        partial(references.attention, scale=0.3, window=window, softcap=softcap),
        lambda grad, q, k, v: gradients.attention_gradients.reference(
            grad, q, k, v, cuts, path, cuts, 0.3, window, softcap
        ),
    )
    inputs = (double(7, 4, 6, seed=1), double(7, 2, 6, seed=2), double(7, 2, 6, seed=3))
    assert torch.autograd.gradcheck(function, inputs)


@DTYPES
def test_a_sequences_attention_gradient_has_the_same_bits_in_a_batch(dtype: torch.dtype) -> None:
    sizes = (130, 1, 77, 300)
    total = sum(sizes)
    cuts = torch.tensor([0, *accumulate(sizes)])
    q, grad = (drawn(total, 6, 40, seed=seed).to(dtype) for seed in (0, 1))
    k, v = (drawn(total, 2, 40, seed=seed).to(dtype) for seed in (2, 3))
    all_rows = ops.attention_gradients(grad, q, k, v, cuts, torch.arange(total), cuts, 0.2, 90)
    for first, last in pairwise(cuts.tolist()):
        rows, ends = slice(first, last), torch.tensor([0, last - first])
        alone = ops.attention_gradients(
            grad[rows], q[rows], k[rows], v[rows], ends, torch.arange(last - first), ends, 0.2, 90
        )
        assert all(torch.equal(one, part[rows]) for one, part in zip(alone, all_rows, strict=True))


@pytest.mark.slow
def test_partial_sums_that_do_not_fit_into_memory_together_change_no_bit() -> None:
    """8 KV heads of 4096 tokens need 84 MB of them, and one needs 10."""
    length, heads, dim = 4096, 8, 128
    cuts, path = torch.tensor([0, length]), torch.arange(length)
    x = [drawn(length, heads, dim, seed=seed).bfloat16() for seed in range(4)]
    all_rows = ops.attention_gradients(*x, cuts, path, cuts, 0.1, 0)
    for head in range(0, heads, 3):
        alone = ops.attention_gradients(*(one[:, head : head + 1] for one in x), cuts, path, cuts, 0.1, 0)
        assert all(torch.equal(one, part[:, head : head + 1]) for one, part in zip(alone, all_rows, strict=True))


def test_rows_do_not_depend_on_other_rows() -> None:
    grad, both, x, weight = drawn(300, 64), drawn(300, 128, seed=1), drawn(300, 64, seed=2), drawn(64, seed=3)
    for dtype in (torch.float32, torch.bfloat16):
        gradients = [
            lambda rows, dtype=dtype: backward.linear_input(grad[rows].to(dtype), [drawn(64, 40, seed=4)]),
            lambda rows, dtype=dtype: ops.norm_gradients(grad[rows].to(dtype), x[rows].to(dtype), weight, 1e-5)[0],
            lambda rows, dtype=dtype: ops.activation_gradients(
                grad[rows].to(dtype), both[rows].to(dtype), "silu", True
            ),
        ]
        for gradient in gradients:
            all_rows = gradient(slice(0, 300))
            for rows in (slice(0, 1), slice(3, 150), slice(129, 300)):
                assert torch.equal(gradient(rows), all_rows[rows])


@DTYPES
def test_a_weights_gradient_has_the_same_bits_whichever_operand_is_transposed(dtype: torch.dtype) -> None:
    ops.bind("cpu")
    for tokens, outputs, inputs in ((290, 700, 33), (290, 33, 700), (70, 64, 64), (131, 300, 7)):
        grad, x = drawn(tokens, outputs).to(dtype), drawn(tokens, inputs, seed=1).to(dtype)
        plain = ops.linear(grad.t().contiguous(), ops.pack_linear(x.t().contiguous()), None, torch.float32)
        assert backward.linear_weight(grad, x).equal(plain)
        narrow = drawn(tokens, outputs + 5).to(dtype)[:, :outputs]  # rows that are not adjacent
        assert backward.linear_weight(narrow, x).equal(backward.linear_weight(narrow.contiguous(), x))


def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    layer = RMSNorm(64, NormSpec(1e-6), torch.float32)
    layer.load(torch.ones(64))
    arguments = drawn(290, 6, 16), drawn(290, 6, 16, seed=1), drawn(290, 2, 16, seed=2), drawn(290, 2, 16, seed=3)

    cuts = torch.tensor([0, 290])

    def both() -> list[Tensor]:
        return [
            *ops.attention_gradients(*arguments, cuts, torch.arange(290), cuts, 0.3, 0),
            backward.linear_weight(drawn(290, 70), drawn(290, 33, seed=1)),
            ops.norm_gradients(drawn(1290, 70), drawn(1290, 70, seed=1), drawn(70, seed=2), 1e-5)[1],
        ]

    results = []
    for threads in (1, 2):
        ops.bind("cpu", {}, threads)
        results.append(both())
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
