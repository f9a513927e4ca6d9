"""The load of the engines in a header of the reply, for gateways that choose a server by it.

ORCA's load report (https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto) in its forms for HTTP
headers, with the metrics that vLLM reports.
"""

from __future__ import annotations

from starlette.requests import Request

from tokserve.client.async_llm import AsyncLLM
from tokserve.server.http.body import encode_json

REQUESTED = "endpoint-load-metrics-format"
REPORTED = "endpoint-load-metrics"


def reply_headers(request: Request, llm: AsyncLLM) -> dict[str, str]:
    """The header, where the request asks for it in a form that is known."""
    load = load_header(request, llm)
    return {REPORTED: load} if load else {}


def load_header(request: Request, llm: AsyncLLM) -> str | None:
    """The header's value in the form that the request names, TEXT or JSON; None: in no other form."""
    form = request.headers.get(REQUESTED, "").strip().upper()
    if form not in ("TEXT", "JSON"):
        return None
    stats = llm.stats
    metrics = {
        "kv_cache_usage_perc": stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0,
        "num_requests_waiting": float(stats.waiting),
    }
    if form == "JSON":
        return f"JSON {encode_json({'named_metrics': metrics}).decode()}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
