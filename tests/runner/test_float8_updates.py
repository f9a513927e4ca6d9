"""A float8 checkpoint's tensors that come one by one: served as a start with that checkpoint serves them, or not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.models.test_float8 import HF, QWEN, compressed, quantize
from tests.models.test_load import stored
from tests.runner.drive import update
from tests.runner.test_weight_sync import (
    Tensors,
    by_disk,
    by_gloo,
    by_packed_gloo,
    by_shared_memory,
    by_stream,
    feed,
    outcome,
    start,
)
from tests.tiers import paired
from tests.tiny_models import write_checkpoint
from tokserve.base.errors import RequestError
from tokserve.rl import checksums
from tokserve.runner.runner import Runner

DOWN = "model.layers.1.mlp.down_proj.weight"
SCALE = DOWN + "_scale_inv"
Way = Callable[[Runner, Tensors], None]


def by_tensor(runner: Runner, tensors: Tensors) -> None:
    """Scales long before their weights, each in a body of its own."""
    for name in sorted(tensors, key=lambda name: ("scale" not in name, name)):
        feed(runner, save({name: tensors[name]}), stream=name, last=True)


def checkpoint(directory: Path, seed: int, config: dict[str, Any] = QWEN, kind: str = "block") -> Path:
    write_checkpoint(directory, HF, seed=seed)
    quantize(directory, config, kind, "_scale_inv" if config is QWEN else "_scale", torch.float32)
    return directory


@pytest.mark.parametrize(
    ("way", "quantization"), paired([by_stream, by_tensor, by_shared_memory], [None, "fp8", "int8"])
)
def test_a_commit_serves_what_a_start_serves(tmp_path: Path, way: Way, quantization: str | None) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    runner, facts = start(old, quantization=quantization)
    before = outcome(runner, facts)
    update(runner, way, stored(new))
    assert outcome(runner, facts) == before
    runner.call("commit_update", {})
    other, layout = start(new, quantization=quantization)
    assert outcome(runner, facts) == outcome(other, layout) != before
    assert runner.background("checksums", {}) == other.background("checksums", {})
    actual = runner.background("checkpoint_checksums", {})
    assert actual == other.background("checkpoint_checksums", {})  # of weights and scales, as they are stored
    expected = checksums(stored(new))
    assert actual["checkpoint"].items() >= expected.items() and SCALE in expected
    assert actual["checkpoint"].keys() - expected.keys() <= actual["tied"].keys()


@pytest.mark.parametrize(
    ("way", "config", "kind"),
    [
        (by_gloo, QWEN, "block"),
        (by_packed_gloo, compressed("channel"), "channel"),
        (by_stream, compressed("tensor"), "tensor"),
    ],
)
def test_an_update_over_a_group_brings_its_scales(tmp_path: Path, way: Way, config: dict[str, Any], kind: str) -> None:
    old, new = (checkpoint(tmp_path / str(seed), seed, config, kind) for seed in (1, 2))
    runner, facts = start(old, quantization="fp8")
    update(runner, way, stored(new))
    runner.call("commit_update", {})
    assert outcome(runner, facts) == outcome(*start(new, quantization="fp8"))


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_part_of_a_layer_may_be_floating(tmp_path: Path, quantization: str | None) -> None:
    """What cannot be kept as it is stored is what it means; by all ways, in any order."""
    directory = write_checkpoint(tmp_path, HF, seed=1)
    dequantized = quantize(directory, QWEN, "block", "_scale_inv", torch.float32)
    tensors = stored(directory)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.2.mlp.up_proj.weight", DOWN):
        del tensors[name + "_scale_inv"]
        tensors[name] = dequantized[name]
    runner, facts = start(directory, quantization=quantization)
    results = []
    for way in (by_stream, by_tensor, by_disk):
        if way is not by_disk:  # whose directory has no config.json to say what float8 means
            update(runner, way, tensors)
        else:
            update(runner, lambda runner, _: receive(runner, directory, tensors), tensors)
        runner.call("commit_update", {})
        results.append((outcome(runner, facts), runner.background("checksums", {})))
    assert results[0] == results[1] == results[2]
    other, layout = start(directory, quantization=quantization)
    assert results[0] == (outcome(other, layout), other.background("checksums", {}))


def receive(runner: Runner, directory: Path, tensors: Tensors) -> None:
    (directory / "model.safetensors").write_bytes(save(tensors))
    runner.background("receive_update", {"source": {"weight_dir": str(directory)}})


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no scale": (lambda t: without(t, SCALE), f"1 without the scale that float8 has: {DOWN}"),
    "no weight": (lambda t: without(t, DOWN), f"1 missing: {DOWN}.*1 whose scale came, but not as float8: {DOWN}"),
    "floating": (lambda t: t | {DOWN: t[DOWN].float()}, f"1 whose scale came, but not as float8: {DOWN}"),
    "shape of a scale": (lambda t: t | {SCALE: torch.ones(3, 2)}, f"1 unexpected: {SCALE}"),
    "shape": (lambda t: t | {DOWN: t[DOWN][:, :-1].contiguous()}, f"1 misshapen: {DOWN}"),
    "dtype of a scale": (lambda t: t | {SCALE: t[DOWN].clone()}, f"1 unexpected: {SCALE}"),
    "norm": (lambda t: t | {"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}, "unsupported dtype"),
    "both scales": (lambda t: t | {DOWN + "_scale": t[SCALE].clone()}, f"1 sent twice: {DOWN}_scale"),
}


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old", 1), stored(checkpoint(tmp_path / "new", 2))
    runner, facts = start(old, quantization="fp8")
    before = outcome(runner, facts)
    for (make, words), way in zip(FAULTS.values(), cycle((by_stream, by_shared_memory)), strict=False):
        with pytest.raises(RequestError, match=words):
            update(runner, way, make(new))
        runner.background("abort_update", {})
    assert outcome(runner, facts) == before
    runner.background("begin_update", {"have_weights": True})
    feed(runner, save({SCALE: new[SCALE]}), last=True)
    with pytest.raises(RequestError, match=f"1 sent twice: {SCALE}"):
        feed(runner, save({SCALE: new[SCALE]}), stream="t", last=True)
    update(runner, by_stream, new)
    runner.call("commit_update", {})
    assert outcome(runner, facts) != before


def test_float8_weights_are_refused_if_the_config_lacks_float8(tmp_path: Path) -> None:
    new = stored(checkpoint(tmp_path / "new", 2))
    runner, facts = start(write_checkpoint(tmp_path / "old", HF, seed=1), quantization="fp8")
    before = outcome(runner, facts)
    with pytest.raises(RequestError, match=r"unexpected.*unsupported dtype.*has no quantization_config"):
        update(runner, by_stream, new)
    assert outcome(runner, facts) == before
    overridden, layout = start(tmp_path / "old", quantization="fp8", hf_overrides={"quantization_config": QWEN})
    assert outcome(overridden, layout) == before
    update(overridden, by_stream, new)
    overridden.call("commit_update", {})
    assert outcome(overridden, layout) == outcome(*start(tmp_path / "new", quantization="fp8"))
