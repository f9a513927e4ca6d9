"""The control routes of training frameworks."""

from __future__ import annotations

from tokserve import admin
from tokserve.server.admin.commands import CommandRoute, load_lora_adapter
from tokserve.server.reply_types import AdapterReply, Success
from tokserve.server.trainers import areal, prime_rl

ROUTES = (
    CommandRoute("/areal_pause_generation", areal.pause, None, Success),
    CommandRoute("/areal_continue_generation", areal.resume, None, Success),
    CommandRoute("/areal_update_weights", areal.update_weights, areal.ArealUpdateBody, Success),
    CommandRoute("/areal_update_weights_lora", areal.update_adapter, areal.ArealAdapterBody, Success),
    CommandRoute("/areal_init_weights_update_group", areal.join_group, areal.ArealGroupBody, Success),
    CommandRoute("/areal_set_update_weight_meta", areal.announce, areal.ArealMetaBody, Success),
    CommandRoute("/areal_update_weights_xccl", areal.receive, None, Success),
    CommandRoute("/areal_set_update_weight_meta_lora", areal.refuse_adapter_tensors, None, None),
    CommandRoute("/areal_update_weights_lora_xccl", areal.refuse_adapter_tensors, None, None),
    CommandRoute("/init_broadcaster", prime_rl.init_broadcaster, None, None),
    CommandRoute("/skyrl/v1/load_lora_adapter", load_lora_adapter, admin.LoadAdapter, AdapterReply),
)
