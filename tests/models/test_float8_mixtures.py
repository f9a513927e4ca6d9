"""Mixtures of experts in float8: a byte for each weight, with the results of the numbers that are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.driver import Driver, prefill, random_ids
from tests.models.test_float8 import QWEN, compressed, quantize
from tests.models.test_load import opened, rewrite, stored
from tests.tiers import slow_after
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import ops
from tokserve.features.weights.staging import Staging
from tokserve.layers.quant import Packed
from tokserve.models.decoder import Decoder

IDS = random_ids(60, 320)
FORMATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "blocks": (QWEN, "block", "_scale_inv"),
    "channels": (compressed("channel"), "channel", "_scale"),
}
SIZES = {"hidden_size": 96, "moe_intermediate_size": 72, "dtype": "bfloat16"}  # blocks that are not whole


def checkpoint(directory: Path, family: str = "qwen3_moe", form: str = "blocks", seed: int = 0) -> Path:
    hf = tiny_config(family, **SIZES, quantization_config=FORMATS[form][0])
    write_checkpoint(directory, hf, seed=seed)
    quantize(directory, *FORMATS[form], torch.float32)
    return directory


def experts(decoder: Decoder) -> Iterator[Packed]:
    for block in decoder.blocks:
        mixture = getattr(block.mlp, "experts", None)
        for packed in () if mixture is None else (*mixture.gate_up, *mixture.down):
            assert packed is not None
            yield packed


def distance(one: Decoder, other: Decoder) -> float:
    """The distance of what the experts of two decoders make of the same rows, chosen alike: relative to its size, the
    largest of all layers."""
    distances = []
    for first, second in zip(one.blocks, other.blocks, strict=True):
        if not first.mlp.spec.has_experts:
            continue
        mixture: Any = first.mlp.experts, second.mlp.experts
        x = torch.randn(20, mixture[0].hidden, generator=torch.Generator().manual_seed(1)).to(one.dtype)
        ids, weights = first.mlp.router(x)
        results = [experts(x, ids, weights, None, None).float() for experts in mixture]
        distances.append(((results[0] - results[1]).norm() / results[1].norm()).item())
    return max(distances)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", "blocks"),
        ("qwen3_moe", "channels"),
        ("qwen2_moe", "blocks"),
        ("deepseek_v3", "blocks"),
        ("llama4_text", "channels"),
    ],
)
@pytest.mark.parametrize("dtype", slow_after(["bfloat16", "float32"], 1))
@pytest.mark.usefixtures("kernels")
def test_experts_keep_a_byte_and_the_results_of_what_is_stored(
    family: str, form: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint(tmp_path, family, form)
    caplog.set_level("INFO")
    decoder = opened(directory, dtype=dtype)
    assert "weights stay float8, with their scales" in caplog.text
    assert decoder.quantization == "wna16"
    for packed in experts(decoder):
        assert isinstance(packed, ops.PackedWna16) and packed.parts[0].float8
        assert packed.parts[0].packed.element_size() == 1
    plain = opened(directory, dtype=dtype, quantization="none")
    assert plain.quantization is None
    assert torch.equal(prefill(decoder, IDS), prefill(plain, IDS))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.usefixtures("kernels")
def test_a_device_with_float8_products_multiplies_experts_in_float8(form: str, tmp_path: Path) -> None:
    """Although the router, which is no float8, is among the layer's weights."""
    directory = checkpoint(tmp_path, form=form)
    decoder = opened(directory, dtype="bfloat16", has_float8=True)
    assert decoder.quantization == "fp8" and decoder.blank().quantization == "fp8"
    assert all(isinstance(packed, ops.PackedFloat8) for packed in experts(decoder))
    plain = opened(directory, dtype="bfloat16", quantization="none")
    assert 0.001 < distance(decoder, plain) < 0.06  # activations are rounded, too
    requested = opened(directory, dtype="bfloat16", quantization="fp8")
    assert torch.equal(prefill(requested, IDS), prefill(decoder, IDS))


@pytest.mark.parametrize("family", slow_after(["qwen3_moe", "gpt_oss", "granitemoe", "mixtral"], 2))
@pytest.mark.usefixtures("kernels")
def test_experts_of_floats_are_rounded_to_float8_as_they_load(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config(family))
    decoder = opened(directory, quantization="fp8")
    assert all(isinstance(packed, ops.PackedFloat8) for packed in experts(decoder))
    assert 0.001 < distance(decoder, opened(directory)) < 0.09


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.usefixtures("compiled")
def test_rows_do_not_depend_on_their_batch(quantization: str | None, tmp_path: Path) -> None:
    decoder = opened(checkpoint(tmp_path), dtype="bfloat16", quantization=quantization)
    texts = [random_ids(3 + 7 * row, 320, seed=row) for row in range(4)]
    alone = [prefill(decoder, ids) for ids in texts]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        together = Driver(decoder, rows=4, length=64).step({row: texts[row] for row in order})
        assert all(torch.equal(rows, alone[row]) for row, rows in zip(order, together, strict=True))
    step = Driver(decoder, length=64)
    assert torch.equal(torch.cat([step.step({0: [token]})[0] for token in texts[3]]), alone[3])


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("pushed", ["no floats", "an expert's gate", "an expert", "all"])
@pytest.mark.usefixtures("compiled")
def test_an_update_is_kept_as_a_start_keeps_it(quantization: str | None, pushed: str, tmp_path: Path) -> None:
    """Float8 in any order; and floats in its place, which stay that, or are rounded if the option says so."""
    old, new = checkpoint(tmp_path / "old", seed=1), checkpoint(tmp_path / "new", seed=2)
    decoder = opened(old, dtype="bfloat16", quantization=quantization)
    means = stored(write_checkpoint(tmp_path / "means", tiny_config("qwen3_moe", **SIZES), seed=2))
    tensors = stored(new)
    prefix = {"no floats": "none", "an expert's gate": "1.mlp.experts.2.gate_proj", "an expert": "1.mlp.experts.2."}
    for name in [name for name in tensors if prefix.get(pushed, "") in name and name + "_scale_inv" in tensors]:
        del tensors[name + "_scale_inv"]
        tensors[name] = means[name]

    def updated(tensors: dict[str, Tensor]) -> Tensor:
        staging = Staging(decoder.blank())
        for name, tensor in tensors.items():
            staging.push(name, tensor)
        return prefill(staging.finish(), IDS)

    result = updated(tensors)
    assert torch.equal(updated(dict(reversed(tensors.items()))), result)
    rewrite(new, tensors)
    assert torch.equal(prefill(opened(new, dtype="bfloat16", quantization=quantization), IDS), result)
