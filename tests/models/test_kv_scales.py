"""Scales of a float8 KV cache: every name in use is read, what cannot be used is named, elsewhere nothing changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.driver import prefill
from tests.models.test_float8 import compressed, quantize
from tests.models.test_load import IDS, opened, refusal, rewrite, stored
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.features.weights.checksums import checksums

HF = tiny_config("qwen3", num_hidden_layers=2)
LAYER = "model.layers.1.self_attn."


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"k_scale": number(0.5), "v_scale": number(2.0)}, (0.5, 2.0)),
        ({"k_scale": torch.tensor([0.25]), "v_scale": torch.ones(1, 1, 1)}, (0.25, 1.0)),
        ({"k_proj.k_scale": number(0.5), "v_proj.v_scale": number(0.125)}, (0.5, 0.125)),
        ({"k_proj.output_scale": number(3.0), "v_proj.output_scale": number(5.0, torch.bfloat16)}, (3.0, 5.0)),
        ({"qkv_proj.k_scale": number(0.5), "qkv_proj.v_scale": number(0.125)}, (0.5, 0.125)),
        ({"kv_scale": number(0.1)}, (float(number(0.1)), float(number(0.1)))),
        ({"kv_scale": number(0.5), "attn.k_scale": number(0.5)}, (0.5, 0.5)),
        ({"v_scale": number(0.1)}, (1.0, float(number(0.1)))),
    ],
)
@pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
def test_every_name_in_use_is_read(
    tmp_path: Path, tensors: dict[str, Tensor], expected: tuple[float, float], float8: bool
) -> None:
    directory = write_checkpoint(tmp_path, HF)
    if float8:
        quantize(directory, compressed("channel"), "channel", "_scale", torch.float32)
    named_scales = {LAYER + name: tensor for name, tensor in tensors.items()}
    rewrite(directory, stored(directory) | named_scales)
    decoder = opened(directory, float8_cache=True)
    assert decoder.kv_scales() == [(1.0, 1.0), expected] == decoder.blank().kv_scales()
    drafting = opened(directory)
    drafting.borrow(decoder)  # keys and values in the same cache
    assert drafting.kv_scales() == decoder.kv_scales()
    before = {name: one for name, one in checksums(decoder).items() if "cache_scales" in name}
    assert list(before) == ["blocks.1.attention.cache_scales"]


def test_names_without_the_model_prefix_are_read(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    tensors = stored(directory) | {LAYER + "v_scale": number(0.5)}
    rewrite(directory, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert opened(directory, float8_cache=True).kv_scales()[1] == (1.0, 0.5)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"k_scale": torch.ones(2)}, LAYER + r"k_scale is of shape \[2\]"),
        ({"k_scale": torch.ones(2, 1, 1)}, r"\[2, 1, 1\]"),
        ({"v_scale": number(0.0)}, LAYER + "v_scale is 0.0, not a positive number"),
        ({"v_scale": number(-1.0)}, "is -1.0"),
        ({"k_proj.k_scale": number(float("nan"))}, LAYER + "k_proj.k_scale is nan"),
        ({"kv_scale": number(float("inf"))}, "is inf"),
        ({"k_scale": number(1.0), "kv_scale": number(2.0)}, "kv_scale is 2.0, and another name gives"),
    ],
)
def test_what_cannot_be_used_is_refused_where_it_would_be_and_only_there(
    tmp_path: Path, tensors: dict[str, Tensor], words: str
) -> None:
    directory = write_checkpoint(tmp_path, HF)
    expected = prefill(opened(directory), IDS)
    rewrite(directory, stored(directory) | {LAYER + name: tensor for name, tensor in tensors.items()})
    assert re.search(words, refusal(directory, float8_cache=True))
    decoder = opened(directory)
    assert decoder.kv_scales() == [(1.0, 1.0)] * 2
    assert torch.equal(prefill(decoder, IDS), expected)


def test_a_layer_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    rewrite(directory, stored(directory) | {"model.layers.2.self_attn.k_scale": number(0.5)})
    assert "1 unexpected: model.layers.2.self_attn.k_scale" in refusal(directory, float8_cache=True)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({"num_bits": 8, "type": "int"}, "a KV cache of type 'int' with 8 bits"),
        ({"num_bits": 4, "type": "float"}, "type 'float' with 4 bits"),
        ({"num_bits": 8, "type": "float", "symmetric": False}, "zero points"),
    ],
)
def test_a_cache_of_another_kind_is_refused_where_float8_is_wanted(
    tmp_path: Path, scheme: dict[str, Any], words: str
) -> None:
    directory = write_checkpoint(tmp_path, HF)
    quantize(directory, compressed("channel") | {"kv_cache_scheme": scheme}, "channel", "_scale", torch.float32)
    assert words in refusal(directory, float8_cache=True)
    assert not opened(directory).float8_cache


def test_missing_scales_of_a_declared_format_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_checkpoint(tmp_path, HF)
    scheme = {"num_bits": 8, "type": "float", "dynamic": True}
    quantize(directory, compressed("channel") | {"kv_cache_scheme": scheme}, "channel", "_scale", torch.float32)
    assert opened(directory, float8_cache=True).kv_scales() == [(1.0, 1.0)] * 2  # quantize stores a 1
    assert not caplog.records
    rewrite(directory, {name: tensor for name, tensor in stored(directory).items() if "k_scale" not in name})
    opened(directory, float8_cache=True)
    assert "no scales come with the weights: 1 is used" in caplog.text


def test_a_plain_checkpoint_may_have_scales_for_the_cache_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, HF)
    expected = prefill(opened(directory), IDS)
    rewrite(directory, stored(directory) | {LAYER + "k_scale": number(0.5)})
    only = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}} | {
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}
    }
    (directory / "config.json").write_text(json.dumps(HF | {"quantization_config": only}))
    assert opened(directory, float8_cache=True).kv_scales()[1] == (0.5, 1.0)
    assert torch.equal(prefill(opened(directory, has_float8=True), IDS), expected)
