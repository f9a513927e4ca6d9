"""SGLang's /load_lora_adapter_from_tensors, as the engine's transaction.

There the tensors are a pickle in base64, which is refused here by name.  What is taken in its place: a safetensors file
in base64, or a flattened bucket as JSON (the bytes of all tensors, and where each one begins and ends).
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.dialects.sglang.control import loaded_adapters
from tokserve.dialects.sglang.replies import json, read_body
from tokserve.features.weights import open_updates
from tokserve.server.http import errors, workers
from tokserve.server.serving import Serving

FORMATS = (None, "safetensors", "flattened_bucket")
PICKLE = b"\x80"  # that a pickle of protocol 2 and more begins with
ZIP = b"PK"  # and a file of torch.save
# of torch's dtypes in safetensors
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class BucketEntry(msgspec.Struct):
    """A tensor of a bucket: the bytes from `start_idx` to `end_idx`."""

    name: str
    shape: list[int]
    dtype: str
    start_idx: int
    end_idx: int


class FlattenedBucket(msgspec.Struct):
    """`flattened_tensor`: the bytes of all tensors in base64."""

    flattened_tensor: str
    metadata: list[BucketEntry]


class AdapterTensorsBody(msgspec.Struct):
    """An adapter's configuration and tensors.  A list has the same for each rank; the first is taken.  `pinned` and
    `lora_id` are ignored."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_tensors: str | FlattenedBucket | list[str] | None = None
    serialized_named_tensors: str | FlattenedBucket | list[str] | None = None
    load_format: str | None = None
    pinned: bool = False
    lora_id: str | None = None
    added_tokens_config: dict[str, Any] | None = None
    expected_checksums: Any = None


async def load_adapter_tensors(serving: Serving, request: Request) -> Response:
    """POST /load_lora_adapter_from_tensors: load an adapter from tensors in the body"""
    params, headers = await read_body(serving, request, AdapterTensorsBody)
    errors.refuse_unsupported("added_tokens_config", params.added_tokens_config)
    errors.refuse_unsupported("expected_checksums", params.expected_checksums)
    if params.load_format not in FORMATS:
        raise invalid("load_format", "must be safetensors or flattened_bucket")
    field = "serialized_tensors" if params.serialized_named_tensors is None else "serialized_named_tensors"
    tensors = getattr(params, field)
    if isinstance(tensors, list):
        tensors = tensors[0] if tensors else None
    if tensors is None:
        raise RequestError("serialized_tensors is missing", field="serialized_tensors")
    file = await workers.run(workers.SMALL, lambda: _file_of(tensors, field))
    with errors.named_as({"lora_config": "config_dict"}):
        await open_updates.push_adapter(
            serving.llm,
            params.lora_name,
            params.config_dict,
            lambda update_id: open_updates.send_file(serving.llm, file, update_id),
        )
    message = f"LoRA adapter '{params.lora_name}' loaded"
    return json(await loaded_adapters(serving, message), headers)


def _file_of(tensors: str | FlattenedBucket, field: str) -> bytes:
    """A safetensors file.  Raises RequestError."""
    text = tensors if isinstance(tensors, str) else tensors.flattened_tensor
    try:
        content = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{field} is not base64", field=field) from None
    if isinstance(tensors, FlattenedBucket):
        return _packed(tensors.metadata, content, field)
    if content.startswith((PICKLE, ZIP)):
        raise RequestError(
            f"{field} is a pickle, and nothing is unpickled here: send a safetensors file in base64, a flattened "
            "bucket as JSON, or the file to POST /update_weights (docs/lora.md)",
            field=field,
            code="unsupported",
        )
    return content


def _packed(metadata: list[BucketEntry], content: bytes, field: str) -> bytes:
    """A bucket as a safetensors file, which has the same bytes after its header."""
    header: dict[str, Any] = {}
    for entry in metadata:
        dtype = DTYPES.get(entry.dtype.removeprefix("torch."))
        if dtype is None:
            raise RequestError(f"{field}.metadata: unsupported dtype {entry.dtype[:100]!r}", field=field)
        if entry.name in header:
            raise RequestError(f"{field}.metadata: {entry.name[:200]} was sent twice", field=field)
        offsets = [entry.start_idx, entry.end_idx]
        header[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": offsets}
    packed = msgspec.json.encode(header)
    return len(packed).to_bytes(8, "little") + packed + content
