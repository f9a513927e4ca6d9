"""Models with latent attention: updates, names of checkpoints, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.driver import prefill, random_ids
from tests.models.test_load import opened
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import StartError
from tokserve.families.latent.layers import LatentAttention
from tokserve.features.speculation.quantized_copy import QuantizedCopy
from tokserve.features.weights.coordinates import Coordinates
from tokserve.features.weights.staging import Staging
from tokserve.models import weights
from tokserve.train.policy import PolicyModel

IDS = random_ids(40, 320)
DENSE = {"first_k_dense_replace": 3}  # in all layers


def written(directory: Path, seed: int = 0, **changes: Any) -> Path:
    return write_checkpoint(directory, tiny_config("deepseek_v3", **changes), seed=seed)


@pytest.mark.usefixtures("kernels")
def test_an_update_replaces_every_weight(tmp_path: Path) -> None:
    old, new = opened(written(tmp_path / "old")), written(tmp_path / "new", seed=1)
    staging = Staging(old.blank())
    for name, tensor in load_file(new / weights.SINGLE).items():
        staging.push(name, tensor)
    updated = staging.finish()
    assert torch.equal(prefill(updated, IDS), prefill(opened(new), IDS))
    assert not torch.equal(prefill(old, IDS), prefill(updated, IDS))
    sums, _ = updated.provenance.checksums(updated.spec.renames, tied=False)
    assert "model.layers.1.self_attn.kv_b_proj.weight" in sums


def test_tensors_of_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    directory = written(tmp_path, num_nextn_predict_layers=2, **DENSE)
    expected, tensors = prefill(opened(directory), IDS), load_file(directory / weights.SINGLE)
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    further = {name.replace("layers.2.", f"layers.{n}."): last[name].clone() for n in (3, 4) for name in last}
    save_file(tensors | further, directory / weights.SINGLE)
    assert torch.equal(prefill(opened(directory), IDS), expected)
    save_file(tensors | {"model.layers.5.embed_tokens.weight": torch.ones(2)}, directory / weights.SINGLE)
    with pytest.raises(StartError, match=r"1 unexpected: model.layers.5.embed_tokens.weight"):
        opened(directory)


def test_a_missing_kv_b_proj_is_named(tmp_path: Path) -> None:
    directory = written(tmp_path, **DENSE)
    tensors = load_file(directory / weights.SINGLE)
    del tensors["model.layers.2.self_attn.kv_b_proj.weight"]
    save_file(tensors, directory / weights.SINGLE)
    with pytest.raises(StartError, match=r"1 missing: model.layers.2.self_attn.kv_b_proj.weight"):
        opened(directory)


def test_deltas_and_training_are_refused_by_name(tmp_path: Path) -> None:
    directory = written(tmp_path, **DENSE)
    refusal = Coordinates(opened(directory)).refusal()
    assert refusal is not None and "kv_b_proj.weight, ...) are of experts or packed in parts" in refusal
    with pytest.raises(StartError, match="layer 0: attention: LatentAttentionSpec cannot be trained"):
        PolicyModel.from_pretrained(directory, dtype="float32")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_kv_b_proj_is_not_quantized(quantization: str, tmp_path: Path) -> None:
    directory = written(tmp_path, **DENSE)
    plain, quantized = opened(directory), opened(directory, quantization=quantization, group_size=8)
    first, second = plain.blocks[0].attention, quantized.blocks[0].attention
    assert isinstance(first, LatentAttention) and isinstance(second, LatentAttention)
    pairs = zip(first.key_weights + first.value_weights, second.key_weights + second.value_weights, strict=True)
    for one, other in pairs:
        assert torch.equal(one.packed, other.packed)
    assert 0 < (prefill(plain, IDS) - prefill(quantized, IDS)).abs().mean() < 0.5


def test_a_quantized_copy_draws_with_the_models_kv_b_proj(tmp_path: Path) -> None:
    source = opened(written(tmp_path, tie_word_embeddings=False, **DENSE))
    copy = QuantizedCopy(source, "int8").decoder
    assert 0 < (prefill(copy, IDS) - prefill(source, IDS)).abs().mean() < 0.2
    assert copy.blocks[1].attention.linears()["q"] is not source.blocks[1].attention.linears()["q"]
