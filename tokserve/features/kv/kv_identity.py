"""What KV depends on besides tokens, adapter and salt: two servers with equal parts compute and store equal pages.

The parts are named, so that an error can say which of them differs.
"""

from __future__ import annotations

import hashlib
from typing import Any

from tokserve import __version__
from tokserve.config import Config
from tokserve.models.decoder import Decoder
from tokserve.models.in_place import tensors_of
from tokserve.protocol.kv_spec import KVLayout
from tokserve.rl.digests import checksum
from tokserve.runner import device

ROPE_ROWS = 64  # of a rope table: its length is that of the longest context, which KV does not depend on


def _digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def weights_digest(model: Decoder) -> str:
    """A digest of all tensors of the model as they lie in memory, adapters apart."""
    digest = hashlib.sha256()
    for path, tensor in sorted(tensors_of(model), key=lambda entry: entry[0]):
        if ".lora" in path:
            continue
        rows = tensor[:ROPE_ROWS] if "rope_tables" in path else tensor
        digest.update(f"{path} {checksum(rows)}\n".encode())
    return digest.hexdigest()


def identity_parts(model: Decoder, layout: KVLayout, config: Config, facts: dict[str, Any]) -> dict[str, str]:
    """The parts by name.  `facts`: of the start, with the bound ops and their arithmetic."""
    draft = config.speculation.resolved().model
    parallel = config.parallel
    home = next(tensor.device for _, tensor in tensors_of(model))
    return {
        "version": __version__,
        "model": _digest(model.spec, model.implementation, model.quantization, draft),
        "weights": weights_digest(model),
        "layout": _digest(layout.specs, layout.block_size),
        "arithmetic": _digest(
            facts["ops"],
            facts["kernels"],
            facts["arithmetic"],
            facts["exact"],
            config.model.dtype,
            *device.gpu_and_compiler(home),
        ),
        "parallel": "1"
        if parallel.num_ranks == 1
        else f"{parallel.tensor_parallel_size} ranks of each of {parallel.pipeline_parallel_size} stages",
    }
