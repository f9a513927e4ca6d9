"""The parameters of a KV transfer between two servers, as vLLM's requests and replies carry them (docs/scale.md)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokserve.base.errors import RequestError, mistyped

FIELD = "kv_transfer_params"
MAX_BLOCKS = 1 << 20

Name = Annotated[str, Meta(max_length=256)]
Blocks = Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]], Meta(max_length=MAX_BLOCKS)]
Size = Annotated[int, Meta(ge=1, le=1 << 16)]


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to do with a request's KV.

    `do_remote_decode`: another server goes on with it, so keep it.  `do_remote_prefill`: another server has computed
    the prompt; the fields `remote_*` say where its blocks are, `remote_block_ids` a list per KV group, and until when
    (Unix time).  `remote_identity`: an addition, what the KV depends on besides the prompt, as digests by name.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    remote_block_ids: Annotated[list[Blocks], Meta(max_length=64)] | None = None
    remote_host: Name | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    remote_num_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    remote_blocks_expiry_time: float | None = None
    remote_registration_generation: int | Name | None = None
    tp_size: Size | None = None
    dcp_size: Size | None = None
    pp_size: Size | None = None
    transfer_mode: Name | None = None
    remote_identity: Annotated[dict[Name, Name], Meta(max_length=32)] | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the first KV group."""
        return len(self.remote_block_ids[0]) if self.remote_block_ids else 0


def transfer_params(value: Any) -> KVTransferParams:
    """The parameters in a body's object.  Fields that are not known are ignored, since routers add some.  Raises
    RequestError, naming the field."""
    if not isinstance(value, dict):
        raise RequestError(f"{FIELD} must be an object, got {type(value).__name__}", field=FIELD)
    if len(value) > 64:
        raise RequestError(f"{FIELD} must have at most 64 fields, got {len(value)}", field=FIELD)
    try:
        params = msgspec.convert(value, KVTransferParams)
    except msgspec.ValidationError as error:
        raise mistyped(error, FIELD) from None
    if params.do_remote_decode and params.do_remote_prefill:
        raise RequestError(
            f"{FIELD}.do_remote_prefill and do_remote_decode exclude each other", field=f"{FIELD}.do_remote_prefill"
        )
    return params
