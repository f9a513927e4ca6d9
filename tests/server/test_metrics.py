"""/metrics: names, values from the engine's statistics, histograms of finished requests."""

import asyncio
import re
import time

import msgspec
import pytest

from tests.server.scripted_llm import TOKEN_SECONDS, WAIT_SECONDS, says
from tests.server.site import Site, site
from tokserve.client.outputs import EngineReport, Status, StepStats
from tokserve.features.observe.metrics import SAMPLED
from tokserve.features.observe.observers import metrics_of
from tokserve.server.compat import VLLM_METRICS
from tokserve.server.http.loop_monitor import LoopMonitor

NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_aborts_total",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "num_requests_waiting_by_reason",
    "cache_config_info",
    "request_inference_time_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "event_loop_lag_seconds_bucket",
    "event_loop_stall_seconds_bucket",
    "stream_serialization_seconds_bucket",
    "http_requests_in_flight",
]


def values(s: Site) -> dict[str, float]:
    """Name with labels (but the model's) -> value."""
    return parse(s.get("/metrics").text)


def parse(text: str) -> dict[str, float]:
    results = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            rest = re.sub(r'engine="0",?|,?model_name="tiny"', "", name)
            results[rest.replace("{,", "{").replace("{}", "")] = float(value)
    return results


def test_metrics_exist_before_the_first_request() -> None:
    seen = {name.partition("{")[0] for name in values(site())}
    assert {f"tokserve:{name}" for name in NAMES} <= seen


def test_content_type_is_prometheus() -> None:
    assert site().get("/metrics").headers["content-type"].startswith("text/plain; version=")


def test_the_engines_statistics() -> None:
    s = site()
    s.llm.stats = StepStats(
        2,
        3,
        16,
        8,
        64,
        100,
        4,
        1000,
        500,
        800,
        200,
        1,
        deferred=1,
        stalled=13,
        displaced=21,
        rooms={
            "grammar_bytes": 77,
            "grammars_compiling": 6,
            "grammar_refusals": 9,
            "clients": 5,
            "snapshots": 12,
            "attention_keys": 900,
            "shared_attention_keys": 700,
            "session_blocks": 31,
            "session_hits": 640,
        },
    )
    actual = values(s)
    assert actual["tokserve:num_requests_running"] == 2 and actual["tokserve:num_requests_waiting"] == 3
    assert actual["tokserve:kv_cache_usage_perc"] == 0.25 and actual["tokserve:num_preemptions_total"] == 4
    assert actual["tokserve:prompt_tokens_total"] == 1000 and actual["tokserve:generation_tokens_total"] == 500
    assert actual["tokserve:prefix_cache_queries_total"] == 800 and actual["tokserve:prefix_cache_hits_total"] == 200
    assert actual["tokserve:nan_requests_total"] == 1
    assert actual["tokserve:grammar_cache_bytes"] == 77 and actual["tokserve:grammars_compiling"] == 6
    assert actual["tokserve:grammar_refusals_total"] == 9
    assert actual["tokserve:recurrent_state_snapshots"] == 12 and actual["tokserve:recurrent_state_bytes"] == 0
    assert actual["tokserve:clients"] == 5 and actual["tokserve:num_requests_stalled"] == 13
    assert actual["tokserve:displaced_requests_total"] == 21
    assert actual["tokserve:session_blocks"] == 31 and actual["tokserve:session_cache_hits_total"] == 640
    assert actual["tokserve:attention_keys_total"] == 900 and actual["tokserve:shared_attention_keys_total"] == 700
    assert actual['tokserve:num_requests_waiting_by_reason{reason="capacity"}'] == 2
    assert actual['tokserve:num_requests_waiting_by_reason{reason="deferred"}'] == 1


