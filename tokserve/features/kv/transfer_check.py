"""Whether this server can do what a request's `kv_transfer_params` ask for, checked before the engine sees them."""

from __future__ import annotations

from typing import NoReturn

from tokserve.base.errors import RequestError
from tokserve.config import KVTransferPlan
from tokserve.protocol.columns import ValueSpec
from tokserve.protocol.kv_transfer import FIELD, KVTransferParams

SPECS = (ValueSpec("kv_transfer"),)  # what another server needs to go on with a request, in vLLM's words


def check_transfer(params: KVTransferParams, plan: KVTransferPlan | None, max_blocks: int) -> None:
    """Raise RequestError, naming the field.  `max_blocks`: of the KV cache."""
    if plan is None:
        raise RequestError(f"{FIELD} needs --kv-transfer-config", field=FIELD, code="unsupported")
    if params.do_remote_decode and not plan.produces:
        _refuse("do_remote_decode", "is not for a server with kv_role kv_consumer")
    if not params.do_remote_prefill:
        return
    if not plan.consumes:
        _refuse("do_remote_prefill", "is not for a server with kv_role kv_producer")
    if params.remote_block_ids is None:
        _refuse("remote_block_ids", "is needed with do_remote_prefill: a list of block ids per KV group")
    if len(params.remote_block_ids) != 1:
        _refuse(
            "remote_block_ids",
            f"must have one list, as this model has one KV group, got {len(params.remote_block_ids)}",
        )
    if params.num_blocks > max_blocks:
        _refuse("remote_block_ids", f"has {params.num_blocks} blocks, and the whole KV cache {max_blocks}")
    for name in ("tp_size", "dcp_size", "pp_size"):
        if getattr(params, name) not in (None, 1):
            _refuse(name, f"must be 1, got {getattr(params, name)}: both sides must have as many ranks")
    if params.transfer_mode not in (None, "pull"):
        _refuse("transfer_mode", f"must be pull, got {params.transfer_mode!r}")
    if plan.connector == "tcp":
        _check_peer(params, plan)
    elif params.remote_host is not None:
        _refuse("remote_host", "is for the connector tcp; this server's is shared-storage")


def _check_peer(params: KVTransferParams, plan: KVTransferPlan) -> None:
    for name in ("remote_host", "remote_port", "remote_engine_id", "remote_request_id"):
        if getattr(params, name) is None:
            _refuse(name, "is needed with do_remote_prefill")
    host, port = params.remote_host, params.remote_port
    if host not in plan.peers and f"{host}:{port}" not in plan.peers:
        _refuse("remote_host", f"{str(host)[:100]!r} with port {port} is not among this server's peers")


def _refuse(name: str, rule: str) -> NoReturn:
    raise RequestError(f"{FIELD}.{name} {rule}", field=f"{FIELD}.{name}")
