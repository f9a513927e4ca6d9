"""Rotary embedding as config.json describes it, in its older and newer spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokserve.layers.rope import RopeSpec
from tokserve.models.config_reader import ConfigReader

ROPE_KINDS = (
    "default",
    "linear",
    "dynamic",
    "llama3",
    "yarn",
    "longrope",
    "proportional",
    "su",
)  # su: Phi 3's older longrope


def rope(
    fields: ConfigReader,
    dim: int,
    max_position: int,
    *,
    theta: float = 10000.0,
    rotary: float | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """The rope of `rope_scaling` with a `rope_theta` beside it, or of `rope_parameters` with all inside.

    `theta`, and `rotary`, the part of a head of `dim` that is rotated: where the config does not say.
    `rotary` None: it must be all.
    """
    scaling = rope_values(fields)
    nested = [name for name, value in scaling.values.items() if isinstance(value, Mapping)]
    if nested:
        raise scaling.unsupported(nested[0], "(rope parameters by layer type) is not supported by this architecture")
    theta = scaling.number("rope_theta", fields.number("rope_theta", theta))
    spec = rope_spec(fields, scaling, dim, max_position, theta, rotary=rotary)
    return replace(spec, interleaved=True) if interleaved else spec


def rope_values(fields: ConfigReader) -> ConfigReader:
    """The object that describes the rope."""
    scaling = fields.inner("rope_scaling")
    return scaling if scaling.values else fields.inner("rope_parameters")


def ropes_with_windows(
    fields: ConfigReader, dim: int, max_position: int, theta: float, window_theta: float | None = None
) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of layers without a window and of those with one: from `rope_parameters` by layer type, or from
    `rope_scaling` or flat `rope_parameters`, which stretch only the former.

    `theta`, and `window_theta` of layers with a window (None: the same): where the config does not say.
    """
    theta, scaling = fields.number("rope_theta", theta), fields.inner("rope_scaling")
    parameters = fields.inner("rope_parameters")
    if not scaling.values and any(isinstance(value, Mapping) for value in parameters.values.values()):
        return (
            rope_by_type(fields, "full_attention", dim, max_position, theta),
            rope_by_type(fields, "sliding_attention", dim, max_position, window_theta or theta),
        )
    scaling = scaling if scaling.values else parameters
    theta = scaling.number("rope_theta", theta)
    return rope_spec(fields, scaling, dim, max_position, theta), RopeSpec(dim, window_theta or theta)


def rope_by_type(fields: ConfigReader, kind: str, dim: int, max_position: int, theta: float) -> RopeSpec:
    """The rope of the entry `kind` of `rope_parameters`; `theta`: where it gives none."""
    scaling = fields.inner("rope_parameters").inner(kind)
    return rope_spec(fields, scaling, dim, max_position, scaling.number("rope_theta", theta))


def rope_spec(
    fields: ConfigReader,
    scaling: ConfigReader,
    dim: int,
    max_position: int,
    theta: float,
    *,
    rotary: float | None = None,
) -> RopeSpec:
    """The rope that the object `scaling` describes, with this theta.  `rotary`: the part of a head that is rotated
    where the config does not say; None: this family rotates whole heads."""
    part = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", rotary or 1.0))
    if scaling.values.get("rope_type", scaling.values.get("type")) == "proportional" and part <= 1.0:
        turned = 2 * int(part * dim // 2)
        return RopeSpec(dim, theta, "proportional", factor=scaling.number("factor", 1.0), turned=turned)
    if rotary is None and part != 1.0:
        raise scaling.unsupported("partial_rotary_factor", "is not 1; this architecture rotates whole heads")
    if not 2 <= int(dim * part) <= dim or int(dim * part) % 2:
        raise scaling.refuse("partial_rotary_factor", f"must rotate an even part of a head of {dim}, found {part}")
    dim = int(dim * part)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise scaling.unsupported("rope_type", f"{kind!r} is not supported; supported are: {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeSpec(dim, theta)
    if kind == "linear":
        return RopeSpec(dim, theta, "linear", factor=scaling.number("factor"))
    if kind == "dynamic":
        if dim < 4:
            raise fields.refuse("head_dim", f"must be 4 or more with dynamic rope, found {dim}")
        return RopeSpec(dim, theta, "dynamic", factor=scaling.number("factor"), original=max_position)
    before = "original_max_position_embeddings"
    original = fields.integer(before, scaling.integer(before, max_position))
    if kind == "llama3":
        return _llama3(scaling, dim, theta, original)
    if kind in ("longrope", "su"):
        return _longrope(scaling, dim, theta, original, max_position)
    return _yarn(scaling, dim, theta, original, max_position)


def _llama3(scaling: ConfigReader, dim: int, theta: float, original: int) -> RopeSpec:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.refuse("high_freq_factor", f"must be above low_freq_factor {low}, found {high}")
    return RopeSpec(
        dim, theta, "llama3", scaling.number("factor"), original, low_freq_factor=low, high_freq_factor=high
    )


def _longrope(scaling: ConfigReader, dim: int, theta: float, original: int, max_position: int) -> RopeSpec:
    if original == 1:
        raise scaling.refuse("original_max_position_embeddings", "must be 2 or more with longrope, found 1")
    return RopeSpec(
        dim,
        theta,
        "longrope",
        scaling.number("factor", max_position / original),
        original,
        attention_factor=scaling.number("attention_factor") if scaling.present("attention_factor") else None,
        short=scaling.numbers("short_factor", dim // 2),
        long=scaling.numbers("long_factor", dim // 2),
    )


def _yarn(scaling: ConfigReader, dim: int, theta: float, original: int, max_position: int) -> RopeSpec:
    def optional(name: str) -> float:
        return scaling.number(name) if scaling.values.get(name) else 0.0

    if theta == 1.0:
        raise scaling.refuse("rope_theta", "must not be 1 with yarn")
    return RopeSpec(
        dim,
        theta,
        "yarn",
        scaling.number("factor", max_position / original),
        original,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        truncate=scaling.flag("truncate", True),
        attention_factor=scaling.number("attention_factor") if scaling.present("attention_factor") else None,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )
