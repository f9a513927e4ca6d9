"""A checkpoint directory and its config to a decoder that is ready to run; the one entry to `models`.

Call it after `ops.bind`: weights are packed for the implementations that are bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokserve.base.errors import StartError
from tokserve.base.rooms import part
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import ALONE, WHOLE, Group, Stage
from tokserve.layers.quant import GROUP, STORED_INTEGERS, UNQUANTIZED, QuantMethod
from tokserve.models import dummy, kv_scales, weights
from tokserve.models.decoder import Decoder, DecoderSpec, rope_tables
from tokserve.models.formats import DENSE, quantization_of
from tokserve.models.provenance import EMBEDDING, HEAD
from tokserve.models.registry import decoder_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Adapt = Callable[[DecoderSpec, Collection[str] | None], DecoderSpec]  # names of tensors; None: weights are drawn

logger = logging.getLogger(__name__)


def load_decoder(
    directory: Path,
    hf: Mapping[str, Any],
    *,
    dtype: str,
    head_dtype: str,
    load_format: str,
    seed: int,
    max_model_len: int | None = None,
    quantization: str | None = None,
    group_size: int = GROUP,
    quantize_lm_head: bool = False,
    quantization_activations: str | None = None,
    has_float8: bool = False,
    float8_cache: bool = False,
    needs_head: bool = True,
    group: Group = ALONE,
    stage: Stage = WHOLE,
    admit: Callable[[int], object] = weights.admit_any,
    adapt: Adapt | None = None,
) -> Decoder:
    """Build the model of `hf` (config.json, overrides applied) and load its weights.  Raises StartError.

    `head_dtype`: "auto" is the model's.  `load_format` "dummy" draws weights from `seed` and reads no file.
    `max_model_len`: positions to serve, by default the config's own limit.  `quantization`: the method that quantizes
    the projections as they are loaded, with `quantize_lm_head` the head too ("int4": with a scale per `group_size`
    inputs).  With None, projections that are stored in 4 or 8 bits, or as float8 where the device `has_float8`
    products, stay so, with their own scales; "none": they become `dtype` there too.  `quantization_activations` "int8":
    rows that are multiplied by integers are rounded, by group.  `float8_cache`: keys and values will be kept as float8,
    by the scales of the weights.  `needs_head` False: the checkpoint may leave out the head.  `group`: the ranks that
    divide each layer; `stage`: its layers.  `admit` gets the least bytes before reading.  `adapt` adds to the spec.
    """
    spec, catalogue = _spec_and_catalogue(directory, hf, load_format, adapt)
    options: dict[str, Any] = {
        "dtype": dtype, "head_dtype": head_dtype, "max_model_len": max_model_len, "quantization": quantization,
        "group_size": group_size, "quantize_lm_head": quantize_lm_head, "float8_cache": float8_cache,
        "rounded": quantization_activations is not None, "group": group, "stage": stage,
    }  # fmt: skip
    if catalogue is None:
        return _with_dummy_weights(build(spec, **options), seed, admit)
    stamp = weights.stamp(catalogue)
    entries = weights.with_model_names(catalogue, spec.renames)
    scales = {name: entries.pop(name) for name in kv_scales.names(len(spec.blocks)) if name in entries}
    entries = weights.by_weight(entries, spec.format)
    spec = _as_stored(spec, entries)
    stored = _native_method(spec, entries, options, has_float8=has_float8)
    keeps = stored is not None and quantization in (None, stored)
    options["quantization"] = stored if keeps else quantization
    if options["rounded"] and options["quantization"] not in ("int4", "int8", STORED_INTEGERS):
        raise StartError("option quantization_activations: needs integer weights; add --quantization int4 or int8")
    if any(entry.is_stored for entry in entries.values()):
        _log_conversion(spec.format.name, quantization, stored, dtype, keeps=keeps)
    spec, entries = _with_head(spec, entries, needed=needs_head)
    decoder = build(spec, **options)
    _fill(decoder, entries, directory, admit)
    decoder.provenance.add_files(catalogue, stamp)
    _scale_cache(decoder, scales, quantization_of(hf))
    return decoder


def _spec_and_catalogue(
    directory: Path, hf: Mapping[str, Any], load_format: str, adapt: Adapt | None
) -> tuple[DecoderSpec, dict[str, weights.Entry] | None]:
    """What the config says, and the checkpoint's tensors, None if weights are drawn."""
    spec = decoder_spec(hf)
    catalogue = None if load_format == "dummy" else weights.catalogue(directory)
    return spec if adapt is None else adapt(spec, catalogue), catalogue


