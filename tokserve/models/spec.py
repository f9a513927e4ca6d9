"""What a decoder is made of, read from config.json.

The only place that knows the attribute names of Hugging Face configs, their older and newer spellings and
the values transformers assumes where one is absent.  What comes out is a `DecoderSpec`; nothing below reads a
config.  What it cannot honour it refuses: a silently ignored attribute would mean other logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokserve.errors import StartError
from tokserve.layers.linear import Activation
from tokserve.layers.rope import RopeSpec
from tokserve.models import float8

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A dense pre-norm decoder.  `windows`: per layer, how many last tokens attention sees (0: all).

    `renames`: (prefix in the checkpoint, prefix here), tried on names that are unknown as they stand.  `float8_block`:
    rows and columns that share a scale in float8 weights that are scaled by block; None: weights are not float8.
    """

    vocab: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    max_position: int
    windows: tuple[int, ...]
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    renames: tuple[tuple[str, str], ...]
    float8_block: float8.Block | None = None


class ConfigReader:
    """Typed reading of a JSON object; a wrong value is a StartError that names the attribute."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def refuse(self, name: str, problem: str) -> StartError:
        """The error to raise about attribute `name`."""
        return StartError(f"config.json: {self.path}{name} {problem}")

    def present(self, name: str) -> bool:
        """Whether the attribute is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer; null counts as absent; without a default it must be there."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.refuse(name, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.refuse(name, f"must be an integer of at least {minimum}, found {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number, likewise."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.refuse(name, "is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.refuse(name, f"must be a positive number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean; null counts as absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, found {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """A string; null counts as absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.refuse(name, f"must be a string, found {value!r}")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; empty if absent."""
        value = self.values.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.refuse(name, f"must be a list of strings, found {value!r}")
        return value

    def inner(self, name: str) -> ConfigReader:
        """An object; empty if absent."""
        value = self.values.get(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise self.refuse(name, f"must be an object, found {value!r}")
        return ConfigReader(value, f"{self.path}{name}.")


def dense(
    fields: ConfigReader,
    *,
    windows: tuple[int, ...],
    max_position: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    renames: tuple[tuple[str, str], ...] = (),
) -> DecoderSpec:
    """The spec of a dense family.

    `kv_heads`, `head_dim`, `max_position`: what the family's config assumes where the attribute is absent
    (None: as many as query heads; hidden size / heads).  A null num_key_value_heads means the query heads.
    """
    refuse_unsupported(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    absent = "num_key_value_heads" not in fields.values
    kv_heads = fields.integer("num_key_value_heads", kv_heads if absent and kv_heads else heads)
    if heads % kv_heads:
        raise fields.refuse("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}")
    dim = fields.integer("head_dim", head_dim or max(1, hidden // heads))
    if dim % 2:
        raise fields.refuse("head_dim", f"must be even, found {dim}")
    name = fields.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise fields.refuse("hidden_act", f"{name!r} is not supported; supported are: {', '.join(ACTIVATIONS)}")
    max_position = fields.integer("max_position_embeddings", max_position)
    return DecoderSpec(
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        inner=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[name],
        rope=rope(fields, dim, max_position),
        max_position=max_position,
        windows=windows,
        tied=fields.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        renames=renames,
        float8_block=float8.block_of(fields.values),
    )


def refuse_unsupported(fields: ConfigReader) -> None:
    """Raise StartError for attributes that change the arithmetic in ways not built here."""
    for name in float8.NAMES:
        if fields.present(name) and (why := float8.refusal(fields.values[name])):
            raise fields.refuse(
                name,
                f"{why}; of quantized checkpoints those with float8 (e4m3) weights are supported, and "
                "an unquantized one can be quantized as it loads: --quantization int8",
            )
    if fields.values.get("per_layer_config"):
        raise fields.refuse("per_layer_config", "(layers of different sizes) is not supported")
    if not fields.flag("is_causal", True):
        raise fields.refuse("is_causal", "is false; only causal attention is supported")


def no_windows(fields: ConfigReader) -> tuple[int, ...]:
    """Full attention in every layer."""
    return (0,) * fields.integer("num_hidden_layers")


def window_everywhere(fields: ConfigReader, absent: int) -> tuple[int, ...]:
    """`sliding_window` in every layer."""
    return (_window(fields, absent),) * fields.integer("num_hidden_layers")


def windows_by_layer(fields: ConfigReader, absent: int, full_layers: int) -> tuple[int, ...]:
    """By `layer_types`, or else from layer `max_window_layers` on; none unless `use_sliding_window`."""
    layers = fields.integer("num_hidden_layers")
    window = _window(fields, absent) if fields.flag("use_sliding_window") else 0
    if not fields.present("layer_types"):
        first = fields.integer("max_window_layers", full_layers, minimum=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    types = fields.texts("layer_types")
    if len(types) != layers:
        raise fields.refuse("layer_types", f"has {len(types)} entries for {layers} layers")
    unknown = sorted(set(types) - {"full_attention", "attention", "sliding_attention"})
    if unknown:
        raise fields.refuse("layer_types", f"names unsupported kinds: {', '.join(unknown)}")
    if "sliding_attention" in types and not window:
        raise fields.refuse("layer_types", "names sliding_attention, but no sliding_window is set and used")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _window(fields: ConfigReader, absent: int) -> int:
    null = "sliding_window" in fields.values and not fields.present("sliding_window")
    return 0 if null else fields.integer("sliding_window", absent)


def rope(fields: ConfigReader, dim: int, max_position: int) -> RopeSpec:
    """From `rope_scaling` with a `rope_theta` beside it, or `rope_parameters` with all inside."""
    given = fields.inner("rope_scaling")
    if not given.values:
        given = fields.inner("rope_parameters")
    nested = [name for name, value in given.values.items() if isinstance(value, Mapping)]
    if nested:
        raise given.refuse(nested[0], "(rope parameters by layer type) is not supported by this architecture")
    if given.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise given.refuse("partial_rotary_factor", "is not 1; this architecture rotates whole heads")
    kind = given.text("rope_type", given.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise given.refuse("rope_type", f"{kind!r} is not supported; supported are: {', '.join(ROPE_KINDS)}")
    theta = given.number("rope_theta", fields.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeSpec(dim, theta)
    if kind == "linear":
        return RopeSpec(dim, theta, "linear", factor=given.number("factor"))
    if kind == "dynamic":
        if dim < 4:
            raise fields.refuse("head_dim", f"must be 4 or more with dynamic rope, found {dim}")
        return RopeSpec(dim, theta, "dynamic", factor=given.number("factor"), original=max_position)
    before = "original_max_position_embeddings"
    original = fields.integer(before, given.integer(before, max_position))
    if kind == "llama3":
        return _llama3(given, dim, theta, original)
    return _yarn(given, dim, theta, original, max_position)


def _llama3(given: ConfigReader, dim: int, theta: float, original: int) -> RopeSpec:
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if high <= low:
        raise given.refuse("high_freq_factor", f"must be above low_freq_factor {low}, found {high}")
    return RopeSpec(
        dim, theta, "llama3", given.number("factor"), original, low_freq_factor=low, high_freq_factor=high
    )  # fmt: skip


def _yarn(given: ConfigReader, dim: int, theta: float, original: int, max_position: int) -> RopeSpec:
    def optional(name: str) -> float:
        return given.number(name) if given.values.get(name) else 0.0

    if theta == 1.0:
        raise given.refuse("rope_theta", "must not be 1 with yarn")
    return RopeSpec(
        dim, theta, "yarn", given.number("factor", max_position / original), original,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        truncate=given.flag("truncate", True),
        attention_factor=given.number("attention_factor") if given.present("attention_factor") else None,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )  # fmt: skip
