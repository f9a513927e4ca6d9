"""A real Prometheus scrapes a server under load: every query of the dashboard has figures, and no alert fires."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests import needs
from tests.e2e.server import Server
from tests.ports import free_port
from tests.waiting import until

pytestmark = [pytest.mark.slow, needs.PROMETHEUS.skips()]
MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
VARIABLES = {"$instance": ".+", "$__rate_interval": "30s"}


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """The URL of one that runs with the example's settings, but for the target and the intervals."""
    settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    for rules in settings["rule_files"]:
        shutil.copy(MONITORING / rules, folder)
    address = f"127.0.0.1:{free_port()}"
    options = {"config.file": "prometheus.yml", "storage.tsdb.path": "data", "web.listen-address": address}
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield f"http://{address}/api/v1"
    finally:
        process.terminate()
        process.wait()


def queries() -> list[str]:
    """The dashboard's expressions, with its variables replaced."""
    board = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    for name, value in VARIABLES.items():
        expressions = [expression.replace(name, value) for expression in expressions]
    return expressions


def make_traffic(server: Server, turn: int) -> None:
    """Requests with drafts and common prefixes, a stream, a refusal and an abort."""
    prompt = [*range(5, 105), turn % 50]
    server.generate(prompt, n=4, max_tokens=40, ignore_eos=True, temperature=0)
    body = {"token_ids": prompt, "stream": True, "sampling_params": {"max_tokens": 40, "ignore_eos": True}}
    assert server.post("/inference/v1/generate", body).status_code == 200
    assert server.post("/inference/v1/generate", {"token_ids": []}).status_code == 400
    name = f"aborted-{turn}"
    endless = {"token_ids": [5, 6, 7], "request_id": name, "sampling_params": {"max_tokens": 1900, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.post, "/inference/v1/generate", endless)
        until(lambda: server.post("/abort_requests", {"request_ids": [name]}) and reply.done())


def test_every_query_of_the_dashboard_has_figures_under_load(tmp_path: Path) -> None:
    def figures(query: str) -> list[float]:
        reply = httpx.get(f"{url}/query", params={"query": query}).json()
        assert reply["status"] == "success", (query, reply)
        return [float(sample["value"][1]) for sample in reply["data"]["result"]]

    def is_up() -> bool:
        try:
            return figures("up") == [1.0]
        except httpx.TransportError:
            return False

    with Server("demo") as server, prometheus(tmp_path, server.url.removeprefix("http://")) as url:
        until(is_up, "the server is scraped")
        missing = set(queries())
        turn = 0

        def have_figures() -> bool:
            nonlocal turn
            turn += 1
            make_traffic(server, turn)
            missing.difference_update(
                [q for q in missing if (values := figures(q)) and not any(map(math.isnan, values))]
            )
            return not missing

        until(have_figures, missing)
        groups = httpx.get(f"{url}/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"} and len(rules) == 8  # unknown: not yet evaluated
        assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
