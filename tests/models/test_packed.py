"""GPTQ, AWQ and compressed-tensors checkpoints: the model is that of the values they mean."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.driver import Driver, prefill, random_ids
from tests.models.test_load import IDS, opened, rewrite, stored
from tests.models.test_parity import OF_STATES
from tests.tiers import slow_after, slow_except
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.families.quantization.formats.packed import PackedFormat, unpacked
from tokserve.features.weights.staging import Staging
from tokserve.models.formats import is_finite
from tokserve.ops import PackedWna16

HF = tiny_config("qwen3", hidden_size=96, intermediate_size=192, head_dim=24)
MIXTURE = tiny_config("qwen3_moe", hidden_size=96, moe_intermediate_size=64, intermediate_size=192)
HYBRID = tiny_config(
    "qwen3_next",
    hidden_size=96,
    intermediate_size=192,
    head_dim=24,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=96,
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's awq/utils/packing_utils.py
Quantized = tuple[dict[str, Tensor], Tensor]  # parts by ending, and what they mean [N,K]


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [M,C] as int32 [M, C * bits / 32], written by a loop of its own."""
    count = 32 // bits
    order = order or tuple(range(count))
    packed = torch.zeros(codes.shape[0], codes.shape[1] // count, dtype=torch.int64)
    for i, column in enumerate(order):
        packed |= codes[:, column::count].long() << bits * i
    return packed.to(torch.int64).where(packed < 2**31, packed - 2**32).to(torch.int32)


def numbers(weight: Tensor, bits: int, group: int, *, sym: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N,K], scales and zero points [N,G] of the weight, and the group of each input."""
    groups = torch.arange(weight.shape[1]) // group
    parts = [weight[:, groups == g] for g in range(int(groups.max()) + 1)]
    high, low = (torch.stack([f(part, 1).values for part in parts], 1) for f in (torch.max, torch.min))
    top = (1 << bits) - 1
    if sym:
        scales = (torch.maximum(high, -low) * 2 / top).half().float()
        zeros = torch.full_like(scales, 1 << bits - 1)
    else:
        scales = ((high - low) / top).half().float()
        zeros = (-low / scales).round().clamp(1, top)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return codes, scales, zeros, groups


def gptq(weight: Tensor, bits: int, group: int, *, sym: bool, act: bool, version: int) -> Quantized:
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(3)) if act else torch.arange(columns)
    codes, scales, zeros, groups = numbers(weight[:, order], bits, group, sym=sym)
    dequantized = torch.empty_like(weight)
    dequantized[:, order] = (codes - zeros[:, groups]) * scales[:, groups]
    placed, g_idx = torch.empty_like(codes), torch.empty(columns, dtype=torch.int32)
    placed[:, order], g_idx[order] = codes, groups.int()
    return {
        ".qweight": words(placed, bits).t().contiguous(),
        ".qzeros": words((zeros - (1 if version == 1 else 0)).t(), bits),
        ".scales": scales.t().contiguous().half(),
        ".g_idx": g_idx,
    }, dequantized


def awq(weight: Tensor, group: int) -> Quantized:
    codes, scales, zeros, groups = numbers(weight, 4, group, sym=False)
    return {
        ".qweight": words(codes.t(), 4, AWQ_ORDER),
        ".qzeros": words(zeros.t(), 4, AWQ_ORDER),
        ".scales": scales.t().contiguous().half(),
    }, (codes - zeros[:, groups]) * scales[:, groups]


def compressed(weight: Tensor, bits: int, group: int, *, sym: bool, act: bool = False, ints: bool = False) -> Quantized:
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(4)) if act else torch.arange(columns)
    codes, scales, zeros, groups = numbers(weight[:, order], bits, group, sym=sym)
    middle = 1 << bits - 1
    placed, dequantized, g_idx = (
        torch.empty_like(codes),
        torch.empty_like(weight),
        torch.empty(columns, dtype=torch.int32),
    )
    placed[:, order], g_idx[order] = codes - middle, groups.int()
    dequantized[:, order] = (codes - zeros[:, groups]) * scales[:, groups]
    parts = {".weight_scale": scales}
    if ints:
        return {".weight": placed.to(torch.int8)} | parts, dequantized
    parts |= {
        ".weight_packed": pack_to_int32(placed.to(torch.int8), bits),
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        parts[".weight_zero_point"] = pack_to_int32((zeros - middle).to(torch.int8), bits, packed_dim=0)
    return parts | ({".weight_g_idx": g_idx} if act else {}), dequantized


def scheme(layout: str, bits: int, group: int, **extra: Any) -> dict[str, Any]:
    if layout != "compressed-tensors":
        return {"quant_method": layout, "bits": bits, "group_size": group, **extra}
    strategy = "channel" if group == -1 else "group"
    kind = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": None if group == -1 else group}
    return {
        "quant_method": layout,
        "format": extra.get("format", "pack-quantized"),
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": kind | {"symmetric": True}}},
    }


def write(directory: Path, entry: dict[str, Any], quantize: Callable[[Tensor], Quantized]) -> dict[str, Tensor]:
    """Make the checkpoint a quantized one, but for one projection; returns what its tensors mean."""
    tensors, dequantized = stored(directory), stored(directory)
    for name, tensor in stored(directory).items():
        if "_proj" in name and "layers.2.mlp.down" not in name:
            parts, dequantized[name] = quantize(tensor.float())
            del tensors[name]
            tensors |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
    rewrite(directory, tensors)
    hf = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(hf | {"quantization_config": entry}))
    return dequantized


CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized]]] = {}
for bits_, group_, sym_, act_, version_ in itertools.product((4, 8), (32, 96), (True, False), (True, False), (1, 2)):
    CASES[f"gptq{bits_}-g{group_}-{'sym' if sym_ else 'asym'}-{'act' if act_ else 'plain'}-v{version_}"] = (
        scheme("gptq", bits_, group_, desc_act=act_, checkpoint_format="gptq" if version_ == 1 else "gptq_v2"),
        lambda w, b=bits_, g=group_, s=sym_, a=act_, v=version_: gptq(w, b, g, sym=s, act=a, version=v),  # type: ignore[misc]
    )
CASES["awq"] = scheme("awq", 4, 32, version="gemm"), lambda w: awq(w, 32)
for bits_, sym_ in itertools.product((4, 8), (True, False)):
    CASES[f"packed{bits_}-{'sym' if sym_ else 'asym'}"] = (
        scheme("compressed-tensors", bits_, 32),
        lambda w, b=bits_, s=sym_: compressed(w, b, 32, sym=s),  # type: ignore[misc]
    )
CASES["packed4-act"] = scheme("compressed-tensors", 4, 32), lambda w: compressed(w, 4, 32, sym=False, act=True)
CASES["packed4-channel"] = scheme("compressed-tensors", 4, -1), lambda w: compressed(w, 4, w.shape[1], sym=True)
CASES["int8"] = (
    scheme("compressed-tensors", 8, -1, format="int-quantized"),
    lambda w: compressed(w, 8, w.shape[1], sym=True, ints=True),
)


@pytest.mark.parametrize("case", slow_except(CASES, *list(CASES)[::3]))
def test_the_model_is_that_of_what_the_tensors_mean(tmp_path: Path, case: str) -> None:
    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    dequantized = write(directory, *CASES[case])
    decoder = opened(directory)
    packed = decoder.blocks[0].mlp.down.packed
    assert decoder.quantization == "wna16" and isinstance(packed, PackedWna16)
    assert not isinstance(decoder.blocks[2].mlp.down.packed, PackedWna16), "left as floats by the checkpoint"
    result = prefill(decoder, IDS).log_softmax(-1)
    rewrite(directory, dequantized)
    hf = json.loads((directory / "config.json").read_text())
    del hf["quantization_config"]
    (directory / "config.json").write_text(json.dumps(hf))
    assert (result - prefill(opened(directory), IDS).log_softmax(-1)).abs().max() < 2e-4


@pytest.mark.slow
def test_quantized_weights_of_a_model_with_states_round_as_floats_do(tmp_path: Path) -> None:
    """What a head reads from its state is divided by its norm, which amplifies rounding: two float32 models may differ
    by more than either differs from float64, so each is compared with that."""
    directory = write_checkpoint(tmp_path / "q", HYBRID, seed=1)
    dequantized = write(directory, scheme("compressed-tensors", 8, 48), lambda w: compressed(w, 8, 48, sym=True))
    ids = random_ids(150, HYBRID["vocab_size"])
    actual = [prefill(opened(directory), ids)]
    rewrite(directory, dequantized)
    hf = json.loads((directory / "config.json").read_text())
    del hf["quantization_config"]
    (directory / "config.json").write_text(json.dumps(hf))
    actual.append(prefill(opened(directory), ids))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        exact = model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    for logits in actual:
        assert (logits.double().log_softmax(-1) - exact).abs().max() < OF_STATES


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (3, 7)])
@pytest.mark.parametrize("bits", [4, 8])
def test_words_of_any_strides_are_unpacked(shape: tuple[int, int], bits: int) -> None:
    codes = torch.arange(shape[1] * shape[0] * 32 // bits).view(shape[1], -1) % (1 << bits)
    stored_words = words(codes, bits).t().clone(memory_format=torch.contiguous_format)  # [W,M]
    assert torch.equal(unpacked(stored_words.t(), bits), codes.to(torch.uint8))


@pytest.mark.parametrize(("bits", "finite"), [(0x7E, True), (0xFE, True), (0x7F, False), (0xFF, False)])
def test_float8_is_finite_but_for_both_nans(bits: int, finite: bool) -> None:
    assert is_finite(torch.tensor([0, bits], dtype=torch.uint8).view(torch.float8_e4m3fn), torch.float16) is finite


def test_words_that_are_no_finite_float16_are_finite() -> None:
    assert is_finite(torch.tensor([2**31 - 1], dtype=torch.int32), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", slow_after(["gptq4-g32-asym-act-v2", "int8", "gptq4-g32-sym-plain-v1", "awq", "packed4-asym"], 2)
)
def test_experts_are_what_their_tensors_mean(tmp_path: Path, case: str) -> None:
    directory = write_checkpoint(tmp_path / "q", MIXTURE, seed=1)
    dequantized = write(directory, *CASES[case])
    decoder = opened(directory)
    experts = decoder.blocks[1].mlp.experts
    assert all(isinstance(packed, PackedWna16) for packed in (*experts.gate_up, *experts.down))
    result = prefill(decoder, IDS)
    staging = Staging(decoder.blank())
    tensors = stored(directory)
    for name in sorted(tensors, key=lambda name: name[::-1]):
        staging.push(name, tensors[name])
    assert torch.equal(prefill(staging.finish(), IDS), result), "pushed in another order"
    rewrite(directory, dequantized)
    hf = json.loads((directory / "config.json").read_text())
    del hf["quantization_config"]
    (directory / "config.json").write_text(json.dumps(hf))
    expected = prefill(opened(directory), IDS).log_softmax(-1)
    assert (result.log_softmax(-1) - expected).abs().max() < 2e-4


@pytest.mark.parametrize("case", ["gptq4-g32-asym-act-v1", "packed4-asym"])
def test_parts_pushed_in_any_order_give_the_same_bits(tmp_path: Path, case: str) -> None:
    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    write(directory, *CASES[case])
    decoder = opened(directory)
    expected = prefill(decoder, IDS)
    tensors = stored(directory)
    staging = Staging(decoder.blank())
    for name in sorted(tensors, key=lambda name: name[::-1]):
        staging.push(name, tensors[name])
    assert torch.equal(prefill(staging.finish(), IDS), expected)


def test_weights_in_such_a_form_are_not_made_random(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    write(directory, *CASES["awq"])
    with pytest.raises(RequestError, match="random weights cannot replace"):
        Staging(opened(directory).blank()).draw(1)


@pytest.mark.parametrize("case", ["gptq4-g32-sym-plain-v1", "awq", "packed4-sym"])
def test_pushed_parts_of_another_shape_are_refused(tmp_path: Path, case: str) -> None:
    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    write(directory, *CASES[case])
    tensors = stored(directory)
    name = next(name for name in tensors if name.endswith(("down_proj.qweight", "down_proj.weight_packed")))
    staging = Staging(opened(directory).blank())
    with pytest.raises(RequestError, match=r"down_proj\.weight (form a weight of shape|do not fit)"):
        for key, tensor in tensors.items():
            staging.push(key, tensor[:-1].contiguous() if key == name else tensor)
        staging.finish()


def test_decoding_has_the_bits_of_a_prompt(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "q", HF | {"dtype": "bfloat16"}, seed=1)
    write(directory, *CASES["gptq4-g32-asym-act-v1"])
    decoder = opened(directory, dtype="bfloat16")
    ids = IDS[:30]
    driver = Driver(decoder, length=30)
    steps = [driver.step({0: part})[0] for part in (ids[:5], ids[5:22], *([token] for token in ids[22:]))]
    assert torch.equal(torch.cat(steps), prefill(decoder, ids))


@pytest.mark.parametrize(
    ("entry", "words_"),
    [
        (scheme("gptq", 3, 32), "3 bits"),
        (scheme("gptq", 4, 32, checkpoint_format="marlin"), "marlin"),
        (scheme("awq", 4, 32, version="gemv"), "gemv"),
        (scheme("compressed-tensors", 2, 32), "2 bits"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, entry: dict[str, Any], words_: str) -> None:
    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    (directory / "config.json").write_text(json.dumps(HF | {"quantization_config": entry}))
    with pytest.raises(StartError, match=words_):
        opened(directory)


def test_groups_of_different_sizes_become_floats() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    parts, dequantized = gptq(weight, 4, 32, sym=False, act=False, version=1)
    roles = {"codes": parts[".qweight"], "zeros": parts[".qzeros"], "scales": parts[".scales"]}
    uneven = parts[".g_idx"].clone()
    uneven[3] = 1
    assembled = PackedFormat("gptq", 4, 32, frozenset(), frozenset()).assemble(roles | {"order": uneven})
    assert isinstance(assembled, Tensor)
    assert torch.equal(assembled[:, :3], dequantized[:, :3]) and not torch.equal(assembled[:, 3], dequantized[:, 3])
    for number in (2, -1):  # there are groups 0 and 1
        uneven[3] = number
        assembled = PackedFormat("gptq", 4, 32, frozenset(), frozenset()).assemble(roles | {"order": uneven})
        assert isinstance(assembled, Tensor) and bool(assembled.isnan().all())


@pytest.mark.parametrize("point", [0, 1, 255])
def test_zero_points_of_8_bits(point: int) -> None:
    codes = torch.arange(4 * 64).view(4, 64)
    points = torch.full((2, 4), point)
    roles = {"codes": words(codes, 8).t().contiguous(), "zeros": words(points, 8), "scales": torch.full((2, 4), 0.5)}
    assembled = PackedFormat("gptq_v2", 8, 32, frozenset(), frozenset()).assemble(roles)
    assert not isinstance(assembled, Tensor) and torch.equal(assembled.dense(), (codes - point) * 0.5)


def test_a_policy_refuses_a_quantized_checkpoint(tmp_path: Path) -> None:
    from tokserve.train.policy import PolicyModel

    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    write(directory, *CASES["awq"])
    with pytest.raises(StartError, match="a quantized checkpoint cannot be trained"):
        PolicyModel.from_pretrained(directory, dtype="float32")
