"""A checkpoint directory and its config to a transformers model that is ready to be served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokserve.base.errors import StartError
from tokserve.families.hf.model import TransformersModel
from tokserve.layers.options import LayerOptions
from tokserve.layers.quant import GROUP
from tokserve.models import dummy, weights
from tokserve.models.load import DTYPES, quant_methods
from tokserve.models.registry import refuse_recurrent

logger = logging.getLogger(__name__)


def load_module(
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
    float8_cache: bool = False,
    admit: Callable[[int], object] = weights.admit_any,
) -> TransformersModel:
    """Load a checkpoint as `load_decoder` does.  Raises StartError, for what such a model cannot do as well."""
    refuse_recurrent(hf)
    if float8_cache:
        raise StartError("kv_cache_dtype fp8 is not supported by --model-impl transformers")
    if quantization_activations is not None and quantization not in ("int4", "int8"):
        raise StartError("option quantization_activations: needs integer weights; add --quantization int4 or int8")
    quant, head_quant = quant_methods(
        quantization, group_size, quantize_lm_head=quantize_lm_head, rounded=quantization_activations is not None
    )
    head_type = DTYPES[dtype if head_dtype == "auto" else head_dtype]
    model = TransformersModel(
        hf, LayerOptions(DTYPES[dtype], quant), LayerOptions(head_type, head_quant), max_model_len=max_model_len
    )
    parameters = model.parameters_by_name()
    if load_format == "dummy":
        admit(weights.least_bytes(parameters))
        weights.load_into(parameters, dummy.tensors(parameters, seed))
        model.provenance.set_generator(lambda: dummy.tensors(parameters, seed))
    else:
        catalogue = weights.catalogue(directory)
        stamp = weights.stamp(catalogue)
        model.adopt({name: entry.shape for name, entry in catalogue.items()})
        parameters = model.parameters_by_name()
        entries = weights.with_model_names(catalogue, model.spec.renames)
        entries = {name: entry for name, entry in entries.items() if name in parameters or not model.ignores(name)}
        for name, buffer in model.buffers.items():
            if name in entries:
                buffer.copy_(weights.read_tensor(entries.pop(name)))
        weights.check_names(entries, parameters, str(directory))
        admit(weights.least_bytes({name: parameters[name] for name in entries}))
        weights.load_into(parameters, weights.stream(entries, mapped=True))
        model.provenance.add_files({entry.key: entry for entry in entries.values()}, stamp)
    model.probe()
    logger.warning(
        "%s is served through transformers' module, with its own torch code between our projections and attention, "
        "so bits are not promised (exact: false)",
        type(model.module).__name__,
    )
    return model
