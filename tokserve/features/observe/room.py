"""What the room of metrics, logs and pages adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    endpoints="tokserve.features.observe.routes:ENDPOINTS",
    observers="tokserve.features.observe.observers:ServerObservers",
    engine="tokserve.features.observe.runner_totals:RunnerTotals",
    metrics="tokserve.features.observe.runner_metrics:METRICS",
    runner="tokserve.features.observe.attention_keys:make",
    parts={"tracing": "tokserve.features.observe.tracing:Tracing"},
    headers="tokserve.features.observe.load_header:reply_headers",
)
