"""`ServerObservers`: the metrics of a server, and its request log."""

from __future__ import annotations

from starlette.requests import Request

from tokserve.base.errors import RequestError
from tokserve.features.observe.counters import SharedCounters
from tokserve.features.observe.metrics import Metrics
from tokserve.features.observe.request_log import RequestLog
from tokserve.server.observer import Observer, ServerObserver
from tokserve.server.serving import Serving


class ServerObservers(ServerObserver):
    """`serving.state_of(ServerObservers)` is a server's."""

    def __init__(self, serving: Serving) -> None:
        llm, config, process = serving.llm, serving.config, serving.api_process
        counters = SharedCounters(process.counters, process.index, config.server.api_server_count)
        self.metrics = Metrics(llm, config, serving.model.name, counters)
        self._logs = config.logs.log_requests
        if llm.images is not None:
            llm.images.pool.cache.on_lookup = self.metrics.image_lookup

    def observe(self, request: Request) -> list[Observer]:
        return [self.metrics, RequestLog()] if self._logs else [self.metrics]

    def unread(self, error: RequestError) -> None:
        if self._logs:
            RequestLog().refused(error)

    def lag(self, late: float) -> None:
        self.metrics.observe_lag(late)


def metrics_of(serving: Serving) -> Metrics:
    """The metrics of a server."""
    return serving.state_of(ServerObservers).metrics
