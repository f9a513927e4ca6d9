"""Whether transformers has a causal language model for a config.json that can be served on pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tokserve.base.errors import StartError

KINDS = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
CODE = "auto_map names code of the checkpoint's own, which is never run"
BY_LENGTH = ("dynamic", "longrope")  # ropes whose angles depend on the longest row of a batch there


def with_architecture(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the causal language model that transformers has for its `model_type`, if it names no
    architecture."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(hf.get("model_type")))
    return dict(hf) | ({} if hf.get("architectures") or not isinstance(name, str) else {"architectures": [name]})


def configuration(hf: Mapping[str, Any], max_model_len: int | None) -> tuple[PretrainedConfig, type[Any]]:
    """The config and the model's class, for contexts of at most `max_model_len` (None: any).  Raises StartError."""
    names, kind = ", ".join(hf.get("architectures") or []) or "the architecture", str(hf.get("model_type"))
    if kind not in CONFIG_MAPPING:
        remote = f"{CODE}; " if hf.get("auto_map") else ""
        raise StartError(
            f"{names} is not supported: {remote}its model_type {kind!r} is neither built in nor known to transformers "
            f"{__version__} (a newer one may know it; docs/models.md lists the families)"
        )
    try:
        known = CONFIG_MAPPING[kind]
        config = known.from_dict({name: value for name, value in hf.items() if name != "architectures"})
    except (KeyError, TypeError, ValueError, AttributeError, StrictDataclassError) as error:
        raise StartError(f"{names} is not supported, nor does transformers know its config.json: {error}") from None
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = [one for one in (classes if isinstance(classes, tuple) else (classes,)) if one is not None]
    model_class = next((one for one in named if one.__name__ in (hf.get("architectures") or [])), None)
    if model_class is None:
        raise StartError(f"{names} is not supported, and transformers has no causal language model for it")
    _check(config, hf, model_class.__name__)
    _check_lengths(config, model_class.__name__, max_model_len)
    return config, model_class


def _check(config: PretrainedConfig, hf: Mapping[str, Any], name: str) -> None:
    values = config.to_dict()
    if hf.get("auto_map"):
        raise StartError(f"{name}: {CODE}")
    if values.get("is_encoder_decoder") or values.get("add_cross_attention"):
        raise StartError(f"{name}: encoders and cross attention are not supported")
    if hf.get("quantization_config") or hf.get("compression_config"):
        raise StartError(f"{name}: quantized checkpoints are not supported by --model-impl transformers")
    if others := sorted(set(values.get("layer_types") or ()) - KINDS):
        raise StartError(f"{name}: layer_types names unsupported kinds: {', '.join(others)}")
    if values.get("alibi"):
        raise StartError(f"{name}: alibi is not supported by --model-impl transformers")


def _check_lengths(config: PretrainedConfig, name: str, max_model_len: int | None) -> None:
    """What a module does by length is served where it does nothing: chunks of attention (Llama 4), in contexts of one
    chunk, a temperature that grows with the position, which transformers counts from the beginning of a batch, and
    ropes whose angles depend on the longest row of a batch, up to the length from which they do."""
    values = config.to_dict()
    limits = {}
    if "chunked_attention" in (values.get("layer_types") or ()):
        limits["attention_chunk_size"] = int(values.get("attention_chunk_size") or 0)
    if values.get("attn_temperature_tuning"):
        limits["floor_scale"] = int(values.get("floor_scale") or 0) - 1
        config.attn_temperature_tuning = False
    rope = values.get("rope_parameters") or {}
    for entry in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if entry.get("rope_type") in BY_LENGTH:
            of_config = "max_position_embeddings", "original_max_position_embeddings"
            before = of_config[entry["rope_type"] == "longrope"]
            limits[before] = int(entry.get(before) or values.get(before) or values.get(of_config[0]) or 0)
            values[before] = limits[before]
    for attribute, most in limits.items():
        if max_model_len is None or max_model_len > most:
            raise StartError(
                f"{name}: {attribute} {values.get(attribute)} is supported by --model-impl transformers for contexts "
                f"of at most {most} tokens; give --max-model-len {most}"
            )
