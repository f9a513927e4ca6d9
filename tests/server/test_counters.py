"""The table that API processes count in."""

import os

from tests.server.scripted_llm import TOKEN_SECONDS, says
from tests.server.site import site
from tests.server.test_metrics import values
from tokserve.features.observe.counters import SharedCounters, create_shared_memory
from tokserve.features.observe.observers import metrics_of
from tokserve.protocol.messages import StepStats
from tokserve.server.api_process import ApiProcess


def test_rows_are_summed_and_outlive_their_writer() -> None:
    descriptor = create_shared_memory(3)
    first, last = (SharedCounters(descriptor, index, 3) for index in (0, 2))
    (a, b), (c, d) = ((block.allocate(2), block.allocate(3)) for block in (first, last))
    a.add(1)
    c.add(1, 2.5)
    b.add(2, 4)
    assert [a.total(1), c.total(1), d.total(2), d.total(0), a.total(0)] == [3.5, 3.5, 4.0, 0.0, 0.0]
    again = SharedCounters(descriptor, 2, 3)
    cells, _ = again.allocate(2), again.allocate(3)
    assert cells.total(1) == 3.5
    cells.clear()
    assert a.total(1) == 1.0 and d.total(2) == 4.0
    os.close(descriptor)
    assert d.total(2) == 4.0


def test_all_processes_show_the_sums_of_all() -> None:
    descriptor = create_shared_memory(2)
    sites = [site(says("ab"), api_process=ApiProcess(index, 123, descriptor), api_server_count=2) for index in range(2)]
    os.close(descriptor)
    for count, process in enumerate(sites, 1):
        process.llm.stats = StepStats()  # they have one engine
        for _ in range(count):
            process.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})
    shown = [values(process) for process in sites]
    assert shown[0] == shown[1]
    assert shown[0]['tokserve:request_success_total{finished_reason="stop"}'] == 12
    assert shown[0]["tokserve:e2e_request_latency_seconds_count"] == 12
    assert shown[0]["tokserve:e2e_request_latency_seconds_sum"] == 12 * 3 * TOKEN_SECONDS
    assert shown[0]['tokserve:request_params_n_bucket{le="2.0"}'] == 3
    assert [process.get("/server_info").json()["api_server"] for process in sites] == [0, 1]
    models = [process.get("/v1/models").json() for process in sites]
    assert models[0] == models[1] and models[0]["data"][0]["created"] == 123


def test_gauges_and_load_ask_the_engine_first() -> None:
    s = site()
    assert s.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}
    values(s)
    assert s.llm.num_refreshes == 2


def test_requests_in_flight_of_a_process_that_has_died_are_forgotten() -> None:
    descriptor = create_shared_memory(2)
    sites = [site(api_process=ApiProcess(index, 123, descriptor), api_server_count=2) for index in range(2)]
    for process in sites:
        metrics_of(process.app.state.serving).started()
    assert sites[0].get("/load").json()["server_load"] == 2
    site(api_process=ApiProcess(1, 123, descriptor), api_server_count=2)
    assert sites[0].get("/load").json()["server_load"] == 1
    os.close(descriptor)