def _native_method(
    spec: DecoderSpec, entries: Mapping[str, weights.Entry], options: Mapping[str, Any], *, has_float8: bool
) -> str | None:
    """The method that multiplies the checkpoint's weights as they are stored, of those that a method of quantization
    would hold: routers, say, stay floats."""
    if spec.format.name == DENSE.name:
        return None
    decoder = build(spec, **{**options, "quantization": "int8", "quantize_lm_head": False, "rounded": False})
    parameters = decoder.parameters_by_name()
    parameters |= {name: stacked.parameter for name, stacked in decoder.stacked_parameters().items()}
    held = {name for name, one in parameters.items() if one.rounded not in (None, one.dtype)}
    return spec.format.native_method(
        {name: entry for name, entry in entries.items() if name in held},
        has_float8=has_float8 or options["quantization"] == "fp8",
        rounded=options["rounded"],
    )


def _with_head(
    spec: DecoderSpec, entries: dict[str, weights.Entry], *, needed: bool
) -> tuple[DecoderSpec, dict[str, weights.Entry]]:
    """Spec and entries with the head as this checkpoint has it, which may lack one that is not `needed`."""
    if not needed and spec.classifier is None and HEAD not in entries:
        spec = replace(spec, tied=True)  # a head that is the embedding needs no memory
    return _resolve_tie(spec, entries) if spec.tied and HEAD in entries else (spec, entries)


def _as_stored(spec: DecoderSpec, entries: Mapping[str, weights.Entry]) -> DecoderSpec:
    """The spec with tensors of all experts as this checkpoint has them: released ones are transposed, and transformers
    saves a model that it has not read from one of these as it computes with it."""
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in spec.blocks]  # by names within the feed-forward layer
    prefixes = {f"model.layers.{number}.{block.mlp_name}": number for number, block in enumerate(spec.blocks)}
    for name, entry in entries.items():
        parts = name.split(".")
        if (number := prefixes.get(".".join(parts[:4]))) is not None:
            shapes[number][".".join(parts[4:])] = entry.shape
    blocks = (
        replace(block, mlp=block.mlp.as_stored(spec.hidden, stored))
        for block, stored in zip(spec.blocks, shapes, strict=True)
    )
    return replace(spec, blocks=tuple(blocks))


def _fill(decoder: Decoder, entries: dict[str, weights.Entry], directory: Path, admit: Callable[[int], object]) -> None:
    """Load a catalogue that must fit the decoder; of what other ranks keep nothing is read."""
    by_name = decoder.parameters_by_name()
    entries = weights.without_zero_biases(entries, by_name)
    parameters = weights.layout(entries, by_name, decoder.stacked_parameters())
    weights.check_names(entries, parameters, str(directory))
    kept = {name: entry for name, entry in entries.items() if parameters[name].share}
    stored = {name for name, entry in kept.items() if entry.is_stored}
    admit(weights.least_bytes({name: parameters[name] for name in kept}, stored))
    weights.load_into(parameters, weights.stream(kept, mapped=True))


