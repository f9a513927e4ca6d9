"""Spans of requests, in an exporter in memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.server.scripted_llm import FORWARD_SECONDS, TOKEN_SECONDS, WAIT_SECONDS, ScriptedLLM, says
from tests.server.site import Site
from tokserve.base.errors import QueueFull
from tokserve.config import Config
from tokserve.features.observe.tracing import Tracing
from tokserve.server.app import build_app

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Traced:
    """A fake server and its spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        tracing = Tracing("tiny", "http://127.0.0.1:1/v1/traces", SimpleSpanProcessor(self._exporter))
        config = Config.make(served_model_name=["tiny"], generation_config="none", max_model_len=512)
        self.llm = ScriptedLLM(config, says("ab"))
        self.site = Site(self.llm, build_app(self.llm, config, trace=tracing.observe))  # type: ignore[arg-type]

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time and span.end_time
    return (span.end_time - span.start_time) / 1e9


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_span_for_the_request_and_one_for_each_phase() -> None:
    traced = Traced()
    body = {"token_ids": [5, 6], "request_id": "a", "sampling_params": {"max_tokens": 9}}
    traced.site.post("/inference/v1/generate", body, headers={"traceparent": PARENT})
    (root,) = traced.spans("llm_request")
    assert root.context.trace_id == 0x4BF92F3577B34DA6A3CE929D0E0E4736
    assert root.parent and root.parent.span_id == 0x00F067AA0BA902B7 and root.kind.name == "SERVER"
    values = attributes(root)
    assert values["gen_ai.request.id"] == "a" and values["gen_ai.request.model"] == "tiny"
    assert values["gen_ai.request.max_tokens"] == 9 and values["gen_ai.response.finish_reasons"] == ("stop",)
    assert (values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"]) == (2, 3)
    phases = [traced.spans(name)[0] for name in ("queue", "prefill", "decode")]
    assert [round(seconds(span), 6) for span in phases] == [WAIT_SECONDS, FORWARD_SECONDS, 2 * TOKEN_SECONDS]
    assert all(span.parent and span.parent.span_id == root.context.span_id for span in phases)
    assert phases[0].start_time == root.start_time
    assert all(a.end_time == b.start_time for a, b in pairwise(phases))


def test_streams_choices_and_requests_without_a_parent() -> None:
    traced = Traced()
    traced.site.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "secret"}], "n": 2})
    (root,) = traced.spans("llm_request")
    assert root.parent is None
    assert [attributes(span)["gen_ai.choice.index"] for span in traced.spans("decode")] == [0, 1]
    assert "secret" not in root.to_json()


def test_a_refused_request_is_an_error() -> None:
    traced = Traced()
    traced.llm.refuse = QueueFull("full", code="queue_full")
    traced.site.post("/v1/completions", {"prompt": "a"}, headers={"traceparent": "nonsense"})
    (root,) = traced.spans("llm_request")
    assert root.status.description == "queue_full" and attributes(root)["http.response.status_code"] == 429
    assert not traced.spans("queue")
