"""gpt-oss checkpoints with MXFP4 experts: bit for bit the bfloat16 model of what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.driver import Driver, prefill, random_ids
from tests.models.test_load import opened, rewrite, stored
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.features.weights.staging import Staging
from tokserve.models import weights
from tokserve.ops import PackedWeight, PackedWna16

HF = tiny_config("gpt_oss", hidden_size=96, intermediate_size=64, dtype="bfloat16")
ENTRY = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
IDS = random_ids(60, 320)


def quantized(directory: Path, seed: int = 0) -> dict[str, Tensor]:
    """Make the checkpoint one of MXFP4; returns the bfloat16 tensors that transformers makes of it."""
    random, tensors, dequantized = torch.Generator().manual_seed(seed), stored(directory), stored(directory)
    for name, tensor in stored(directory).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            groups = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*groups, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(118, 125, groups, generator=random, dtype=torch.uint8)
            dequantized[name] = convert_moe_packed_tensors(blocks, scales)
            assert dequantized[name].shape == tensor.shape
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    rewrite(directory, tensors)
    hf = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(hf | {"quantization_config": ENTRY}))
    return dequantized


def plain(directory: Path, dequantized: dict[str, Tensor]) -> Path:
    """The bfloat16 checkpoint in its place."""
    rewrite(directory, dequantized)
    hf = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({n: v for n, v in hf.items() if n != "quantization_config"}))
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_the_model_of_the_dequantized_checkpoint(tmp_path: Path, dtype: str) -> None:
    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    dequantized = quantized(directory)
    decoder = opened(directory, dtype=dtype)
    experts = decoder.blocks[0].mlp.experts
    assert all(isinstance(packed, PackedWna16) for packed in (*experts.gate_up, *experts.down)), "4 bits in memory"
    dense = opened(directory, dtype=dtype, quantization="none")
    assert isinstance(dense.blocks[0].mlp.experts.down[0], PackedWeight)
    expected = prefill(opened(plain(directory, dequantized), dtype=dtype), IDS)
    assert torch.equal(prefill(decoder, IDS), expected) and torch.equal(prefill(dense, IDS), expected)


def test_logprobs_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    dequantized = quantized(directory)
    result = prefill(opened(directory, dtype="float32"), IDS).double().log_softmax(-1)
    model = AutoModelForCausalLM.from_pretrained(plain(directory, dequantized), dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].double().log_softmax(-1)
    assert (result - expected).abs().max() < 2e-4


def test_decoding_has_the_bits_of_a_prompt(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    quantized(directory)
    decoder = opened(directory, dtype="bfloat16")
    driver = Driver(decoder, length=30)
    steps = [driver.step({0: part})[0] for part in (IDS[:5], IDS[5:22], *([token] for token in IDS[22:30]))]
    assert torch.equal(torch.cat(steps), prefill(decoder, IDS[:30]))


def test_blocks_and_scales_are_pushed_in_any_order_and_floats_too(tmp_path: Path) -> None:
    one, other = (write_checkpoint(tmp_path / str(seed), HF, seed=seed) for seed in (1, 2))
    quantized(one, 1)
    dequantized = quantized(other, 2)
    options: dict[str, Any] = {"dtype": "bfloat16"}
    serving, expected = opened(one, **options), prefill(opened(other, **options), IDS)
    for tensors in (stored(other), dequantized):
        staging = Staging(serving.blank())
        for name in sorted(tensors, key=lambda name: name[::-1]):
            staging.push(name, tensors[name])
        assert torch.equal(prefill(staging.finish(), IDS), expected)
    staging = Staging(serving.blank())
    for name, weight in weights.stream(weights.by_weight(weights.catalogue(other), serving.spec.format)):
        staging.put(name, weight)
    assert staging.num_bytes == sum(tensor.nbytes for tensor in stored(other).values())
    staging = Staging(serving.blank())
    tensors = stored(other)
    lost = "model.layers.1.mlp.experts.down_proj_scales"
    with pytest.raises(RequestError, match=r"unexpected: .*down_proj_scales"):
        staging.push(lost, tensors[lost][:, :-1].contiguous())
    for name in tensors.keys() - {lost}:
        staging.push(name, tensors[name])
    with pytest.raises(RequestError, match="without both blocks and scales"):
        staging.finish()


def test_a_checkpoint_without_scales_is_refused_by_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "q", HF, seed=1)
    quantized(directory)
    tensors = stored(directory)
    del tensors["model.layers.0.mlp.experts.gate_up_proj_scales"]
    rewrite(directory, tensors)
    with pytest.raises(StartError, match=r"missing: model.layers.0.mlp.experts.gate_up_proj;.*gate_up_proj_blocks"):
        opened(directory)