def _log_conversion(form: str | None, quantization: str | None, stored: str | None, dtype: str, *, keeps: bool) -> None:
    """Log what the weights of a checkpoint that stores them in some form become."""
    becomes = dtype if quantization in (None, "none") else quantization
    stays = keeps or ((quantization, stored) == ("int4", STORED_INTEGERS) and form != "float8")
    result = f"stay {form}, with their scales," if stays else f"become {becomes}"
    logger.info("the checkpoint's %s weights %s as they are loaded", form, result)


def _with_dummy_weights(decoder: Decoder, seed: int, admit: Callable[[int], object]) -> Decoder:
    parameters = decoder.parameters_by_name()
    admit(weights.least_bytes(parameters))
    weights.load_into(parameters, dummy.tensors(parameters, seed))
    decoder.provenance.set_generator(lambda: dummy.tensors(parameters, seed))
    return decoder


def _scale_cache(decoder: Decoder, scales: dict[str, weights.Entry], quantization: Mapping[str, Any] | None) -> None:
    if not decoder.float8_cache:
        if scales:
            logger.info("the checkpoint's scales of a float8 KV cache are not needed: kv_cache_dtype is auto")
        return
    if why := kv_scales.refusal(quantization):
        raise StartError(f"config.json {why}, which float8 is not: leave kv_cache_dtype at auto")
    kv_scales.apply(decoder, {name: weights.read_tensor(entry) for name, entry in scales.items()})
    if scales:
        logger.info("keys and values are scaled by the checkpoint's numbers before they become float8")
    elif (quantization or {}).get("kv_cache_scheme"):
        logger.warning("config.json has a kv_cache_scheme, but no scales come with the weights: 1 is used")


def build(
    spec: DecoderSpec,
    *,
    dtype: str,
    head_dtype: str,
    quantization: str | None = None,
    group_size: int = GROUP,
    quantize_lm_head: bool = False,
    max_model_len: int | None = None,
    float8_cache: bool = False,
    rounded: bool = False,
    group: Group = ALONE,
    stage: Stage = WHOLE,
) -> Decoder:
    """A decoder without weights; arguments as `load`'s.  `rounded`: activations are."""
    quant, head_quant = quant_methods(quantization, group_size, quantize_lm_head=quantize_lm_head, rounded=rounded)
    model_type = _dtype(dtype)
    head_type = model_type if head_dtype == "auto" else _dtype(head_dtype)
    options, head = LayerOptions(model_type, quant, group), LayerOptions(head_type, head_quant, group)
    tables = rope_tables(spec, max_model_len or spec.max_position)
    return spec.build(options, head, tables, float8_cache=float8_cache, stage=stage)


def quant_methods(
    quantization: str | None, group_size: int, *, quantize_lm_head: bool, rounded: bool = False
) -> tuple[QuantMethod, QuantMethod]:
    """How the projections are quantized, and how the head is, whose activations are `rounded` by int8 alone."""
    if quantization in (None, "none") and not quantize_lm_head:
        return UNQUANTIZED, UNQUANTIZED
    methods: tuple[QuantMethod, QuantMethod] = part("quantization", "methods")(
        quantization, group_size, quantize_lm_head=quantize_lm_head, rounded=rounded
    )
    return methods


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise StartError(f"unknown dtype {name!r}; there are: {', '.join(DTYPES)}")
    return DTYPES[name]


def _resolve_tie(spec: DecoderSpec, entries: dict[str, weights.Entry]) -> tuple[DecoderSpec, dict[str, weights.Entry]]:
    """A tied model's checkpoint may store the shared weight under either name or both; like transformers,
    take what is there, and believe the tensors rather than the config if the two differ.
    """
    rest = {name: entry for name, entry in entries.items() if name != HEAD}
    if EMBEDDING not in entries:
        return spec, rest | {EMBEDDING: entries[HEAD]}
    if weights.equal(entries[EMBEDDING], entries[HEAD]):
        return spec, rest
    logger.warning("config.json says tie_word_embeddings, but %s and %s differ: both are used", EMBEDDING, HEAD)
    return replace(spec, tied=False), entries
