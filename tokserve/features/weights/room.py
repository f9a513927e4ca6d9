"""What the room of weight updates adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.lora", "rl"),
    endpoints="tokserve.features.weights.weight_routes:ENDPOINTS",
    parts={
        "checksum": "tokserve.rl.digests:checksum",
        "files": "tokserve.rl.weight_pairs:weight_files",
        "rank_sums": "tokserve.features.weights.rank_sums:RankSums",
        "pushes": "tokserve.features.weights.weight_pushes:WeightPushes",
    },
    runner="tokserve.features.weights.runner_feature:RunnerUpdates",
    engine="tokserve.features.weights.commands:make",
)
