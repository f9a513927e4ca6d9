"""Families that read images: a text model of a known family, a vision tower, and positions along three axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tokserve.families.mixtures import moe
from tokserve.families.mixtures.experts import MixtureSpec
from tokserve.families.recurrent import hybrid
from tokserve.features.images.tower import VisionSpec
from tokserve.features.images.tower_layers import MergerSpec
from tokserve.layers.attention import AttentionSpec
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.models.block import BlockSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec, Renames
from tokserve.models.dense import llama
from tokserve.models.spec import activation

# The tower's names, and those of the text model, in checkpoints of before and since transformers 4.52.
NAMES: Renames = (
    ("visual.", "model.visual."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)
WITHOUT_TOWER: Renames = (("model.visual.", ""), ("visual.", ""))


def qwen2_5_vl(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 2.5 with a tower whose attention sees windows of an image in most layers."""
    return _with_vision(hf, llama.qwen2, 1e6, _qwen2_5_tower)


def qwen3_vl(hf: Mapping[str, Any]) -> DecoderSpec:
    """Qwen 3 with a tower that adds to the first layers, too."""
    return _with_vision(hf, llama.qwen3, 5e5, _qwen3_tower)


def qwen3_vl_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    """The same with experts, which checkpoints store transposed."""
    spec = _with_vision(hf, moe.qwen3_moe, 5e5, _qwen3_tower)
    blocks = (
        replace(block, mlp=replace(block.mlp, transposed=True)) if isinstance(block.mlp, MixtureSpec) else block
        for block in spec.blocks
    )
    return replace(spec, blocks=tuple(blocks))


def qwen3_5(hf: Mapping[str, Any]) -> DecoderSpec:
    return _with_vision(hf, hybrid.qwen3_5, 1e7, _qwen3_5_tower)


def qwen3_5_moe(hf: Mapping[str, Any]) -> DecoderSpec:
    return _with_vision(hf, hybrid.qwen3_5_moe, 1e7, _qwen3_5_tower)


def _with_vision(
    hf: Mapping[str, Any],
    text: Callable[[Mapping[str, Any]], DecoderSpec],
    theta: float,
    tower: Callable[[ConfigReader, ConfigReader], VisionSpec],
) -> DecoderSpec:
    """The text model's spec with the tower; without it if the config has none any more.  `theta`: of the text model,
    where the config gives none."""
    plain = _without_axes(hf, theta)
    spec = text(plain)
    fields = ConfigReader(hf)
    has_tower = fields.present("vision_config")
    names = NAMES if has_tower else WITHOUT_TOWER + NAMES
    known = tuple(pair for pair in spec.renames if pair not in WITHOUT_TOWER and pair not in NAMES)
    spec = replace(spec, renames=names + known)
    if not has_tower:
        return spec
    vision = tower(fields, fields.inner("vision_config"))
    if len(vision.taps) >= len(spec.blocks):
        raise fields.refuse("vision_config.deepstack_visual_indexes", "must be fewer than the text model's layers")
    return replace(spec, vision=vision, blocks=tuple(_with_axes(fields, block) for block in spec.blocks))


