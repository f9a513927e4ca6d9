"""The report of a driver: a line per check, and the number of checks at the end.  Stdlib only."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from urllib.request import urlopen


class Report:
    """`check` raises at the first thing that is wrong, so a driver that comes to `done` has passed."""

    def __init__(self) -> None:
        self.url, self.model_dir = sys.argv[1].rstrip("/"), sys.argv[2]
        with urlopen(f"{self.url}/openapi.json") as answer:
            self.paths = set(json.load(answer)["paths"])
        self._passed = 0
        self._left_out: list[str] = []

    def check(self, what: str, holds: object = True) -> None:
        """Check one behaviour."""
        if not holds:
            raise SystemExit(f"FAILED: {what}")
        self._passed += 1
        print(f"  ok  {what}", flush=True)

    def serves(self, path: str) -> bool:
        """Whether the server has a route; if not, what needs it is named as left out."""
        if path not in self.paths:
            self._left_out.append(path)
        return path in self.paths

    def done(self, *packages: str, passed: int = 0, others: Mapping[str, str] | None = None) -> None:
        """The last line, which `run.py` reads.  `others`: versions of packages that are not Python's."""
        versions = {package: version(package) for package in packages} | dict(others or {})
        actual = {"versions": versions, "checks": self._passed + passed, "not_served": self._left_out}
        print(json.dumps(actual))
