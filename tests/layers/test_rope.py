"""Rope tables against transformers' frequency functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokserve import ops
from tokserve.layers.rope import RopeSpec, rope_table

POSITIONS = 3000
THETA = 500000.0
# fields of RopeSpec beyond kind, dim and theta; fields of config.json
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"factor": 4.0}, {"factor": 4.0}),
    "llama3": (
        {"factor": 8.0, "original": 1024, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"factor": 8.0, "original_max_position_embeddings": 1024, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "llama3-odd": (
        {"factor": 32.0, "original": 500, "low_freq_factor": 1.5, "high_freq_factor": 2.5},
        {"factor": 32.0, "original_max_position_embeddings": 500, "low_freq_factor": 1.5, "high_freq_factor": 2.5},
    ),
    "yarn": ({"factor": 4.0, "original": 512}, {"factor": 4.0, "original_max_position_embeddings": 512}),
    "yarn-smooth": (
        {"factor": 16.0, "original": 700, "beta_fast": 20.0, "beta_slow": 2.5, "truncate": False},
        {
            "factor": 16.0,
            "original_max_position_embeddings": 700,
            "beta_fast": 20.0,
            "beta_slow": 2.5,
            "truncate": False,
        },
    ),
    "yarn-attention-factor": (
        {"factor": 4.0, "original": 512, "attention_factor": 0.8},
        {"factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 0.8},
    ),
    "yarn-mscale": (
        {"factor": 40.0, "original": 512, "mscale": 0.7, "mscale_all_dim": 1.3},
        {"factor": 40.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "yarn-one-mscale": (
        {"factor": 40.0, "original": 512, "mscale": 0.7},
        {"factor": 40.0, "original_max_position_embeddings": 512, "mscale": 0.7},
    ),
    "yarn-no-stretch": ({"factor": 1.0, "original": 512}, {"factor": 1.0, "original_max_position_embeddings": 512}),
}


def table_of(frequencies: torch.Tensor, scale: float, positions: int) -> torch.Tensor:
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1) * scale


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two float32 roundings of the frequency, which grow with the position."""
    allowed = 1e-6 + 2.4e-7 * torch.arange(len(expected))[:, None]
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert bool(((actual - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dim", [64, 80, 2])
def test_the_default_table_equals_its_formula(dim: int) -> None:
    frequencies = torch.tensor([THETA ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float32)
    assert_same(rope_table(RopeSpec(dim, THETA), POSITIONS), table_of(frequencies, 1.0, POSITIONS))


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_kinds_equal_transformers(name: str, partial: float) -> None:
    spec_fields, hf_fields = SCALED[name]
    kind = name.split("-")[0]
    rope = {"rope_type": kind, "rope_theta": THETA, "partial_rotary_factor": partial} | hf_fields
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=POSITIONS, rope_parameters=rope
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config)
    spec = RopeSpec(int(64 * partial), THETA, kind=kind, **spec_fields)  # type: ignore[arg-type]
    assert_same(rope_table(spec, POSITIONS), table_of(frequencies, scale, POSITIONS))


def test_dynamic_rows_have_the_base_of_their_length() -> None:
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "dynamic", "rope_theta": THETA, "factor": 2.0},
    )
    spec = RopeSpec(64, THETA, kind="dynamic", factor=2.0, original=256)
    plain = rope_table(RopeSpec(64, THETA), 1024)
    table = rope_table(spec, 1024)
    assert torch.equal(table[:256], plain[:256])
    assert torch.equal(rope_table(spec, 256), plain[:256])
    assert torch.equal(rope_table(spec, 600), table[:600])  # whatever the served length
    for position in (256, 511, 1023):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=position + 1)
        expected = table_of(frequencies, 1.0, position + 1)[position]
        assert (table[position] - expected).abs().max() < 1e-3
    assert (table[1023] - plain[1023]).abs().max() > 0.5


def test_longrope_stretches_by_the_long_factors_beyond_the_original_length() -> None:
    short, long = (tuple(first + i / 8 for i in range(32)) for first in (1.0, 3.0))
    spec = RopeSpec(64, THETA, kind="longrope", factor=4.0, original=256, short=short, long=long)
    rope = {
        "rope_type": "longrope",
        "rope_theta": THETA,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "short_factor": list(short),
        "long_factor": list(long),
    }
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        max_position_embeddings=1024,
        rope_parameters=rope,
    )
    for positions in (255, 256, 257, 1024):
        frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=positions)
        assert_same(rope_table(spec, positions), table_of(frequencies, scale, positions))


def test_partial_rotary_leaves_the_rest_of_a_head() -> None:
    q, k = torch.randn(5, 3, 16), torch.randn(5, 1, 16)
    positions = torch.arange(5) + 7
    table = rope_table(RopeSpec(8, 100.0), 16)
    new_q, new_k = ops.rope(q, k, table, positions)
    assert torch.equal(new_q[..., 8:], q[..., 8:])
    assert torch.equal(new_k[..., 8:], k[..., 8:])
    assert (new_q[..., :8] - q[..., :8]).abs().min() > 0