def _rope_of(hf: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The attribute that describes the text model's rope, and its value."""
    name = "rope_scaling" if isinstance(hf.get("rope_scaling"), Mapping) and hf["rope_scaling"] else "rope_parameters"
    value = hf.get(name)
    return name, dict(value) if isinstance(value, Mapping) else {}


def _without_axes(hf: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """config.json with a rope of one axis."""
    name, rope = _rope_of(hf)
    for spelling in ("rope_type", "type"):
        if rope.get(spelling) == "mrope":
            rope[spelling] = "default"
    if rope.get("rope_theta") is None and hf.get("rope_theta") is None:
        rope["rope_theta"] = theta
    return dict(hf) | {name: rope}


def _with_axes(fields: ConfigReader, block: BlockSpec) -> BlockSpec:
    """The block with the axis of each frequency, by `mrope_section`: three runs, or one in turn as long as it lasts."""
    if not isinstance(block.attention, AttentionSpec):
        return block
    name, values = _rope_of(fields.values)
    scaling, count = fields.inner(name), block.attention.rope.dim // 2
    absent = [16, 24, 24] if name == "rope_scaling" else [24, 20, 20]
    sections = values.get("mrope_section", absent)
    if not (isinstance(sections, list) and len(sections) == 3 and all(type(n) is int and n > 0 for n in sections)):
        raise scaling.refuse("mrope_section", f"must be three positive integers, found {sections!r}")
    if sum(sections) != count:
        raise scaling.refuse(
            "mrope_section", f"must add up to {count}, half of a head's rotated part, found {sections}"
        )
    if not any(name.startswith("Qwen2") for name in fields.texts("architectures")):  # interleaved
        axes = [axis if axis and index < 3 * sections[axis] else 0 for index, axis in enumerate([0, 1, 2] * count)]
        axes = axes[:count]
    else:
        axes = [axis for axis, length in enumerate(sections) for _ in range(length)]
    return replace(block, attention=replace(block.attention, rope=replace(block.attention.rope, axes=tuple(axes))))


def _patch(fields: ConfigReader) -> tuple[int, int, int, int]:
    size = fields.integer("patch_size")
    channels = fields.integer("in_channels", fields.integer("in_chans", 3))
    return channels, fields.integer("temporal_patch_size", 2), size, size


def _heads(fields: ConfigReader, hidden: int) -> int:
    heads = fields.integer("num_heads")
    if hidden % heads or hidden // heads % 4:
        raise fields.refuse("num_heads", f"must divide {hidden} into heads of a multiple of 4 elements, found {heads}")
    return heads


def _outputs(text: ConfigReader, fields: ConfigReader) -> int:
    outputs, hidden = fields.integer("out_hidden_size"), text.integer("hidden_size")
    if outputs != hidden:
        raise fields.refuse("out_hidden_size", f"must be the text model's hidden_size {hidden}, found {outputs}")
    return outputs


def _layers(fields: ConfigReader, name: str, depth: int, absent: list[int]) -> tuple[int, ...]:
    """Numbers of layers, below `depth`."""
    value = fields.values.get(name, absent)
    if not isinstance(value, list) or not all(type(layer) is int and 0 <= layer < depth for layer in value):
        raise fields.refuse(name, f"must be a list of layers below {depth}, found {value!r}")
    if len(set(value)) != len(value):
        raise fields.refuse(name, f"names a layer twice: {value!r}")
    return tuple(value)


def _qwen2_5_tower(text: ConfigReader, fields: ConfigReader) -> VisionSpec:
    norm, hidden, depth = NormSpec(1e-6), fields.integer("hidden_size"), fields.integer("depth", 32)
    patch, merge = _patch(fields), fields.integer("spatial_merge_size", 2)
    kind = activation(fields, "hidden_act", "silu", only_built_in=True)
    return VisionSpec(
        patch,
        hidden,
        depth,
        _heads(fields, hidden),
        MLPSpec(fields.integer("intermediate_size"), kind, bias=True),
        norm,
        MergerSpec(hidden, merge, _outputs(text, fields), norm, "ln_q", "mlp.0", "mlp.2"),
        window=max(1, fields.integer("window_size", 112) // merge // patch[-1]),
        whole=_layers(fields, "fullatt_block_indexes", depth, [7, 15, 23, 31]),
    )


def _qwen3_tower(text: ConfigReader, fields: ConfigReader) -> VisionSpec:
    spec = _qwen3_5_tower(text, fields)
    return replace(spec, taps=_layers(fields, "deepstack_visual_indexes", spec.layers, [8, 16, 24]))


def _qwen3_5_tower(text: ConfigReader, fields: ConfigReader) -> VisionSpec:
    norm = NormSpec(1e-6, kind="layer", bias=True)
    hidden, depth = fields.integer("hidden_size"), fields.integer("depth", 27)
    count = fields.integer("num_position_embeddings", 2304)
    side = int(count**0.5)
    if side**2 != count:
        raise fields.refuse("num_position_embeddings", f"must be a square, found {count}")
    kind = activation(fields, "hidden_act", "gelu_pytorch_tanh", only_built_in=True)
    names: dict[str, Any] = {"up_names": ("linear_fc1",), "down_name": "linear_fc2"}
    return VisionSpec(
        _patch(fields),
        hidden,
        depth,
        _heads(fields, hidden),
        MLPSpec(fields.integer("intermediate_size"), kind, bias=True, gated=False, **names),
        norm,
        MergerSpec(hidden, fields.integer("spatial_merge_size", 2), _outputs(text, fields), norm),
        patch_bias=True,
        side=side,
    )
