"""Weights quantized to 4 bits as they load: from files, and pushed into a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.driver import Driver, prefill
from tests.models.test_load import IDS, opened, rewrite, stored
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import StartError
from tokserve.families.quantization.quantized import quantize_int4
from tokserve.features.weights.staging import Staging
from tokserve.ops import PackedInt8, PackedWna16

HF = tiny_config("qwen3", hidden_size=96, intermediate_size=160, dtype="bfloat16", tie_word_embeddings=True)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_model_is_that_of_the_rounded_weights(tmp_path: Path, group: int) -> None:
    directory = write_checkpoint(tmp_path / "m", HF, seed=1)
    options: dict[str, Any] = {"quantization": "int4", "group_size": group}
    result = prefill(opened(directory, dtype="float32", **options), IDS).log_softmax(-1)
    rounded = {
        name: quantize_int4(tensor, group).dense() if "_proj" in name else tensor.float()
        for name, tensor in stored(directory).items()
    }
    rewrite(directory, rounded)
    assert (result - prefill(opened(directory, dtype="float32"), IDS).log_softmax(-1)).abs().max() < 2e-4


@pytest.mark.parametrize(("quantization", "head"), [("int4", PackedWna16), (None, PackedInt8)])
def test_the_head_is_quantized_where_that_is_chosen(tmp_path: Path, quantization: str | None, head: type) -> None:
    directory = write_checkpoint(tmp_path / "m", HF, seed=1)
    decoder = opened(directory, quantization=quantization, quantize_lm_head=True)
    assert isinstance(decoder.head.linear.packed, head)
    assert not isinstance(opened(directory, quantization=quantization).head.linear.packed, head)


@pytest.mark.usefixtures("kernels")
def test_activations_are_rounded_where_that_is_chosen(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", HF, seed=1)
    options: dict[str, Any] = {"dtype": "float32", "quantization": "int4", "group_size": 32}
    plain = prefill(opened(directory, **options), IDS).log_softmax(-1)
    decoder = opened(directory, **options, quantization_activations="int8")
    rounded = prefill(decoder, IDS)
    assert 0 < (rounded.log_softmax(-1) - plain).abs().mean() < 0.2
    driver = Driver(decoder, rows=2, length=len(IDS))
    driver.step({1: IDS[:3]})
    parts = [driver.step({0: IDS[:5]})[0], *(driver.step({0: [token], 1: [1]})[0] for token in IDS[5:])]
    assert torch.equal(torch.cat(parts), rounded)
    with pytest.raises(StartError, match="quantization_activations: needs integer weights"):
        opened(directory, quantization_activations="int8")


@pytest.mark.parametrize("quantize_lm_head", [False, True])
def test_pushed_floats_are_rounded_as_those_of_files(tmp_path: Path, quantize_lm_head: bool) -> None:
    one, other = (write_checkpoint(tmp_path / str(seed), HF, seed=seed) for seed in (1, 2))
    options: dict[str, Any] = {"quantization": "int4", "quantize_lm_head": quantize_lm_head}
    serving, expected = opened(one, **options), prefill(opened(other, **options), IDS)
    staging = Staging(serving.blank())
    for name, tensor in stored(other).items():
        staging.push(name, tensor)
    assert not torch.equal(prefill(serving, IDS), expected)
    assert torch.equal(prefill(staging.finish(), IDS), expected)
