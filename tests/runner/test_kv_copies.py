"""Pages to slots and back: bytes of every layer, at any block; and what is refused."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runner.drive import feature, make_runner
from tests.runner.fake_device import FakeDevice
from tests.runner.test_with_engine import RealEngine
from tests.waiting import until
from tokserve.base.errors import StartError
from tokserve.features.kv.kv_copies import KVCopies, RunnerCopies
from tokserve.features.kv.kv_identity import weights_digest
from tokserve.gpu import block_copies
from tokserve.runner import device

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


@pytest.mark.parametrize("kind", ["host", "device"])
def test_blocks_come_back_as_they_were(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "device":
        monkeypatch.setattr(device, "use", lambda name: FakeDevice())
        monkeypatch.setattr(block_copies, "STAGED_BYTES", 1)  # one block at a time
    runner, kv_copies = copies(tmp_path, dtype="float32" if kind == "host" else "bfloat16")
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
    (content,) = runner.copy("read_blocks", {"blocks": [7]})
    assert content == kv_copies._slots[0].tobytes()
    runner.copy("write_blocks", {"blocks": [3], "contents": [bytearray(content)]})
    assert all(torch.equal(cache[3], cache[7]) for caches in runner.backend.kv for cache in caches)
    if kind == "device":
        assert runner.backend.device.pinned == kv_copies._slots.nbytes
        assert runner.backend.device.side == ["begin", "end", "begin", "end", "wait"] * 2


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


def test_the_identity_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.6.0")
    identity = device.gpu_and_compiler(torch.device("cuda"))
    assert identity == ("NVIDIA H200", torch.__version__, "3.6.0")
    assert device.gpu_and_compiler(torch.device("cpu")) == ()


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


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_continues_from_loaded_blocks(tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "use", lambda name: FakeDevice())
    engine = RealEngine(tmp_path / "model", kv_offloading_size=0.01, depth=depth, dtype="float32")

    def outcome(rid: str) -> tuple[list[int], int]:
        engine.add(rid, [3 + i % 50 for i in range(100)], max_tokens=9, ignore_eos=True, seed=4)
        until(lambda: engine.run() or (rid in engine.received and engine.received[rid].finish is not None), rid)
        return engine.tokens(rid), max(output.cached for output in engine.received[rid].outputs)

    first, cached = outcome("computed")
    assert cached == 0
    until(lambda: engine.run() or engine.stored("saved") >= 6, "blocks are saved")
    engine.call("reset_prefix_cache", call_id=2)
    assert outcome("loaded") == (first, 96) and engine.stored("loaded") >= 6
    engine.core.close()
    engine.real.close()
