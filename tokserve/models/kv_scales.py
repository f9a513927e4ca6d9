"""The scales of a float8 KV cache that come with weights: their names, and the layers that they belong to.

A key is stored divided by its layer's k_scale, a value by its v_scale: calibration chooses them so that the stored
numbers fill float8's range.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokserve.base.errors import StartError
from tokserve.models.decoder import Decoder
from tokserve.models.formats import CACHE_SCALES


def names(layers: int) -> dict[str, tuple[int, str]]:
    """Every name that such a scale can have in a model of so many layers -> its layer; "k", "v" or "kv"."""
    return {
        f"model.layers.{layer}{ending}": (layer, tensors)
        for layer in range(layers)
        for ending, tensors in CACHE_SCALES.items()
    }


def refusal(quantization: Mapping[str, Any] | None) -> str | None:
    """Why the KV cache that config.json's quantization entry describes is not float8 with scales; None if it is."""
    scheme = (quantization or {}).get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return None
    kind, bits = scheme.get("type", "float"), scheme.get("num_bits", 8)
    if (kind, bits) != ("float", 8):
        return f"asks for a KV cache of type {kind!r} with {bits} bits"
    return None if scheme.get("symmetric", True) else "asks for a KV cache with zero points"


def apply(decoder: Decoder, scales: Mapping[str, Tensor]) -> None:
    """Set the layers' scales; a layer without one gets 1.  Raises StartError for scales that cannot be used."""
    known = names(len(decoder.spec.blocks))
    values: dict[int, dict[str, float]] = defaultdict(dict)
    problems = []
    for name, tensor in scales.items():
        layer, tensors = known[name]
        if tensor.numel() != 1:
            problems.append(f"{name} is of shape {list(tensor.shape)}, but a layer can have one number only")
            continue
        value = float(tensor)
        if not 0.0 < value < math.inf:
            problems.append(f"{name} is {value}, not a positive number")
        elif any(values[layer].get(key, value) != value for key in tensors):
            problems.append(f"{name} is {value}, and another name gives {values[layer]}")
        values[layer] |= dict.fromkeys(tensors, value)
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise StartError(
            f"these scales of a float8 KV cache cannot be used (kv_cache_dtype auto needs none): "
            f"{'; '.join(problems[:3])}{more}"
        )
    for layer, block in zip(decoder.numbers, decoder.blocks, strict=True):
        block.attention.scale_cache(values[layer].get("k", 1.0), values[layer].get("v", 1.0))
