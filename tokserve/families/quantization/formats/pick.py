"""Which `CheckpointFormat` a config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.base.rooms import part
from tokserve.families.quantization.formats import float8, integers, mxfp4
from tokserve.models.config_reader import ConfigReader
from tokserve.models.formats import ATTRIBUTES, DENSE, CheckpointFormat, quantization_of


def checkpoint_format(hf: Mapping[str, Any]) -> CheckpointFormat:
    """The format of that checkpoint; of one that is not supported, `DENSE`."""
    quantization = quantization_of(hf)
    if quantization is None or _refusal(quantization):
        return DENSE
    if quantization["quant_method"] == "gguf":
        gguf: CheckpointFormat = part("gguf", "format")()
        return gguf
    if mxfp4.describes(quantization):
        return mxfp4.Mxfp4Format()
    if (packed := integers.packed_format(quantization)) is not None:
        return packed
    block = float8.block(quantization)
    return DENSE if block is None else float8.Float8Format(block)


def refuse_unsupported(fields: ConfigReader) -> None:
    """Raise StartError if the checkpoint is quantized in a way that cannot be read."""
    for name in ATTRIBUTES:
        if fields.present(name) and (problem := _refusal(fields.values[name])):
            raise fields.refuse(
                name,
                f"{problem}; supported are quantized checkpoints with float8 (e4m3), MXFP4 (gpt-oss) or integer "
                "weights (GPTQ, AWQ, compressed-tensors); an unquantized one can be quantized as it loads: "
                "--quantization int8",
            )


def _transforms(quantization: Mapping[str, Any]) -> list[str]:
    """Where compressed-tensors transforms activations, queries and keys as the model runs.  Transforms of weights are
    in the weights."""
    places = set[str]()
    config = quantization.get("transform_config")
    schemes = config.get("config_groups") if isinstance(config, dict) else None
    for scheme in schemes.values() if isinstance(schemes, dict) else ():
        for one in (scheme.get("apply") if isinstance(scheme, dict) else None) or ():
            places.add(str(one.get("location") if isinstance(one, dict) else one))
    return sorted(place for place in places if not place.startswith("weight_"))


def _refusal(quantization: Any) -> str | None:
    if not isinstance(quantization, dict):
        return "is not an object"
    if quantization.get("quant_method") == "gguf" or mxfp4.describes(quantization):
        return None
    if transforms := _transforms(quantization):
        return f"asks for transforms (transform_config) at {', '.join(transforms)}"
    return integers.refusal(quantization) if integers.describes(quantization) else float8.refusal(quantization)