def test_each_engine_has_its_own_samples_and_the_front_end_sums() -> None:
    s = site()
    s.llm.stats = StepStats(
        running=2, blocks_held=16, blocks_total=64, output_tokens=50, rooms={"accepted_by_position": [4]}
    )
    second = StepStats(
        running=1,
        blocks_held=48,
        blocks_total=64,
        output_tokens=20,
        preemptions=3,
        rooms={"kv_store": {"saved": 7, "hits": 5}, "drafts_by_source": {"prompt": (6, 2)}},
    )
    ready = msgspec.structs.replace(s.llm.ready, num_blocks=32)
    s.llm.other_engines = [
        EngineReport(1, second, Status(state="paused", epoch=9), ready),
        EngineReport(2, StepStats(), Status(), None, down=True),
    ]
    s.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}})
    samples: dict[str, dict[str, float]] = {}
    for line in s.get("/metrics").text.splitlines():
        if sample := re.match(r"(vllm|tokserve):(\w+)\{(.*)\} (.*)$", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', sample[3]))
            assert labels.pop("model_name") == "tiny"
            rank = labels.pop("engine")
            name = ",".join([sample[2], *(value for label, value in labels.items() if label != "num_gpu_blocks")])
            samples.setdefault(name, {})[rank] = float(sample[4])
    for name, of_engines in (
        ("num_requests_running", [2, 1, 0]),
        ("kv_cache_usage_perc", [0.25, 0.75, 0]),
        ("generation_tokens_total", [50, 20, 0]),
        ("num_preemptions_total", [0, 3, 0]),
        ("weight_epoch", [0, 9, 0]),
        ("engine_state,running", [1, 0, 0]),
        ("engine_state,paused", [0, 1, 0]),
        ("external_prefix_cache_hits_total", [0, 5, 0]),
        ("kv_store_operations_total,saved", [0, 7, 0]),
    ):
        assert samples[name] == {str(rank): value for rank, value in enumerate(of_engines)}, name
    assert samples["spec_decode_num_accepted_tokens_per_pos_total,0"] == {"0": 4}
    assert samples["spec_decode_num_draft_tokens_by_source_total,prompt"] == {"1": 6}
    assert samples["request_success_total,length"] == samples["e2e_request_latency_seconds_count"] == {"0": 1}
    shown = s.get("/metrics").text
    assert dict(re.findall(r'^vllm:cache_config_info\{.*engine="(\d)".*num_gpu_blocks="(\d+)"', shown, re.M)) == {
        "0": "1024",
        "1": "32",
    }


def test_a_finished_request_is_observed_once_per_choice() -> None:
    s = site()
    s.post("/inference/v1/generate", {"token_ids": [5, 6, 8], "sampling_params": {"max_tokens": 11, "n": 2}})
    actual = values(s)
    assert actual['tokserve:request_success_total{finished_reason="length"}'] == 2
    assert actual["tokserve:time_to_first_token_seconds_count"] == 2
    assert actual["tokserve:time_to_first_token_seconds_sum"] == 2 * TOKEN_SECONDS
    assert actual["tokserve:e2e_request_latency_seconds_sum"] == 2 * 11 * TOKEN_SECONDS
    assert actual["tokserve:inter_token_latency_seconds_count"] == 20  # 10 pauses in each of two choices
    assert actual["tokserve:inter_token_latency_seconds_sum"] == 20 * TOKEN_SECONDS
    assert actual['tokserve:inter_token_latency_seconds_bucket{le="0.25"}'] == 20
    assert actual['tokserve:inter_token_latency_seconds_bucket{le="0.1"}'] == 0
    assert actual["tokserve:request_time_per_output_token_seconds_count"] == 2
    assert actual["tokserve:request_inference_time_seconds_sum"] == 2 * (11 * TOKEN_SECONDS - WAIT_SECONDS)
    assert actual["tokserve:request_generation_tokens_sum"] == 22 and actual["tokserve:request_prompt_tokens_sum"] == 6
    assert actual["tokserve:request_params_n_sum"] == 2 and actual["tokserve:request_params_max_tokens_sum"] == 11


def test_streams_and_text_routes_count_too() -> None:
    s = site(says("ab"))
    s.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    s.post("/v1/completions", {"prompt": ["a", "b"]})
    assert values(s)['tokserve:request_success_total{finished_reason="stop"}'] == 3


def test_a_prompt_that_is_only_scored_has_times_and_no_tokens() -> None:
    s = site()
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 0}
    assert s.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 0
    actual = values(s)
    assert actual["tokserve:request_generation_tokens_sum"] == actual["tokserve:inter_token_latency_seconds_count"] == 0
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_inference_time"):
        assert actual[f"tokserve:{name}_seconds_count"] == 1


def test_two_apps_do_not_share_counters() -> None:
    first, second = site(), site()
    first.post("/v1/completions", {"prompt": "a"})
    assert values(second)['tokserve:request_success_total{finished_reason="length"}'] == 0


