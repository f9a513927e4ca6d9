"""Every implementation against its reference, and the references against formulas written another way."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops import pages
from tests.ops.packing import PACKING, pack_arguments, takes_packed
from tests.ops.samples import samples
from tokserve import ops  # noqa: F401  (declares the ops)
from tokserve.ops import registry
from tokserve.ops.registry import OPS, Op

registry.load_extension("cpu")
OTHERS = [
    pytest.param(op, name, dtype, id=f"{op.name}-{name}-{str(dtype)[6:]}")
    for op in OPS.values()
    for name in op.available("cpu")
    for dtype in op.tolerance
    if name != registry.REFERENCE
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(op: Op[Any, Any], name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the implementation returns, and its arguments after the call (some write into them)."""
    arguments = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
    call = op.implementations[name].call
    if takes_packed(op.name):
        return call(*pack_arguments(op.name, name, arguments)), arguments
    arguments = pages.arguments_held(op.name, name, arguments)
    result = call(*arguments)
    return result, pages.arguments_as_rows(op.name, name, arguments)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_implementations_take_the_arguments_of_the_reference(op: Op[Any, Any]) -> None:
    """All of them, and without those that have defaults; the names that an implementation spells out are the same."""
    expected = inspect.signature(op.reference).parameters.values()
    required = [parameter.name for parameter in expected if parameter.default is inspect.Parameter.empty]
    for name, implementation in op.implementations.items():
        signature = inspect.signature(implementation.call)
        signature.bind(*(parameter.name for parameter in expected))
        signature.bind(*required)
        spelled = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        for actual, parameter in zip(spelled, expected, strict=False):
            assert (actual.name, actual.default) == (parameter.name, parameter.default), f"{name}: {actual}"


def close(actual: object, expected: object, tolerance: tuple[float, float]) -> None:
    if isinstance(expected, tuple | list):
        assert isinstance(actual, tuple | list) and len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            close(a, e, tolerance)
    elif isinstance(expected, Tensor) and expected.dtype == torch.float8_e4m3fn:  # of an argument
        assert isinstance(actual, Tensor) and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    elif isinstance(expected, Tensor) and expected.is_floating_point():
        torch.testing.assert_close(actual, expected, atol=tolerance[0], rtol=tolerance[1], equal_nan=True)
    elif isinstance(expected, Tensor):
        assert isinstance(actual, Tensor) and actual.dtype == expected.dtype and torch.equal(actual, expected)
    else:
        assert actual == expected


@pytest.mark.some(36)
@pytest.mark.parametrize(("op", "name", "dtype"), OTHERS)
def test_implementation_is_close_to_the_reference(op: Op[Any, Any], name: str, dtype: torch.dtype) -> None:
    for arguments in samples(op.name, dtype):
        close(run(op, name, arguments), run(op, registry.REFERENCE, arguments), op.tolerance[dtype])


def test_every_op_has_samples_that_the_reference_takes() -> None:
    for op in OPS.values():
        for dtype in op.tolerance:
            calls = list(samples(op.name, dtype))
            assert calls or op.follows
            for arguments in calls[:1]:  # test_serial.py has it take all
                run(op, registry.REFERENCE, arguments)


