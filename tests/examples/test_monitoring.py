"""examples/monitoring and docs/observability.md: every metric and label they name is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.site import site
from tokserve.server.compat import VLLM_METRICS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
EVERYWHERE = {"instance", "job", "le"}  # labels that Prometheus adds, and a histogram's own


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels by the name of each sample."""
    results: dict[str, set[str]] = {}
    for line in site().get("/metrics").text.splitlines():
        if sample := re.match(r"(tokserve:\w+)\{(.*)\} ", line):
            results.setdefault(sample[1], set()).update(re.findall(r'(\w+)="', sample[2]))
    return results


def expressions() -> list[str]:
    board = json.loads((FOLDER / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    return queries + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_every_metric_and_label_of_a_query_is_exported(exported: dict[str, set[str]]) -> None:
    queries = expressions()
    assert len(queries) > 30
    for query in queries:
        names = re.findall(r"tokserve:\w+", query)
        assert names or query == 'up{job="tokserve"} == 0', query
        assert set(names) <= exported.keys(), query
        used = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
        used |= {label for labels in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)=", labels)}
        known = EVERYWHERE.union(*(exported[name] for name in names))
        assert used <= known, f"{used - known} in {query}"
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query


def test_the_dashboard_is_consistent() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and board["uid"] == "tokserve"
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_prometheus_scrapes_a_route_that_is_there() -> None:
    settings: Any = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["job_name"] == "tokserve" and job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    assert job["metrics_path"] in {route.path for route in site().app.routes}
    assert all((FOLDER / name).is_file() for name in settings["rule_files"])


def test_the_documentation_lists_exactly_what_is_exported() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (\w+) \| (yes|) *\|", text, re.MULTILINE)
    exported = re.findall(r"^# TYPE tokserve:(\w+) (\w+)$", site().get("/metrics").text, re.MULTILINE)
    assert sorted((name, kind) for name, kind, _ in table) == sorted(exported)
    of_vllm = {name.removesuffix("_total") for name, _, vllm in table if vllm}
    assert of_vllm == {name.removesuffix("_total") for name in VLLM_METRICS}
