"""A plot of a run: the distribution of latencies, and when requests were in flight.  Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from tokserve.bench.report import METRICS, Outcome


def draw(outcomes: Sequence[Outcome], path: str, title: str) -> None:
    """Write the plot in the format of the path's suffix."""
    served = [o for o in outcomes if o.error is None]
    values = {
        "ttft": [o.ttft for o in served if o.ttft is not None],
        "tpot": [o.tpot for o in served if o.tpot is not None],
        "itl": [gap for o in served for gap in o.itl],
        "e2el": [o.e2el for o in served],
    }
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for name, seconds in values.items():
        if seconds:
            ms = sorted(1e3 * s for s in seconds)
            left.step(ms, [(i + 1) / len(ms) for i in range(len(ms))], where="post", label=METRICS[name])
    left.set(xlabel="ms", ylabel="share of values at or below", xscale="log")
    left.legend()
    rows = sorted(served, key=lambda o: o.start)
    for number, o in enumerate(rows):
        first = o.start + (o.ttft or 0.0)
        right.plot([o.start, first], [number, number], color="tab:orange", linewidth=1)
        right.plot([first, o.end], [number, number], color="tab:blue", linewidth=1)
    right.set(xlabel="seconds (orange: to the first token)", ylabel="request")
    figure.savefig(path, dpi=120)