def rounded(exact: Tensor, like: Tensor) -> dict[str, Any]:
    """Arguments for assert_close: the float64 result, rounded once, with room for float32 arithmetic inside."""
    half = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[like.dtype]
    return {"expected": exact, "atol": 3e-6, "rtol": half * 1.01, "check_dtype": False}


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_the_formula(dtype: torch.dtype) -> None:
    for x, residual, weight, eps, *multiplier in samples("add_rms_norm", dtype):
        normed = OPS["rms_norm"].reference(x, weight, eps)
        wide = x.double()
        exact = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
        torch.testing.assert_close(normed.double(), **rounded(exact, x))
        both, total = OPS["add_rms_norm"].reference(x, residual, weight, eps, *multiplier)
        assert torch.equal(total, OPS["add_residual"].reference(x, residual, *multiplier))
        assert torch.equal(both, OPS["rms_norm"].reference(total, weight, eps))
        assert normed.dtype == both.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norms_are_torch(dtype: torch.dtype) -> None:
    for x, residual, weight, bias, eps, *multiplier in samples("add_layer_norm", dtype):
        normed = OPS["layer_norm"].reference(x, weight, bias, eps)
        wide = None if bias is None else bias.double()
        exact = F.layer_norm(x.double(), x.shape[1:], weight.double(), wide, eps)
        torch.testing.assert_close(normed.double(), **(rounded(exact, x) | {"atol": 2e-5}))
        both, total = OPS["add_layer_norm"].reference(x, residual, weight, bias, eps, *multiplier)
        assert torch.equal(total, OPS["add_residual"].reference(x, residual, *multiplier))
        assert torch.equal(both, OPS["layer_norm"].reference(total, weight, bias, eps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residuals_caps_and_activations_are_the_formula(dtype: torch.dtype) -> None:
    for x, residual, multiplier in samples("add_residual", dtype):
        actual = OPS["add_residual"].reference(x, residual, multiplier)
        torch.testing.assert_close(actual.double(), **rounded(x.double() * multiplier + residual.double(), x))
        assert multiplier != 1.0 or torch.equal(actual, x + residual)  # torch adds 16-bit floats in float32 too
    for x, multiplier, limit in samples("cap", dtype):
        exact = x.double() * multiplier
        exact = torch.tanh(exact / limit) * limit if limit else exact
        torch.testing.assert_close(OPS["cap"].reference(x, multiplier, limit).double(), **rounded(exact, x))
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    for x, activation, *gated in samples("activate", dtype):
        wide = x.double()
        if gated:
            gate, up = wide.chunk(2, -1)
            exact = functions[activation](gate) * up
        else:
            exact = functions[activation](wide)
        torch.testing.assert_close(OPS["activate"].reference(x, activation, *gated).double(), **rounded(exact, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS["activate"].available("cpu"))
def test_gated_activations_have_the_bits_of_those_with_names(name: str, dtype: torch.dtype) -> None:
    for (x,) in samples("silu_mul", dtype):
        for activation, op in (("silu", "silu_mul"), ("gelu_tanh", "gelu_mul")):
            actual = implementation(name, "activate")(x, activation, True)
            assert torch.equal(actual.nan_to_num(), implementation(name, op)(x).nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_rotates_pairs_in_the_complex_plane(dtype: torch.dtype) -> None:
    for q, k, table, positions, *interleaved in samples("rope", dtype):
        half = table.shape[1] // 2
        turn = torch.complex(*table[positions].double().chunk(2, -1))[:, None]  # [T,1,half]
        for x, actual in zip((q, k), OPS["rope"].reference(q, k, table, positions, *interleaved), strict=True):
            if interleaved:
                x, actual = (
                    torch.cat(
                        [y[..., : 2 * half].unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2), y[..., 2 * half :]],
                        -1,
                    )
                    for y in (x, actual)
                )
            turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * turn
            exact = torch.cat([turned.real, turned.imag, x[..., 2 * half :].double()], -1)
            torch.testing.assert_close(actual.double(), **rounded(exact, x))
            assert torch.equal(actual[..., 2 * half :], x[..., 2 * half :]) and actual.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_torch(dtype: torch.dtype) -> None:
    for (x,) in samples("silu_mul", dtype):
        gate, up = x.double().chunk(2, -1)
        for name, exact in (("silu_mul", F.silu(gate)), ("gelu_mul", F.gelu(gate, approximate="tanh"))):
            torch.testing.assert_close(OPS[name].reference(x).double(), **rounded(exact * up, x))
            assert OPS[name].reference(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_the_matrix_product(dtype: torch.dtype) -> None:
    for x, weight, bias, out_dtype in samples("linear", dtype):
        packed = OPS["pack_linear"].reference(weight)
        assert (packed.rows, packed.columns, packed.dtype) == (*weight.shape, dtype)
        result = OPS["linear"].reference(x, packed, bias, out_dtype)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert result.dtype == (out_dtype or dtype) and result.is_contiguous()
        torch.testing.assert_close(result.double(), **rounded(exact, result))


def test_linear_to_float32_keeps_what_a_16_bit_result_would_lose() -> None:
    x, weight = torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    packed = OPS["pack_linear"].reference(weight)
    assert OPS["linear"].reference(x, packed, None, torch.float32).item() == 257.0
    assert OPS["linear"].reference(x, packed, None, None).item() == 256.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_lora_is_the_product_of_three(dtype: torch.dtype) -> None:
    for out, x, adapters, down, up, ranks, scales, sizes in samples("add_lora", dtype):
        exact = out.double()
        for row, slot in enumerate(adapters.tolist()):
            for shard, target in enumerate(exact[row].split(sizes)):
                if slot >= 0:
                    rank = int(ranks[slot, shard])
                    inner = down[slot, shard, :rank].double() @ x[row].double()
                    actual = up[slot, :rank].double().split(sizes, 1)[shard]
                    target += scales[slot, shard].double() * (actual.t() @ inner)
        before = out.clone()
        OPS["add_lora"].reference(out, x, adapters, down, up, ranks, scales, sizes)
        torch.testing.assert_close(out.double(), **rounded(exact, out))
        assert torch.equal(out[adapters < 0], before[adapters < 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_rows_are_within_half_a_step(dtype: torch.dtype) -> None:
    for (x,) in samples("quantize_rows", dtype):
        values, scales = OPS["quantize_rows"].reference(x)
        assert values.dtype == torch.int8 and int(values.min()) >= -127
        finite = x.isfinite().all(-1)
        assert torch.equal(scales.isfinite(), finite) and not values[~finite].any()
        difference = (values[finite] * scales[finite, None].double() - x[finite].double()).abs()
        assert (difference <= scales[finite, None].double() * 0.5001).all()
        assert ((values.abs().amax(-1) == 127) == (finite & (x.abs().amax(-1) > 1e-30))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_int8_is_the_product_of_what_was_quantized(dtype: torch.dtype) -> None:
    for x, weight, bias, out_dtype in samples("linear_int8", dtype):
        packed = OPS["pack_linear_int8"].reference(weight)
        result = OPS["linear_int8"].reference(x, packed, bias, out_dtype)
        assert result.dtype == (out_dtype or dtype) and result.is_contiguous()
        row, column = (
            values.double() * scales[:, None].double()
            for values, scales in map(OPS["quantize_rows"].reference, (x, weight))
        )
        exact = F.linear(row, column, None if bias is None else bias.double())
        torch.testing.assert_close(result.double(), **rounded(exact, result), equal_nan=True)
        assert torch.equal(result.isfinite().all(-1), x.isfinite().all(-1))


def test_ties_go_to_even_and_zeros_stay() -> None:
    values, scales = OPS["quantize_rows"].reference(torch.tensor([[0.5, 1.5, 2.5, -3.5, 127.0], [0.0] * 5]))
    assert values.tolist() == [[0, 2, 2, -4, 127], [0] * 5]
    assert scales[0] == 1 and 0 < scales[1] < 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_writes_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    for k, v, k_cache, v_cache, slots in samples("store_kv", dtype):
        page = k_cache.shape[2]
        expected = [k_cache.clone(), v_cache.clone()]
        for token, slot in enumerate(slots.tolist()):
            for new, cache in zip((k, v), expected, strict=True):
                cache[slot // page, :, slot % page] = new[token]
        OPS["store_kv"].reference(k, v, k_cache, v_cache, slots)
        assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    _: float = 1.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    both_ways: bool = False,
) -> Tensor:
    """q [n,Hq,D] at the last n positions of k, v [L,Hk,D], in float64."""
    count, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    query, key = torch.arange(length - count, length)[:, None], torch.arange(length)
    seen = (key <= query) | both_ways
    if window:
        seen &= key > query - window
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * scale
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.double()[:, None, None].expand(-1, count, 1)
        return (torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1] @ v).transpose(0, 1)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_is_dense_attention(dtype: torch.dtype) -> None:
    for q, k_cache, v_cache, tables, starts, lens, *rest in samples("paged_attention", dtype):
        result = OPS["paged_attention"].reference(q, k_cache, v_cache, tables, starts, lens, *rest)
        assert result.dtype == dtype and result.shape == q.shape
        for row, length in enumerate(lens.tolist()):
            k, v = (c[tables[row].long()].transpose(1, 2).flatten(0, 1)[:length] for c in (k_cache, v_cache))
            actual = slice(int(starts[row]), int(starts[row + 1]))
            both_ways = [bool(rest[5][row])] if len(rest) > 5 else []
            exact = dense_attention(q[actual], k, v, *rest[:5], *both_ways)
            torch.testing.assert_close(result[actual].double(), **rounded(exact, q))


def test_attention_survives_large_scores() -> None:
    q = torch.full((1, 1, 32), 60.0)
    cache = torch.randn(9, 1, 16, 32, generator=torch.Generator().manual_seed(0)) * 60
    tables, one = torch.arange(9, dtype=torch.int32)[None], torch.tensor([0, 1], dtype=torch.int32)
    result = OPS["paged_attention"].reference(q, cache, cache, tables, one, torch.tensor([140]), 1.0, 0)
    keys = cache.flatten(0, 2)[:140]
    best = keys[(keys @ q[0, 0]).argmax()]
    assert torch.equal(result[0, 0], best) and math.isfinite(result.sum().item())


def test_route_is_the_formula() -> None:
    for logits, bias, k, sigmoid, groups, kept, two, normalize, added, scale in samples("route", torch.float32):
        ids, weights = OPS["route"].reference(logits, bias, k, sigmoid, groups, kept, two, normalize, added, scale)
        assert ids.dtype == torch.int32 and ids.shape == weights.shape == (len(logits), k)
        for row, chosen, actual in zip(logits.double(), ids.tolist(), weights.double(), strict=True):
            scores = torch.sigmoid(row) if sigmoid else torch.softmax(row, -1)
            choice = (scores if bias is None else scores + bias).tolist()
            size = len(choice) // groups
            quality = [sum(sorted(choice[g * size : (g + 1) * size])[-2 if two else -1 :]) for g in range(groups)]
            best = sorted(range(groups), key=lambda g: (-round(quality[g], 12), g))[:kept]
            allowed = [e for e in range(len(choice)) if e // size in best]
            assert sorted(allowed, key=lambda e: (-round(choice[e], 12), e))[:k] == chosen
            exact = scores[chosen]
            exact = exact / (exact.sum() + added) * scale if normalize else exact * scale
            torch.testing.assert_close(actual, exact, rtol=3e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_the_sum_of_what_each_makes(dtype: torch.dtype) -> None:
    for x, ids, weights, up, up_bias, down, down_bias, activation, shared, gate in samples("experts", dtype):
        packed = pack_arguments(
            "experts", "torch", (x, ids, weights, up, up_bias, down, down_bias, activation, shared, gate)
        )
        result = OPS["experts"].reference(*packed)
        exact = torch.zeros(x.shape, dtype=torch.float64)
        for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
            expert = int(ids[token, slot])
            both = up[expert].double() @ x[token].double()
            both = both if up_bias is None else both + up_bias[expert].double()
            left, right = both.to(dtype).double().chunk(2)
            if activation == "clamped_swiglu":
                left = left.clamp(max=7)
                inner = (right.clamp(-7, 7) + 1) * left * torch.sigmoid(1.702 * left)
            else:
                inner = (F.silu(left) if activation == "silu" else F.gelu(left, approximate="tanh")) * right
            product = down[expert].double() @ inner.to(dtype).double()
            product = product if down_bias is None else product + down_bias[expert].double()
            exact[token] += weights[token, slot].double() * product
        if shared is not None:
            exact += (1.0 if gate is None else torch.sigmoid(gate.double())) * shared.double()
        half = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}[dtype]
        torch.testing.assert_close(result.double(), exact, rtol=half, atol=half)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_returns_the_rows_of_the_weight(dtype: torch.dtype) -> None:
    for ids, weight, *multiplier in samples("embedding", dtype):
        rows = OPS["embedding"].reference(ids, OPS["pack_linear"].reference(weight), *multiplier)
        assert (
            torch.equal(rows, weight[ids] * (multiplier[0] if multiplier else 1.0))
            and rows.dtype == dtype
            and rows.is_contiguous()
        )


def implementation(name: str, of: str) -> Any:
    """The op's implementation of this name, else the reference."""
    implementations = OPS[of].implementations
    return implementations.get(name, implementations[registry.REFERENCE]).call


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, name)
        for op in ("gated_linear", "gated_linear_int8", "gated_linear_wna16")
        for name in OPS[op].available("cpu")
    ],
)
def test_gated_linear_has_the_bits_of_its_two_parts(op: str, name: str, dtype: torch.dtype) -> None:
    ungated = op.removeprefix("gated_")
    for x, weight, bias, activation in samples(op, dtype):
        packed = implementation(name, PACKING[op])(weight)
        result = implementation(name, op)(x, packed, bias, activation)
        both = implementation(name, ungated)(x, implementation(name, PACKING[ungated])(weight), bias, None)
        if activation is not None:
            both = implementation(name, "silu_mul" if activation == "silu" else "gelu_mul")(both)
        assert torch.equal(result.nan_to_num(nan=1e30), both.nan_to_num(nan=1e30)) and result.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS["norm_rope_store"].available("cpu"))
def test_norm_rope_store_has_the_bits_of_its_three_parts(name: str, dtype: torch.dtype) -> None:
    for qkv, q_weight, k_weight, eps, table, positions, *rest in samples("norm_rope_store", dtype):
        caches, slots = rest[:2], rest[2]
        interleaved, norm_last, gated = (*rest[5:], False, False, False)[:3]
        expected = [cache.clone() for cache in caches]
        kv_heads, dim = caches[0].shape[1], caches[0].shape[3]
        plain = qkv
        if gated:  # each query head is followed by its gate
            queries, others = qkv.split([qkv.shape[1] - 2 * kv_heads * dim, 2 * kv_heads * dim], 1)
            plain = torch.cat((queries.view(len(qkv), queries.shape[1] // dim, dim)[:, ::2].flatten(1), others), 1)
        heads = plain.shape[1] // dim
        parts = plain.view(-1, heads, dim).split([heads - 2 * kv_heads, kv_heads, kv_heads], 1)
        q, k, v = (part.contiguous() for part in parts)
        norm = implementation(name, "rms_norm")
        for is_norm in (not norm_last, norm_last):
            if not is_norm:
                q, k = implementation(name, "rope")(q, k, table, positions, interleaved)
            elif q_weight is not None:
                q, k = (norm(x.reshape(-1, len(w)), w, eps).view(x.shape) for x, w in ((q, q_weight), (k, k_weight)))
        implementation(name, "store_kv")(k, v, *expected, slots)
        fused = implementation(name, "norm_rope_store")
        assert torch.equal(fused(qkv, q_weight, k_weight, eps, table, positions, *rest), q)
        assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))


@pytest.mark.parametrize("name", OPS["sample_fused"].available("cpu"))
def test_sample_fused_has_the_bits_of_sample_and_logprobs(name: str) -> None:
    for logits, seeds, positions, greedy, temperature, scaled, k in samples("sample_fused", torch.float32):
        ids, finite, *columns = implementation(name, "sample_fused")(
            logits, seeds, positions, greedy, temperature, scaled, k
        )
        assert finite.tolist() == [math.isfinite(row.max().item()) for row in logits]
        logits = logits.where(finite[:, None], 0.0)
        divisor = torch.ones(len(logits)) if temperature is None else temperature.where(temperature != 0.0, 1.0)
        assert torch.equal(ids, implementation(name, "sample")(logits / divisor[:, None], seeds, positions, greedy))
        if k < 0:
            assert [len(column) for column in columns] == [0] * 4
            continue
        expected = implementation(name, "logprobs")(logits, ids, k, None, temperature if scaled else None)
        assert all(torch.equal(a, b) for a, b in zip(columns, expected, strict=True))
