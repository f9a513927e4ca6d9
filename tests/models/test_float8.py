"""Float8 checkpoints: the model is that of the values they mean, and what is not understood is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.driver import prefill
from tests.models.test_load import IDS, logits, opened, refusal, rewrite, stored
from tokserve import ops
from tokserve.models import weights
from tokserve.models.dummy import tiny_config, write_checkpoint

HF = tiny_config("qwen3", hidden_size=96, intermediate_size=200, dtype="bfloat16")
FP8 = torch.float8_e4m3fn
BLOCK = (32, 64)  # some blocks of every weight are not whole
QWEN = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def compressed(strategy: str, **changes: Any) -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | changes
    if strategy == "block":
        kind["block_structure"] = list(BLOCK)
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": kind, "input_activations": {"num_bits": 8}}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }  # fmt: skip


def scales(weight: Tensor, kind: str) -> Tensor:
    """As the tools choose them, so that the largest of a group is float8's largest."""
    most = torch.finfo(FP8).max
    if kind == "tensor":
        return weight.abs().amax().reshape(1) / most
    if kind == "channel":
        return weight.abs().amax(1, keepdim=True) / most
    parts = [[part.abs().amax() for part in rows.split(BLOCK[1], 1)] for rows in weight.split(BLOCK[0])]
    return torch.tensor(parts) / most


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every element, by a loop of its own."""
    if scale.numel() == 1 or scale.shape == (shape[0], 1):
        return scale.expand(shape)
    whole = torch.empty(shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            whole[i * BLOCK[0] : (i + 1) * BLOCK[0], j * BLOCK[1] : (j + 1) * BLOCK[1]] = scale[i, j]
    return whole


def quantize(directory: Path, config: dict[str, Any], kind: str, ending: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make the checkpoint a float8 one; returns what its tensors mean."""
    tensors, meant = stored(directory), stored(directory)
    for name, tensor in stored(directory).items():
        if "_proj" not in name:
            continue
        scale = scales(tensor.float(), kind).to(dtype)
        whole = spread(scale.float(), tensor.shape)
        tensors[name] = (tensor.float() / whole).clamp(-448, 448).to(FP8)
        tensors[name + ending] = scale
        meant[name] = (tensors[name].float() * whole).to(tensor.dtype)
        assert (meant[name] - tensor).abs().max() <= 0.07 * tensor.abs().max()
        if kind == "tensor":
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    rewrite(directory, tensors)
    (directory / "config.json").write_text(json.dumps(HF | {"quantization_config": config}))
    return meant


@pytest.mark.parametrize(
    ("config", "kind", "ending", "dtype"),
    [
        (QWEN, "block", "_scale_inv", torch.float32),
        (QWEN, "block", "_scale_inv", torch.bfloat16),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "_scale", torch.float32),
        (compressed("tensor"), "tensor", "_scale", torch.float32),
        (compressed("channel"), "channel", "_scale", torch.bfloat16),
        (compressed("block"), "block", "_scale", torch.float32),
    ],
)
@pytest.mark.parametrize("serve", ["bfloat16", "float32"])
def test_the_model_is_that_of_the_values(
    tmp_path: Path, config: dict[str, Any], kind: str, ending: str, dtype: torch.dtype, serve: str
) -> None:
    plain, float8 = write_checkpoint(tmp_path / "plain", HF), write_checkpoint(tmp_path / "float8", HF)
    meant = quantize(float8, config, kind, ending, dtype)
    if serve == "float32":  # not rounded to the dtype of the checkpoint's other tensors
        tensors = stored(float8)
        meant |= {
            name: tensors[name].float() * spread(tensors[name + ending].float(), tensors[name].shape)
            for name in meant
            if name + ending in tensors
        }
    rewrite(plain, meant)
    assert torch.equal(logits(float8, dtype=serve), logits(plain, dtype=serve))


def test_it_can_be_quantized_again(tmp_path: Path) -> None:
    plain, float8 = write_checkpoint(tmp_path / "plain", HF), write_checkpoint(tmp_path / "float8", HF)
    rewrite(plain, quantize(float8, QWEN, "block", "_scale_inv", torch.float32))
    found, expected = (logits(directory, dtype="bfloat16", quantization="int8") for directory in (float8, plain))
    assert torch.equal(found, expected)


def test_a_plain_checkpoint_quantized_as_it_loads_is_near_the_original(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    original = logits(directory, dtype="bfloat16").log_softmax(-1)
    apart = []
    for head in (False, True):
        decoder = opened(directory, dtype="bfloat16", quantization="fp8", quantize_lm_head=head)
        assert isinstance(decoder.blocks[0].mlp.down.packed, ops.PackedFloat8)
        assert isinstance(decoder.head.linear.packed, ops.PackedFloat8) == head
        apart.append((prefill(decoder, IDS).log_softmax(-1) - original).abs().mean().item())
    assert 0.0 < apart[0] < 0.4 and 0.0 < apart[1] < 0.5


def test_scales_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    quantize(directory, QWEN, "block", "_scale_inv", torch.float32)
    whole = stored(directory)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(directory, {key: tensor for key, tensor in whole.items() if key != name + "_scale_inv"})
    assert f"1 of an unsupported dtype: {name} (F8_E4M3)" in refusal(directory)
    rewrite(directory, whole | {name + "_scale_inv": torch.ones(3, 2)})
    assert f"1 unexpected: {name}_scale_inv" in refusal(directory)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "asks for quantization 'gptq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "asks for fp8 of format 'e5m2'"),
        (compressed("channel", num_bits=4, type="int"), "asks for weights of type 'int' with 4 bits by channel"),
        (compressed("group"), "asks for weights of type 'float' with 8 bits by group"),
        (compressed("channel") | {"format": "pack-quantized"}, "of format 'pack-quantized'"),
        (QWEN | {"weight_block_size": [0, "x"]}, "asks for fp8"),
        ([1], "is not an object"),
    ],
)
def test_other_ways_are_refused_by_name(tmp_path: Path, config: Any, words: str) -> None:
    directory = write_checkpoint(tmp_path, HF)
    (directory / "config.json").write_text(json.dumps(HF | {"quantization_config": config}))
    message = refusal(directory)
    assert "config.json: quantization_config" in message and words in message and "--quantization int8" in message


def test_float8_without_a_config_that_says_so_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    quantize(directory, QWEN, "block", "_scale_inv", torch.float32)
    (directory / "config.json").write_text(json.dumps(HF))
    assert "(F8_E4M3)" in refusal(directory)


def test_shards_may_hold_a_weight_and_its_scale_apart(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    quantize(directory, QWEN, "block", "_scale_inv", torch.float32)
    expected = logits(directory, dtype="bfloat16")
    tensors = stored(directory)
    (directory / weights.SINGLE).unlink()
    parts = {"a.safetensors": {k: v for k, v in tensors.items() if "scale" in k}}
    parts["b.safetensors"] = {k: v for k, v in tensors.items() if "scale" not in k}
    for file, part in parts.items():
        save_file(part, directory / file)
    places = {key: file for file, part in parts.items() for key in part}
    (directory / weights.INDEX).write_text(json.dumps({"weight_map": places}))
    assert torch.equal(logits(directory, dtype="bfloat16"), expected)