def test_the_labels_that_routers_read() -> None:
    """The labels are written as vLLM writes them; the sample below is from a vLLM server."""
    shown = site(enable_prefix_caching=True).get("/metrics").text
    (config,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1\.0$", shown, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', config))
    expected = {
        "block_size": "16",
        "enable_prefix_caching": "True",
        "engine": "0",
        "gpu_memory_utilization": "0.9",
        "num_gpu_blocks": "1024",
        "kv_cache_size_tokens": "16384",
    }
    assert labels.items() >= expected.items()
    for line in (
        'num_requests_running{engine="0",model_name="tiny"} 0.0',
        'num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 0.0',
        'request_success_total{engine="0",finished_reason="length",model_name="tiny"} 0.0',
        'inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="tiny"} 0.0',
        'prefix_cache_queries_total{engine="0",model_name="tiny"} 0.0',
    ):
        assert f"\nvllm:{line}\n" in shown and f"\ntokserve:{line}\n" in shown


def test_vllms_names_are_exported_by_default_and_only_those_it_has() -> None:
    assert "vllm:" not in site(vllm_metric_names=False).get("/metrics").text
    s = site()
    s.post("/v1/completions", {"prompt": "a"})
    shown = s.get("/metrics").text
    families = set(re.findall(r"^# TYPE vllm:(\w+) ", shown, re.MULTILINE))
    assert {name.removesuffix("_total") for name in families} == {name.removesuffix("_total") for name in VLLM_METRICS}
    for line in shown.splitlines():
        if line.startswith("vllm:"):
            assert line.replace("vllm:", "tokserve:", 1) in shown


def test_requests_in_flight_are_a_gauge() -> None:
    s = site()
    metrics_of(s.app.state.serving).started()
    assert values(s)["tokserve:http_requests_in_flight"] == 1
    metrics_of(s.app.state.serving).closed()
    assert values(s)["tokserve:http_requests_in_flight"] == 0


def test_one_stream_in_many_has_its_serialization_timed() -> None:
    s = site(says("abc"))
    for _ in range(SAMPLED + 1):
        s.events("/inference/v1/generate", {"token_ids": [5]})
    assert values(s)["tokserve:stream_serialization_seconds_count"] == 2 * 4


def test_a_blocked_event_loop_shows() -> None:
    s = site()

    async def block() -> None:
        watching = asyncio.create_task(LoopMonitor(metrics_of(s.app.state.serving).observe_lag, 0.01).watch())
        await asyncio.sleep(0)
        time.sleep(0.2)
        while not values_now()["tokserve:event_loop_stall_seconds_count"]:
            await asyncio.sleep(0.001)
        watching.cancel()

    def values_now() -> dict[str, float]:
        return parse(metrics_of(s.app.state.serving).render().decode())

    asyncio.run(block())
    assert values(s)["tokserve:event_loop_lag_seconds_sum"] > 0.15
    assert values(s)["tokserve:event_loop_stall_seconds_sum"] > 0.15


def test_tokens_of_steps_and_preemptions_of_choices_are_histograms() -> None:
    """peer-suites-3 A22."""
    s = site()
    s.post("/v1/completions", {"prompt": [5] * 20, "max_tokens": 3, "n": 2})
    shown = s.get("/metrics").text
    at = 'engine="0",'
    steps = float(re.findall(r"^tokserve:engine_steps_total{.*} (.*)$", shown, re.MULTILINE)[0])
    for line in (
        f'request_num_preemptions_bucket{{{at}le="1.0",model_name="tiny"}} 2.0',
        f'request_num_preemptions_bucket{{{at}le="+Inf",model_name="tiny"}} 2.0',
        f'request_num_preemptions_count{{{at}model_name="tiny"}} 2.0',
        f'request_num_preemptions_sum{{{at}model_name="tiny"}} 0.0',
        f'iteration_tokens_total_bucket{{{at}le="16384.0",model_name="tiny"}} {steps}',
        f'iteration_tokens_total_count{{{at}model_name="tiny"}} {steps}',
    ):
        assert f"\nvllm:{line}\n" in shown and f"\ntokserve:{line}\n" in shown, line
    buckets = re.findall(r'^vllm:iteration_tokens_total_bucket{engine="0",le="(.*?)".* (.*)$', shown, re.MULTILINE)
    assert [bound for bound, _ in buckets] == ["1.0", "8.0", *(str(float(16 << i)) for i in range(11)), "+Inf"]
    assert float(dict(buckets)["8.0"]) < steps, "the prompts were computed in larger steps"
    total = float(re.findall(r"^vllm:iteration_tokens_total_sum{.*} (.*)$", shown, re.MULTILINE)[0])
    assert total >= 20 + 2 * 2


@pytest.mark.parametrize(
    ("option", "reason"),
    [("max_queued_requests", "max_num_queued_reqs"), ("max_queued_tokens", "max_num_queued_tokens")],
)
def test_refusals_of_a_full_queue_are_counted_by_its_limit(option: str, reason: str) -> None:
    """peer-suites-3 A22."""
    s = site(max_num_seqs=1, **{option: 1})
    assert s.post("/v1/completions", {"prompt": [5, 6], "n": 4}).status_code == 429
    shown = s.get("/metrics").text
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        line = f'admission_rejections_total{{engine="0",model_name="tiny",reason="{name}"}} {float(name == reason)}'
        assert f"\nvllm:{line}\n" in shown, name
