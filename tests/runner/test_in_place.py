"""New weights of the same form are copied to where the old ones are, so that captured steps need not be made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.test_load import rewrite, stored
from tests.runner.drive import feature
from tests.runner.test_cuda import make
from tests.runner.test_kv_scales import come_of, update
from tests.runner.test_weight_sync import by_stream
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.features.weights.runner_feature import RunnerUpdates
from tokserve.models.in_place import copy_weights, tensors_of

HF = tiny_config("qwen3") | {"num_hidden_layers": 1}


@pytest.mark.parametrize("eager", [False, True])
def test_a_commit_on_a_device_keeps_captured_graphs(tmp_path: Path, eager: bool) -> None:
    old, new = (write_checkpoint(tmp_path / name, HF) for name in ("old", "new"))
    rewrite(new, {name: tensor.flip(0).contiguous() for name, tensor in stored(new).items()})
    options = {"load_format": "auto", "max_num_seqs": 8, "enforce_eager": eager}
    runner, facts, fake = make(old, HF, **options)
    before, captured, model = come_of(runner, facts), fake.captured, runner.model
    places = {name: tensor.data_ptr() for name, tensor in tensors_of(model)}
    update(runner, by_stream, stored(new))
    assert come_of(runner, facts) == before
    fake.side.clear()
    runner.call("commit_update", {})
    assert fake.side == ["join"]
    assert (runner.model is model) is not eager and fake.captured == captured
    if not eager:
        assert {name: tensor.data_ptr() for name, tensor in tensors_of(runner.model)} == places
        assert feature(runner, RunnerUpdates).sync._old is not None  # given back beside the steps, after the copies
    runner.background("forget_weights", {})
    other, layout, _ = make(new, HF, **options)
    assert come_of(runner, facts) == come_of(other, layout) != before
    for sums in ("checksums", "weights_checksum", "checkpoint_checksums"):
        assert runner.background(sums, {}) == other.background(sums, {})


def test_sets_of_different_form_are_left_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, HF)
    one, other = (make(tmp_path, HF, load_format="auto", max_num_seqs=8, dtype=dtype)[0].model for dtype in TYPES)
    values = {name: tensor.clone() for name, tensor in tensors_of(one)}
    assert not copy_weights(other, one)
    assert all(torch.equal(values[name], tensor) for name, tensor in tensors_of(one))
    other = make(tmp_path, HF, load_format="auto", max_num_seqs=8)[0].model
    assert copy_weights(other, one)
    other.blocks[0].attention.scale_cache(0.5, 2.0)  # numbers that graphs hold
    assert not copy_weights(other, one)
    other = one.blank()  # without weights
    assert not copy_weights(other, one)


TYPES = ("float32", "bfloat16")
