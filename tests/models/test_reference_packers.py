"""What formats' own packers write is read as what their own code says it means, and multiplied as float64 does."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch
from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models import gguf_models
from tests.models.test_gguf import KINDS
from tests.models.test_packed import CASES, numbers, scheme
from tokserve import ops  # noqa: F401  (declares the ops)
from tokserve.families.gguf.gguf_types import PLAIN, decoded
from tokserve.families.quantization.formats.mxfp4 import Mxfp4Experts
from tokserve.families.quantization.formats.pick import checkpoint_format
from tokserve.families.quantization.quantized import QuantizedWeight
from tokserve.ops import registry
from tokserve.ops.registry import OPS

registry.load_extension("cpu")
ROWS, COLUMNS = 64, 768  # a multiple of blocks of 256 and groups of 96
WEIGHT = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) / 20
X = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1))


def check(weight: Any, expected: Tensor) -> None:
    """The weight means `meant`, and its product is that of float64, alone and among 64 rows, for every dtype of x."""
    assert isinstance(weight, QuantizedWeight)
    assert (weight.dense() - expected).abs().max() <= 1e-6 * expected.abs().max()
    name = OPS["linear_wna16"].available("cpu")[0]
    packed = OPS["pack_wna16"].implementations[name].call(weight.parts)
    product = OPS["linear_wna16"].implementations[name].call
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = X.to(dtype)
        result = product(x, packed, None, torch.float32)
        scale = x.double().abs() @ expected.double().abs().t()
        assert ((result - x.double() @ expected.double().t()).abs() <= 4e-6 * scale + 1e-6).all()
        among = product(x.repeat(13, 1)[:64], packed, None, torch.float32)
        alone = product(x[3:4], packed, None, torch.float32)
        assert torch.equal(among[3:4], alone) and torch.equal(among[:5], result)


def assembled(entry: dict[str, Any], parts: dict[str, Tensor]) -> Any:
    """A weight of the format that the entry of config.json describes, of its parts by ending."""
    form = checkpoint_format({"quantization_config": entry})
    placed = {form.part("m" + ending, part): part for ending, part in parts.items()}
    assert all(part is not None and part.weight == "m.weight" for part in placed)
    return form.assemble({part.role: tensor for part, tensor in placed.items() if part is not None})


@pytest.mark.parametrize("case", [name for name in CASES if name != "int8"])
def test_gptq_awq_and_packed_words(case: str) -> None:
    entry, quantize = CASES[case]
    parts, expected = quantize(WEIGHT)
    check(assembled(entry, parts), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_own_compressor(bits: int, symmetric: bool, strategy: str) -> None:
    group = 64 if strategy == "group" else COLUMNS
    size = {"group_size": group} if strategy == "group" else {}
    arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, **size)
    arrangement = QuantizationScheme(targets=["Linear"], weights=arguments)
    _, scales, zeros, _ = numbers(WEIGHT, bits, group, sym=symmetric)
    points = (zeros - (1 << bits - 1)).to(torch.int8)
    state = {"weight": WEIGHT, "weight_scale": scales, "weight_zero_point": points}
    parts = PackedQuantizationCompressor.compress(state, arrangement)
    expected = PackedQuantizationCompressor.decompress(dict(parts), arrangement)["weight"]
    entry = scheme("compressed-tensors", bits, -1 if strategy == "channel" else group)
    check(assembled(entry, {f".{name}": part for name, part in parts.items()}), expected.float())


def test_compressed_tensors_w8a8() -> None:
    arguments = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    inputs = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    arrangement = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)
    _, scales, *_ = numbers(WEIGHT, 8, COLUMNS, sym=True)
    parts = IntQuantizationCompressor.compress({"weight": WEIGHT, "weight_scale": scales}, arrangement)
    assert parts["weight"].dtype == torch.int8
    entry = scheme("compressed-tensors", 8, -1, format="int-quantized")
    check(assembled(entry, {f".{name}": part for name, part in parts.items()}), parts["weight"].float() * scales)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PLAIN])
def test_gguf_s_types(kind: str) -> None:
    raw = gguf_models.blocks(WEIGHT.numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[kind]))
    check(decoded(torch.from_numpy(raw).view(-1), kind, (ROWS, COLUMNS)), expected)


def test_transformers_mxfp4() -> None:
    random = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (2, ROWS, COLUMNS // 32, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(110, 130, blocks.shape[:-1], generator=random, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)
    experts = Mxfp4Experts(blocks, scales)
    assert torch.equal(experts.dense(), expected)
    check(experts.expert(1), expected[1].t().float().contiguous())
