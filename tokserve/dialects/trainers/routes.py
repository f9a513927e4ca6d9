"""The control routes of training frameworks, and those that are refused in a few words."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError
from tokserve.dialects.trainers import areal, nemo_rl, skyrl, worker_methods
from tokserve.protocol import commands
from tokserve.server.admin.commands import CommandRoute, WorkerCallBody, load_lora_adapter
from tokserve.server.endpoint import NEVER, Endpoint
from tokserve.server.reply_types import AdapterReply, Success, WorkerResults
from tokserve.server.serving import Serving
from tokserve.server.tokens.generate_body import GenerateBody
from tokserve.server.tokens.generate_reply import GenerateReply


async def init_broadcaster(serving: Serving, request: Request) -> Response:
    """POST /init_broadcaster: refused; the error names the setting to use instead"""
    # After a 404 prime-rl would go on without a broadcast, and fail at the first update.
    raise RequestError(
        "prime-rl's NCCL broadcast needs a CUDA device at both ends and sends pickles: set the trainer's and the "
        'orchestrator\'s weight_broadcast.type to "filesystem", which this server reads',
        code="unsupported",
    )


async def start_draft_weight_update(serving: Serving, request: Request) -> Response:
    """POST /start_draft_weight_update: refused; the error says what happens to drafts"""
    raise RequestError(
        "the weights of a draft model are not updated while the server runs: drafts are verified, so old ones cost "
        "speed and change no token. With --spec-method self-int8 or self-int4 the draft model follows every update",
        code="unsupported",
    )


_COMMANDS = (
    CommandRoute("/start_draft_weight_update", start_draft_weight_update, None, None),
    CommandRoute("/collective_rpc", worker_methods.collective_rpc, WorkerCallBody, WorkerResults),
    CommandRoute("/areal_pause_generation", areal.pause, None, Success),
    CommandRoute("/areal_continue_generation", areal.resume, None, Success),
    CommandRoute("/areal_update_weights", areal.update_weights, areal.ArealUpdateBody, Success),
    CommandRoute("/areal_update_weights_lora", areal.update_adapter, areal.ArealAdapterBody, Success),
    CommandRoute("/areal_init_weights_update_group", areal.join_group, areal.ArealGroupBody, Success),
    CommandRoute("/areal_set_update_weight_meta", areal.announce, areal.ArealMetaBody, Success),
    CommandRoute("/areal_update_weights_xccl", areal.receive_tensors, None, Success),
    CommandRoute("/areal_set_update_weight_meta_lora", areal.announce_adapter, areal.ArealAdapterMetaBody, Success),
    CommandRoute("/areal_update_weights_lora_xccl", areal.receive_adapter, areal.ArealAdapterMetaBody, Success),
    CommandRoute("/init_broadcaster", init_broadcaster, None, None),
    CommandRoute("/skyrl/v1/load_lora_adapter", load_lora_adapter, commands.LoadAdapter, AdapterReply),
)
ENDPOINTS = (
    Endpoint(
        ("POST",), "/skyrl/v1/generate", skyrl.generate_rollouts, GenerateBody, reply=GenerateReply, runner="generate"
    ),
    Endpoint(
        ("GET",),
        "/v1/nemo-rl/prefix-token-capability",
        nemo_rl.prefix_capability,
        reply=nemo_rl.PrefixCapability,
        raises=NEVER,
    ),
    *(
        Endpoint(("POST",), route.path, route.handler, route.body, control=True, reply=route.reply)
        for route in _COMMANDS
    ),
)
