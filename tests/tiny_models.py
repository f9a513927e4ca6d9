"""Tiny models of every family: their config.json, and checkpoints with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_families import FAMILIES, VISION_FAMILIES
from tokserve.checkpoint import flat
from tokserve.families.mixtures.experts import MixtureSpec
from tokserve.features.images.siglip import SiglipSpec
from tokserve.features.pooling.encoder_model import EncoderSpec
from tokserve.layers.options import LayerOptions
from tokserve.models.decoder import DecoderSpec, rope_tables
from tokserve.models.dummy import tensors
from tokserve.models.registry import decoder_spec
from tokserve.models.weights import INDEX, SINGLE


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model of one of the `FAMILIES`; `changes` replace attributes."""
    architecture, attributes = FAMILIES[family]
    common: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }
    return common | attributes | changes


def tiny_gemma_vision_config(window: int = 24, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny Gemma 3 that reads images, of 16 tokens each; `changes` replace attributes of the tower."""
    inner = tiny_config("gemma3_text", sliding_window=window)
    tower: dict[str, Any] = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 32,
        "patch_size": 4,
        "vision_use_head": False,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 16,
        "image_token_index": 300,
        "boi_token_index": 301,
        "eoi_token_index": 302,
        "tie_word_embeddings": True,
        "text_config": inner | {"model_type": "gemma3_text"},
        "vision_config": tower | changes,
        "dtype": "float32",
    }


def tiny_vision_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model of one of the `VISION_FAMILIES`; `changes` replace attributes of the tower."""
    architecture, text, sections, tower = VISION_FAMILIES[family]
    inner = tiny_config(text)
    rope = inner["rope_parameters"] | {"mrope_section": sections}
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = 2 * sum(sections) / inner["head_dim"]
    inner |= {"rope_parameters": rope | ({} if family == "qwen2_5_vl" else {"mrope_interleaved": True})}
    common: dict[str, Any] = {
        "depth": 4,
        "hidden_size": 48,
        "num_heads": 3,
        "intermediate_size": 80,
        "in_channels": 3,
        "patch_size": 8,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": inner["hidden_size"],
        "model_type": family,
    }
    return {
        "architectures": [architecture],
        "model_type": family,
        "tie_word_embeddings": inner["tie_word_embeddings"],
        "image_token_id": 300,
        "video_token_id": 301,
        "vision_start_token_id": 302,
        "vision_end_token_id": 303,
        "text_config": inner | {"model_type": f"{family}_text"},
        "vision_config": common | tower | changes,
        "dtype": "float32",
    }


def write_checkpoint(directory: Path, hf: Mapping[str, Any], *, seed: int = 0, shards: int = 1) -> Path:
    """Write config.json and random weights in the config's dtype as a Hugging Face checkpoint; returns `directory`.

    `shards` > 1: that many files and an index.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(hf), indent=2) + "\n")
    dtype = getattr(torch, hf.get("dtype") or "float32")
    spec, options = decoder_spec(flat(dict(hf))), LayerOptions(dtype)
    parameters = spec.build(options, options, rope_tables(spec, 1)).parameters_by_name()
    named = {name: tensor.to(dtype) for name, tensor in tensors(parameters, seed)}
    if spec.vision is not None:
        named = _as_released(named, spec)
    if isinstance(spec, EncoderSpec) or any(_is_of_checkpoints(*pair) for pair in spec.renames):
        named = {_stored_name(name, spec): tensor for name, tensor in named.items()}
    if shards == 1:
        save_file(named, directory / SINGLE, metadata={"format": "pt"})
        return directory
    places: dict[str, str] = {}
    for part in range(shards):
        file = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        held = {name: tensor for number, (name, tensor) in enumerate(named.items()) if number % shards == part}
        save_file(held, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(held, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return directory


def _is_of_checkpoints(old: str, new: str) -> bool:
    """Whether the first is what checkpoints have, not what they may have, too."""
    return new.startswith("model.layers.0.") or old in ("gpt_neox.", "transformer.h.", "model.decoder.")


def _stored_name(name: str, spec: DecoderSpec) -> str:
    """What checkpoints call a tensor of this name, in families that rename whole prefixes."""
    pairs = [(old, new) for old, new in spec.renames if new and not old.startswith(".")]
    return next((old + name.removeprefix(new) for old, new in pairs if name.startswith(new)), name)


def mixtures_of(spec: DecoderSpec) -> dict[int, MixtureSpec]:
    """The blocks that have experts, by number."""
    return {number: block.mlp for number, block in enumerate(spec.blocks) if isinstance(block.mlp, MixtureSpec)}


def _as_released(named: dict[str, Tensor], spec: DecoderSpec) -> dict[str, Tensor]:
    """The tensors of a model that reads images as checkpoints have them: another prefix, experts in one tensor."""
    assert spec.vision is not None
    tower = spec.vision.name
    if isinstance(spec.vision, SiglipSpec):
        places = (tower, spec.vision.projector_name)
        return {
            name.removeprefix("model.") if name.startswith(places) else f"language_model.{name}": tensor
            for name, tensor in named.items()
        }
    renamed = {
        name if name.startswith(tower) else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in named.items()
    }
    for layer, mixture in mixtures_of(spec).items():
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([renamed.pop(f"{prefix}{expert}.{one}.weight").t() for expert in range(mixture.experts)])
            for one in mixture.names
        )
        renamed[prefix + "gate_up_proj"] = torch.cat((gate, up), dim=2).contiguous()
        renamed[prefix + "down_proj"] = down.contiguous()
    return renamed
