"""The room of adapters: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.weights", "rl"),
    engine="tokserve.features.lora.commands:make",
    parts={"loads": "tokserve.features.lora.lora_requests:AdapterLoads"},
    loaded="tokserve.features.lora.adapter_slots:make_slots",
    runner="tokserve.features.lora.runner_feature:RunnerAdapters",
)
