"""The metrics of what the runner of a process counts.  Imports nothing of the runner: the server exports them."""

from __future__ import annotations

from tokserve.protocol.engine_metric import EngineMetric, reported

METRICS = (
    EngineMetric(
        "counter",
        "attention_keys",
        "Keys that requests' attention needed on a CPU, in the layers of one rank.",
        reported("attention_keys"),
    ),
    EngineMetric(
        "counter",
        "shared_attention_keys",
        "Those of the keys that were read for another request of the step anyway.",
        reported("shared_attention_keys"),
    ),
)
