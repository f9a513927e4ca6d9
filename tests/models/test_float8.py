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
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import ops
from tokserve.base.errors import RequestError
from tokserve.config import WeightsConfig
from tokserve.features.weights.weight_sync import WeightSync
from tokserve.models import weights
from tokserve.models.decoder import Decoder
from tokserve.runner.device import Host

HF = tiny_config("qwen3", hidden_size=96, intermediate_size=200, dtype="bfloat16")
FP8 = torch.float8_e4m3fn
BLOCK = (32, 64)  # some blocks of every weight are not whole
QWEN = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


@pytest.fixture(autouse=True)
def references() -> None:
    """Bind the torch references, in whose layout these tests read packed weights."""
    ops.bind("cpu", {"*": "torch"})


def compressed(strategy: str, **changes: Any) -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | changes
    if strategy == "block":
        kind["block_structure"] = list(BLOCK)
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": kind, "input_activations": {"num_bits": 8}}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }


def scales(weight: Tensor, kind: str) -> Tensor:
    """Scales as quantization tools choose them: the largest of a group becomes float8's largest."""
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
    scales = torch.empty(shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scales[i * BLOCK[0] : (i + 1) * BLOCK[0], j * BLOCK[1] : (j + 1) * BLOCK[1]] = scale[i, j]
    return scales


def quantize(directory: Path, config: dict[str, Any], kind: str, ending: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make the checkpoint a float8 one; returns what its tensors mean."""
    tensors, dequantized = stored(directory), stored(directory)
    for name, tensor in stored(directory).items():
        if "_proj" not in name or tensor.ndim != 2:
            continue
        scale = scales(tensor.float(), kind).to(dtype)
        spread_scale = spread(scale.float(), tensor.shape)
        tensors[name] = (tensor.float() / spread_scale).clamp(-448, 448).to(FP8)
        tensors[name + ending] = scale
        dequantized[name] = (tensors[name].float() * spread_scale).to(tensor.dtype)
        assert (dequantized[name] - tensor).abs().max() <= 0.07 * tensor.abs().max()
        if kind == "tensor":
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    rewrite(directory, tensors)
    hf = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(hf | {"quantization_config": config}))
    return dequantized


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
    dequantized = quantize(float8, config, kind, ending, dtype)
    if serve == "float32":  # not rounded to the dtype of the checkpoint's other tensors
        tensors = stored(float8)
        dequantized |= {
            name: tensors[name].float() * spread(tensors[name + ending].float(), tensors[name].shape)
            for name in dequantized
            if name + ending in tensors
        }
    rewrite(plain, dequantized)
    assert torch.equal(logits(float8, dtype=serve), logits(plain, dtype=serve))


def kept(decoder: Decoder) -> dict[str, Tensor]:
    """What each projection's float8 weight means, by name."""
    results = {}
    linears = decoder.named_linears()
    for name, (holder, shard) in decoder.adapter_targets().items():
        linear = linears[holder]
        packed = linear.packed
        assert isinstance(packed, ops.PackedFloat8)
        values = packed.packed[: packed.columns, : packed.rows].t()  # as the reference packs
        weight = values * packed.scales.t().repeat_interleave(packed.group, 1)[:, : packed.columns]
        results[name + ".weight"] = linear._rows(weight, shard)
    return results


@pytest.mark.parametrize(
    ("config", "kind", "ending", "groups"),
    [
        (QWEN, "block", "_scale_inv", 2),
        (compressed("tensor"), "tensor", "_scale", 1),
        (compressed("channel"), "channel", "_scale", 1),
    ],
)
def test_a_device_with_float8_products_keeps_it_with_its_scales(
    tmp_path: Path, config: dict[str, Any], kind: str, ending: str, groups: int, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_checkpoint(tmp_path, HF)
    quantize(directory, config, kind, ending, torch.float32)
    tensors = stored(directory)
    caplog.set_level("INFO")
    decoder = opened(directory, dtype="bfloat16", has_float8=True)
    assert decoder.quantization == "fp8" and decoder.blank().quantization == "fp8"
    assert "stay float8, with their scales" in caplog.text
    packed = decoder.blocks[0].attention.qkv.packed
    assert isinstance(packed, ops.PackedFloat8) and len(packed.scales) == groups
    actual = kept(decoder)
    assert actual.keys() == {name for name in tensors if name + ending in tensors}
    for name, weight in actual.items():
        assert torch.equal(weight, tensors[name].float() * spread(tensors[name + ending], tensors[name].shape))
    near, other = prefill(decoder, IDS).log_softmax(-1), logits(directory, dtype="bfloat16").log_softmax(-1)
    assert 0.0 < (near - other).abs().mean() < 0.4  # its activations are float8 too
    requested = opened(directory, dtype="bfloat16", quantization="fp8")
    assert all(torch.equal(weight, actual[name]) for name, weight in kept(requested).items())


def test_it_can_be_served_in_the_models_dtype_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_checkpoint(tmp_path, HF)
    quantize(directory, QWEN, "block", "_scale_inv", torch.float32)
    expected = logits(directory, dtype="bfloat16")
    caplog.set_level("INFO")
    decoder = opened(directory, dtype="bfloat16", quantization="none", has_float8=True)
    assert decoder.quantization is None and "weights become bfloat16" in caplog.text
    assert torch.equal(prefill(decoder, IDS), expected)


@pytest.mark.parametrize("exception", ["a plain matrix", "narrow blocks"])
def test_where_not_all_can_be_multiplied_as_float8_no_activations_are(
    tmp_path: Path, exception: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path, HF)
    if exception == "narrow blocks":
        monkeypatch.setitem(globals(), "BLOCK", (32, 32))
    dequantized = quantize(directory, QWEN | {"weight_block_size": list(BLOCK)}, "block", "_scale_inv", torch.float32)
    if exception == "a plain matrix":
        name = "model.layers.1.mlp.down_proj.weight"
        rest = {key: tensor for key, tensor in stored(directory).items() if key != name + "_scale_inv"}
        rewrite(directory, rest | {name: dequantized[name]})
    caplog.set_level("INFO")
    decoder = opened(directory, dtype="bfloat16", has_float8=True)
    assert decoder.quantization == "wna16" and "stay float8" in caplog.text
    plain = opened(directory, dtype="bfloat16", quantization="none")
    assert torch.equal(prefill(decoder, IDS), prefill(plain, IDS))
    float8 = [linear for linear in decoder.named_linears().values() if isinstance(linear.packed, ops.PackedWna16)]
    assert len(float8) == len(decoder.named_linears()) - (exception == "a plain matrix")


def test_an_update_is_kept_as_the_start_keeps_it(tmp_path: Path) -> None:
    old, new = write_checkpoint(tmp_path / "old", HF, seed=1), write_checkpoint(tmp_path / "new", HF, seed=2)
    for directory in (old, new):
        quantize(directory, QWEN, "block", "_scale_inv", torch.float32)
    decoder = opened(old, dtype="bfloat16", has_float8=True)
    sync = WeightSync(WeightsConfig(), decoder.blank, lambda: 0, Host())

    def updated(directory: Path) -> Decoder:
        sync.begin(True)
        sync.receive({"weight_dir": str(directory)})
        sync.finish()
        return sync.take(decoder)

    expected = kept(opened(new, dtype="bfloat16", has_float8=True))
    assert all(torch.equal(weight, expected[name]) for name, weight in kept(updated(new)).items())
    floating = write_checkpoint(tmp_path / "floating", HF, seed=3)  # quantized by rows as it comes
    expected = kept(opened(floating, dtype="bfloat16", quantization="fp8"))
    assert all(torch.equal(weight, expected[name]) for name, weight in kept(updated(floating)).items())
    (new / "config.json").unlink()  # nothing says what its float8 means
    with pytest.raises(RequestError, match="F8_E4M3"):
        updated(new)


def test_it_can_be_quantized_again(tmp_path: Path) -> None:
    plain, float8 = write_checkpoint(tmp_path / "plain", HF), write_checkpoint(tmp_path / "float8", HF)
    rewrite(plain, quantize(float8, QWEN, "block", "_scale_inv", torch.float32))
    actual, expected = (logits(directory, dtype="bfloat16", quantization="int8") for directory in (float8, plain))
    assert torch.equal(actual, expected)


def test_a_plain_checkpoint_quantized_as_it_loads_is_near_the_original(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    original = logits(directory, dtype="bfloat16").log_softmax(-1)
    differences = []
    for head in (False, True):
        decoder = opened(directory, dtype="bfloat16", quantization="fp8", quantize_lm_head=head)
        assert isinstance(decoder.blocks[0].mlp.down.packed, ops.PackedFloat8)
        assert isinstance(decoder.head.linear.packed, ops.PackedFloat8) == head
        differences.append((prefill(decoder, IDS).log_softmax(-1) - original).abs().mean().item())
    assert 0.0 < differences[0] < 0.4 and 0.0 < differences[1] < 0.5


def test_scales_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    quantize(directory, QWEN, "block", "_scale_inv", torch.float32)
    tensors = stored(directory)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(directory, {key: tensor for key, tensor in tensors.items() if key != name + "_scale_inv"})
    assert f"1 of an unsupported dtype: {name} (F8_E4M3)" in refusal(directory)
    rewrite(directory, tensors | {name + "_scale_inv": torch.ones(3, 2)})
    assert f"1 unexpected: {name}_scale_inv" in refusal(directory)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, "asks for quantization 'gptq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "asks for fp8 of format 'e5m2'"),
        (compressed("channel", num_bits=4, type="int"), "asks for weights of type 'int' with 4 bits by channel"),
        (compressed("group"), "asks for weights of type 'float' with 8 bits by group"),
        (compressed("channel") | {"format": "pack-quantized"}, "of format 'pack-quantized'"),
        (QWEN | {"weight_block_size": [0, "x"]}, "asks for fp8"),
        ([1], "is not an object"),
    ],
)
def test_other_float8_formats_are_refused_by_name(tmp_path: Path, config: Any, words: str) -> None:
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
