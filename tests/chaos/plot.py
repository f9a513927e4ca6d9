"""`python -m tests.chaos.plot CSV PICTURE`: the curves of a scene.  Needs matplotlib."""

from __future__ import annotations

import csv
import sys

from matplotlib.figure import Figure


def main(source: str, target: str) -> None:
    """RSS and open files of both processes, and the requests so far, over time."""
    with open(source) as lines:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
    seconds = [row["seconds"] for row in rows]
    figure = Figure(figsize=(9, 6), layout="constrained")
    memory, files, requests = figure.subplots(3, 1, sharex=True)
    for who in ("server", "engine"):
        there = [row for row in rows if row[f"{who}_rss"]]  # there is no engine while another starts
        when = [row["seconds"] for row in there]
        memory.plot(when, [row[f"{who}_rss"] / (1 << 20) for row in there], ".", markersize=3, label=who)
        files.plot(when, [row[f"{who}_files"] for row in there], ".", markersize=3, label=who)
    requests.plot(seconds, [row["requests"] for row in rows])
    memory.set(ylabel="RSS, MiB", ylim=(0, None))
    memory.legend()
    files.set(ylabel="open files", ylim=(0, None))
    requests.set(ylabel="requests ended", xlabel="seconds")
    figure.savefig(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
