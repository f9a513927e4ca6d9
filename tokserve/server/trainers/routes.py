"""The control routes of training frameworks: path, handler and body."""

from __future__ import annotations

import msgspec

from tokserve import admin
from tokserve.server.admin.commands import Handler, load_lora_adapter
from tokserve.server.trainers import areal, prime_rl

ROUTES: tuple[tuple[str, Handler, type[msgspec.Struct] | None], ...] = (
    ("/areal_pause_generation", areal.pause, None),
    ("/areal_continue_generation", areal.resume, None),
    ("/areal_update_weights", areal.update_weights, areal.ArealUpdateBody),
    ("/areal_update_weights_lora", areal.update_adapter, areal.ArealAdapterBody),
    ("/areal_init_weights_update_group", areal.join_group, areal.ArealGroupBody),
    ("/areal_set_update_weight_meta", areal.announce, areal.ArealMetaBody),
    ("/areal_update_weights_xccl", areal.receive, None),
    ("/areal_set_update_weight_meta_lora", areal.refuse_adapter_tensors, None),
    ("/areal_update_weights_lora_xccl", areal.refuse_adapter_tensors, None),
    ("/init_broadcaster", prime_rl.init_broadcaster, None),
    ("/skyrl/v1/load_lora_adapter", load_lora_adapter, admin.LoadAdapter),
)
