"""/metrics: names, values from the engine's statistics, histograms of finished requests."""

import re

from tests.server.fake_llm import Site, says, site
from tokserve.client.outputs import StepStats

NAMES = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_aborts_total", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_params_n_bucket", "request_params_max_tokens_bucket",
]  # fmt: skip


def values(s: Site) -> dict[str, float]:
    """Name with labels (but the model's) -> value."""
    found = {}
    for line in s.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[re.sub(r',?model_name="tiny"|\{model_name="tiny"\}', "", name).replace("{}", "")] = float(value)
    return found


def test_all_names_are_there_before_the_first_request() -> None:
    seen = {name.partition("{")[0] for name in values(site())}
    assert {f"tokserve:{name}" for name in NAMES} <= seen


def test_content_type_is_prometheus() -> None:
    assert site().get("/metrics").headers["content-type"].startswith("text/plain; version=")


def test_the_engines_statistics() -> None:
    s = site()
    s.llm.stats = StepStats(2, 3, 16, 8, 64, 100, 4, 1000, 500, 800, 200, 1)
    found = values(s)
    assert found["tokserve:num_requests_running"] == 2 and found["tokserve:num_requests_waiting"] == 3
    assert found["tokserve:kv_cache_usage_perc"] == 0.25 and found["tokserve:num_preemptions_total"] == 4
    assert found["tokserve:prompt_tokens_total"] == 1000 and found["tokserve:generation_tokens_total"] == 500
    assert found["tokserve:prefix_cache_queries_total"] == 800 and found["tokserve:prefix_cache_hits_total"] == 200
    assert found["tokserve:nan_requests_total"] == 1


def test_a_finished_request_is_observed_once_per_choice() -> None:
    s = site()
    s.post("/inference/v1/generate", {"token_ids": [5, 6, 8], "sampling_params": {"max_tokens": 11, "n": 2}})
    found = values(s)
    assert found['tokserve:request_success_total{finished_reason="length"}'] == 2
    assert found["tokserve:time_to_first_token_seconds_count"] == 2
    assert found["tokserve:time_to_first_token_seconds_sum"] == 0.5
    assert found["tokserve:e2e_request_latency_seconds_sum"] == 2.5
    assert found["tokserve:inter_token_latency_seconds_count"] == 20  # 10 pauses in each of two choices
    assert abs(found["tokserve:inter_token_latency_seconds_sum"] - 2.0) < 1e-9
    assert found['tokserve:inter_token_latency_seconds_bucket{le="0.1"}'] == 20
    assert found['tokserve:inter_token_latency_seconds_bucket{le="0.08"}'] == 0
    assert found["tokserve:request_generation_tokens_sum"] == 22 and found["tokserve:request_prompt_tokens_sum"] == 6
    assert found["tokserve:request_params_n_sum"] == 2 and found["tokserve:request_params_max_tokens_sum"] == 11


def test_streams_and_text_routes_count_too() -> None:
    s = site(says("ab"))
    s.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    s.post("/v1/completions", {"prompt": ["a", "b"]})
    assert values(s)['tokserve:request_success_total{finished_reason="stop"}'] == 3


def test_two_apps_do_not_share_counters() -> None:
    first, second = site(), site()
    first.post("/v1/completions", {"prompt": "a"})
    assert values(second)['tokserve:request_success_total{finished_reason="length"}'] == 0
