"""Check the Helm chart with Helm's own library: python chart.py CHART KUBERNETES_FOLDER RENDERED_FILE.

With default values it renders what KUBERNETES_FOLDER holds; wrong values are refused by name. Writes what other values
render to RENDERED_FILE, for a check against Kubernetes' schemas.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

KEY = {"apiKey": "replace-me"}
OTHERS: list[dict[str, Any]] = [
    {
        "secret": "keys",
        "gpus": 1,
        "replicas": 1,
        "args": ["--max-model-len=8192"],
        "models": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    {**KEY, "nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    {**KEY, "maxQueuedRequests": 10_000_000},
]
WRONG: dict[str, dict[str, Any]] = {
    "replicas": {**KEY, "replicas": 0},
    "cpus": {**KEY, "cpus": 1.5},
    "memroy": {**KEY, "memroy": "8Gi"},
    "args": {**KEY, "args": ["max-model-len=8192"]},
    "apiKey, or the name of a Secret": {},
    "exclude each other": {**KEY, "secret": "keys"},
}


def render_objects(chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, Any]:
    """The objects of these values by their kind, under the release's name `tokserve`."""
    chart.validate_schema(values)
    texts = chart.render(values, name="tokserve")
    objects = [yaml.safe_load(text) for path, text in texts.items() if path.endswith(".yaml")]
    return {one["kind"]: one for one in objects if one}


def refuse_wrong(chart: helm_python.Chart) -> None:
    """Wrong values end in an error that names them."""
    for name, values in WRONG.items():
        try:
            render_objects(chart, values)
        except helm_python.HelmError as error:
            if name not in str(error):
                sys.exit(f"the error of {values} does not say {name!r}: {error}")
        else:
            sys.exit(f"{values} were accepted")


def main(path: str, folder: str, rendered: str) -> None:
    report = helm_python.lint(path, KEY, strict=True)
    faults = [one for one in report["messages"] if one["severity"] > 1] + report["errors"]
    if faults:
        sys.exit(f"{path}: {faults}")
    with helm_python.Chart.load(path) as chart:
        plain = [yaml.safe_load(file.read_text()) for file in Path(folder).glob("*.yaml")]
        expected = {one["kind"]: one for one in plain if one["kind"] != "Kustomization"}
        got = render_objects(chart, KEY)
        for kind in sorted(expected.keys() | got.keys()):
            if expected.get(kind) != got.get(kind):
                sys.exit(f"{kind}: the chart renders\n{got.get(kind)}\nand {folder} has\n{expected.get(kind)}")
        others = [one for values in OTHERS for one in render_objects(chart, values).values()]
        refuse_wrong(chart)
    Path(rendered).write_text(yaml.safe_dump_all(others))


if __name__ == "__main__":
    main(*sys.argv[1:])
