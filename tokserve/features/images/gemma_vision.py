"""Gemma 3 that reads images: the text model, SigLIP's tower and a projector that makes one number of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from tokserve.features.images.siglip import SiglipSpec
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec, Renames
from tokserve.models.dense import gemma
from tokserve.models.spec import activation

# The tower's names with and without the prefix of the whole model, and with that of its module in older checkpoints.
TOWERS = (
    "model.vision_tower.vision_model.",
    "vision_tower.vision_model.",
    "model.vision_tower.",
    "vision_tower.",
)
PROJECTORS = ("model.multi_modal_projector.", "multi_modal_projector.")
TEXT: Renames = (
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
)
HEADS: Renames = tuple((f"{tower}head.", "") for tower in TOWERS)  # pool an image to one row: not used here
# What transformers assumes where the text model's config has no such attribute.
ABSENT = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}


def gemma3(hf: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 3 with its tower; without it if the config has none any more."""
    values = {name: value for name, value in hf.items() if value is not None or name not in ABSENT}
    fields = ConfigReader(ABSENT | values)
    spec = gemma.gemma3(fields.values)
    if not fields.present("vision_config"):
        unused: Renames = tuple((name, "") for name in (*TOWERS, *PROJECTORS))
        return replace(spec, renames=unused + TEXT + spec.renames)
    places: Renames = tuple((tower, "model.vision_tower.") for tower in TOWERS)
    places += tuple((projector, "model.multi_modal_projector.") for projector in PROJECTORS)
    vision = _tower(fields, fields.inner("vision_config"))
    return replace(spec, renames=HEADS + places + TEXT + spec.renames, vision=vision)


def _tower(text: ConfigReader, fields: ConfigReader) -> SiglipSpec:
    hidden, heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    if hidden % heads:
        raise fields.refuse("num_attention_heads", f"must divide the hidden_size {hidden}, found {heads}")
    kind = activation(fields, "hidden_act", "gelu_pytorch_tanh", only_built_in=True)
    size, patch = fields.integer("image_size", 224), fields.integer("patch_size", 16)
    side, tokens = size // patch, text.integer("mm_tokens_per_image", 256)
    across = isqrt(tokens)
    if across**2 != tokens or side == 0 or side % across:
        raise text.refuse(
            "mm_tokens_per_image", f"must be the square of a divisor of the {side} patches of a row, found {tokens}"
        )
    feed_forward = MLPSpec(
        fields.integer("intermediate_size", 3072),
        kind,
        bias=True,
        gated=False,
        up_names=("fc1",),
        down_name="fc2",
    )
    return SiglipSpec(
        (fields.integer("num_channels", 3), patch, patch),
        hidden,
        fields.integer("num_hidden_layers", 12),
        heads,
        feed_forward,
        NormSpec(fields.number("layer_norm_eps", 1e-6), kind="layer", bias=True),
        side,
        side // across,
        text.integer("hidden_size"),
    )
