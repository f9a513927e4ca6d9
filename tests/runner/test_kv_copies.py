"""Pages to slots and back: bytes of every layer, at any block; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runner.drive import feature, make_runner
from tokserve.base.errors import StartError
from tokserve.features.kv.kv_copies import KVCopies, RunnerCopies
from tokserve.features.kv.kv_identity import weights_digest

QWEN = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


def copies(tmp_path: Path, **options: Any) -> tuple[Any, KVCopies]:
    runner, _ = make_runner(tmp_path, QWEN, kv_offloading_size=0.01, **options)
    kept = feature(runner, RunnerCopies).copies
    assert kept is not None
    return runner, kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_come_back_as_they_were(tmp_path: Path, dtype: str) -> None:
    runner, kv_copies = copies(tmp_path, dtype=dtype)
    for caches in runner.backend.kv:
        for cache in caches:
            cache.copy_(torch.randn(cache.shape))
    before = [[cache.clone() for cache in caches] for caches in runner.backend.kv]
    runner.copy("save_blocks", {"blocks": [3, 1], "slots": [0, 5]})
    for caches in runner.backend.kv:
        for cache in caches:
            cache.zero_()
    assert runner.copy("load_blocks", {"blocks": [2, 7], "slots": [5, 0]}) > 0
    for caches, olds in zip(runner.backend.kv, before, strict=True):
        for cache, old in zip(caches, olds, strict=True):
            assert torch.equal(cache[2], old[1]) and torch.equal(cache[7], old[3]) and not cache[3].any()
    assert kv_copies.slot_bytes * runner.backend.layout.num_blocks == runner.backend.layout.bytes()


def test_blocks_come_back_from_files(tmp_path: Path) -> None:
    runner, kv_copies = copies(tmp_path / "m", kv_offloading_dir=str(tmp_path / "kv"))
    kv_copies._slots[3] = np.arange(kv_copies.slot_bytes) % 251
    key, identity = b"k" * 32, b"i" * 32
    written = runner.copy("write_files", {"identity": identity, "keys": [key], "slots": [3]})
    assert written["written"] == [key] and written["failed"] == 0
    assert runner.copy("use_identity", {"identity": identity, "parts": {}}) == [key]
    result = runner.copy("read_files", {"identity": identity, "keys": [key, b"n" * 32], "slots": [4, 5]})
    assert (result["count"], result["damaged"]) == (1, 0) and (kv_copies._slots[4] == kv_copies._slots[3]).all()
    (path,) = (tmp_path / "kv").rglob("*.kv")
    path.write_bytes(path.read_bytes()[:-1])
    for damaged in (1, 0):  # the file is deleted then
        result = runner.copy("read_files", {"identity": identity, "keys": [key], "slots": [4]})
        assert (result["count"], result["damaged"]) == (0, damaged)


def test_the_identity_is_of_the_weights_and_not_of_the_context(tmp_path: Path) -> None:
    runner, _ = copies(tmp_path)
    parts = runner.background("kv_identity", {})
    assert set(parts) == {"version", "model", "weights", "layout", "arithmetic", "parallel"}
    other, _ = copies(tmp_path, max_model_len=64)
    assert other.background("kv_identity", {}) == parts
    third, _ = copies(tmp_path, seed=7)
    changed = third.background("kv_identity", {})
    assert [name for name in parts if parts[name] != changed[name]] == ["weights"]
    fourth, _ = copies(tmp_path, block_size=32)
    assert fourth.background("kv_identity", {})["layout"] != parts["layout"]
    next(iter(runner.model.parameters_by_name().values()))
    runner.model.norm.weight[0] += 1
    assert weights_digest(runner.model) != parts["weights"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_offloading_size": 1e-9}, "one KV block has"),
        ({"kv_offloading_size": 1e9}, "cannot be allocated"),
        ({"model_impl": "transformers"}, "transformers"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        make_runner(tmp_path, QWEN, **({"kv_offloading_size": 0.01} | options))
