"""Options of what a server says about itself: its log, traces and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tokserve.config.common import FOR_EVER, about


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log, traces and metrics."""

    log_format: Annotated[Literal["text", "json"], about("Log lines for people, or a JSON object per line.")] = "text"
    log_requests: Annotated[
        bool, about("Log each request when it is accepted or refused and when it ends: counts and times, no prompts.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        about(
            "URL to send OpenTelemetry traces of requests to, as OTLP over HTTP (http://HOST:4318/v1/traces); needs "
            "the extra `otel`. Default: none are sent."
        ),
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about("Lowest level of log lines.")] = "info"
    log_stats_interval: Annotated[
        float, about("Seconds between the one-line statistics while requests run.", gt=0, le=FOR_EVER)
    ] = 10.0
    vllm_metric_names: Annotated[
        bool, about("Also export the metrics that vLLM has under its names (vllm:...), for its dashboards and routers.")
    ] = True
