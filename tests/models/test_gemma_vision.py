"""Gemma 3 with images against transformers, and the same bits however its images are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.image_checks import TEXT, Parts, check_bits, check_device, check_logprobs, kind_of
from tests.models.pictures import Picture
from tests.runner.drive import plan_of
from tests.tiny_models import tiny_gemma_vision_config, write_checkpoint
from tokserve import checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.features.images.siglip import SiglipSpec
from tokserve.features.images.vision import check_image, decode_image, encode_image, image_format
from tokserve.layers.attention import AttentionSpec
from tokserve.models.load import load_decoder as load_model
from tokserve.models.registry import decoder_spec
from tokserve.protocol.images import KIND, Grid
from tokserve.protocol.prompt import Feature
from tokserve.runner.tables.attention_rows import divide


@pytest.mark.parametrize("window", [8, 24, 40])  # an image has 16 tokens
def test_logprobs_are_transformers(window: int, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_gemma_vision_config(window))
    kind = kind_of(directory)
    one, two, three = (Picture(kind, 8, 8, seed) for seed in (1, 2, 3))
    check_logprobs(directory, [[*TEXT], [TEXT[0], one], [two, TEXT[1]], [TEXT[0], one, TEXT[1], two, three, TEXT[2]]])


@pytest.mark.parametrize(("dtype", "window"), [("float32", 8), ("bfloat16", 24)])
def test_images_have_the_same_bits_in_any_batch_and_chunk_and_after_preemption(
    dtype: str, window: int, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, tiny_gemma_vision_config(window))
    kind = kind_of(directory)
    one, two, three = (Picture(kind, 8, 8, seed) for seed in (1, 2, 3))
    prompts: list[Parts] = [[TEXT[0], one], [two, TEXT[1]], [TEXT[1], three, TEXT[0], one, TEXT[2]], [*TEXT]]
    check_bits(directory, dtype, prompts, (1, 3, 16))  # a chunk that would end in an image ends after it


def test_a_device_of_its_own_gives_the_same_bits(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_gemma_vision_config(24))
    kind = kind_of(directory)
    one, two = (Picture(kind, 8, 8, seed) for seed in (1, 2))
    check_device(directory, [[TEXT[0], one, TEXT[1]], [*TEXT], [two, TEXT[1], one, TEXT[2]]])


def test_rows_are_divided_where_images_begin_and_end() -> None:
    plan = plan_of([(3, 0, 12, 0), (1, 5, 6, 1), (2, 9, 1, 1)])
    rows = divide(plan, {3: [(2, 6), (8, 11)], 1: [(2, 9), (20, 24)], 2: [(0, 4)]})
    assert rows is not None
    assert rows.owners.tolist() == [0, 0, 0, 0, 0, 1, 1, 2] and rows.counts.tolist() == [2, 4, 2, 3, 1, 4, 2, 1]
    assert rows.ends.tolist() == [2, 6, 8, 11, 12, 9, 11, 10]
    assert rows.bidirectional.tolist() == [False, True, False, True, False, True, False, False]
    assert rows.last(np.array([7, 1, 1], np.int32)).tolist() == [0, 1, 2, 3, 1, 0, 1, 1]
    assert rows.last(np.array([12, 0, 1], np.int32)).tolist() == [2, 4, 2, 3, 1, 0, 0, 1]
    assert divide(plan, {1: [(20, 24)], 2: [(0, 4)], 0: [(0, 9)]}) is None


@pytest.mark.parametrize("older", [False, True])
def test_tensors_have_the_names_of_released_checkpoints(older: bool, tmp_path: Path) -> None:
    config = tiny_gemma_vision_config()
    names = {
        "vision_tower.encoder.layers.0.self_attn.q_proj.weight",
        "vision_tower.embeddings.patch_embedding.bias",
        "multi_modal_projector.mm_soft_emb_norm.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
    }
    file = write_checkpoint(tmp_path, config) / "model.safetensors"
    tensors = load_file(file)
    assert names <= tensors.keys()
    before = loaded_weights(tmp_path)
    if older:  # the module of the tower had a prefix of its own, and a head that is not used
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model.", 1): value for name, value in tensors.items()
        } | {"vision_tower.vision_model.head.probe": torch.ones(1, 1, 48)}
    else:
        tensors = {f"model.{name}".replace("language_model.model", "language_model"): v for name, v in tensors.items()}
    save_file(tensors, file)
    after = loaded_weights(tmp_path)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def loaded_weights(directory: Path) -> dict[str, torch.Tensor]:
    model = load_model(
        directory, checkpoint.hf_config(directory), dtype="float32", head_dtype="auto", load_format="auto", seed=0
    )
    assert model.tower is not None
    weights = {}
    for name, parameter in model.parameters_by_name().items():
        if places := parameter.places():
            weights[name] = places[0].read(0, parameter.shape[0])
    picture = Picture(kind_of(directory), 8, 8)
    patches = decode_image(picture.feature(0).data, picture.kind)[0]
    with torch.inference_mode():
        weights["embeddings"] = model.tower(torch.from_numpy(patches), picture.grid)
    return weights


RELEASED: dict[str, Any] = {  # of 4 billion parameters, as released: the rest is assumed
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def test_a_released_config_is_read(tmp_path: Path) -> None:
    spec = decoder_spec(checkpoint.flat(RELEASED))
    assert (spec.vocab, spec.hidden, spec.tied, spec.embedding_multiplier) == (262208, 2560, True, 2560**0.5)
    layers = [block.attention for block in spec.blocks[:6]]
    assert [layer.window for layer in layers if isinstance(layer, AttentionSpec)] == [1024] * 5 + [0]
    tower = spec.vision
    assert isinstance(tower, SiglipSpec)
    assert (tower.side, tower.merge, tower.outputs, tower.layers) == (64, 4, 2560, 27)
    kind = image_format(tmp_path, checkpoint.flat(RELEASED))
    assert kind is not None and (kind.start_id, kind.end_id, kind.token_id) == (255999, 256000, 262144)
    assert (kind.side, kind.merge, kind.size, kind.step_tokens, kind.axes) == (64, 4, 14, 256, False)
    assert kind.mean == kind.std == (0.5, 0.5, 0.5)
    without = decoder_spec(checkpoint.flat(RELEASED | {"vision_config": None}))
    assert without.vision is None and without.blocks == spec.blocks


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"image_size": 36}, "mm_tokens_per_image"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"patch_size": 0}, "patch_size"),
        ({"image_size": 3}, "mm_tokens_per"),
    ],
)
def test_towers_that_cannot_be_built_are_refused(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(StartError, match=name):
        decoder_spec(checkpoint.flat(tiny_gemma_vision_config(**changes)))


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"size": {"height": 64, "width": 64}}, "size must be 32 by 32"),
    ],
)
def test_unsupported_processors_are_refused(processor: dict[str, object], name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_gemma_vision_config())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(StartError, match=name):
        kind_of(tmp_path)


def test_an_image_of_another_size_is_refused(tmp_path: Path) -> None:
    kind = kind_of(write_checkpoint(tmp_path, tiny_gemma_vision_config()))
    check_image(Picture(kind, 8, 8).feature(0), kind)
    smaller = Picture(kind, 4, 16)
    with pytest.raises(RequestError, match=r"must be \(1, 8, 8\), got \(1, 4, 16\)"):
        check_image(smaller.feature(0), kind)
    short = Feature(KIND, b"short", 0, 16, encode_image(smaller.pixels[:9], Grid(1, 8, 8)))
    with pytest.raises(RequestError, match="needs 64 patches"):
        check_image(short, kind)
