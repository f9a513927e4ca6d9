"""`python -m tests.chaos.plot CSV PICTURE`: the curves of a scene or of a soak.  Needs matplotlib."""

from __future__ import annotations

import csv
import sys

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WHO = ("server", "engine")
MIB = 1 << 20
Row = dict[str, float]


def main(source: str, target: str) -> None:
    """Memory and files of both processes over time, and what became of requests."""
    with open(source) as lines:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    (soak if "first_p50" in rows[0] else scene)(rows, *axes)
    axes[0].legend()
    for axis in axes[:2]:
        axis.set(ylim=(0, None))
    figure.savefig(target)


def scene(rows: list[Row], memory: Axes, files: Axes, requests: Axes) -> None:
    """A row per second; there is no engine while another starts."""
    for who in WHO:
        sampled = [row for row in rows if row[f"{who}_rss"]]
        times = [row["seconds"] for row in sampled]
        memory.plot(times, [row[f"{who}_rss"] / MIB for row in sampled], ".", markersize=3, label=who)
        files.plot(times, [row[f"{who}_files"] for row in sampled], ".", markersize=3, label=who)
    requests.plot([row["seconds"] for row in rows], [row["requests"] for row in rows])
    memory.set(ylabel="RSS, MiB")
    files.set(ylabel="open files")
    requests.set(ylabel="requests ended", xlabel="seconds")


def soak(rows: list[Row], memory: Axes, files: Axes, latency: Axes) -> None:
    """A row per half a minute."""
    minutes = [row["begin"] / 60 for row in rows]
    for who in WHO:
        memory.plot(minutes, [row[who] / MIB for row in rows], label=who)
        files.plot(minutes, [row[f"{who}_files"] for row in rows], label=who)
    for name, label in (("first_p50", "p50"), ("first_p99", "p99")):
        latency.semilogy(minutes, [row[name] for row in rows], label=label)
    latency.legend()
    memory.set(ylabel="RSS, MiB")
    files.set(ylabel="open files")
    latency.set(ylabel="first token, ms", xlabel="minutes")


if __name__ == "__main__":
    main(*sys.argv[1:])
