"""The curves of a soak with hostile clients.  Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.chaos.soak import percentile

if TYPE_CHECKING:
    from tests.hostile.soak import Soak

MIB = 1 << 20
BLOCK = 30.0  # seconds of which the p99 is drawn


def draw(soak: Soak, target: Path) -> None:
    """Latency of the good client, memory, requests and attacks over time."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    latency(soak, axes[0])
    memory(soak, axes[1])
    requests(soak, axes[2])
    attacks(soak, axes[3])
    for axis in axes:
        axis.legend(loc="upper right", fontsize="small")
    axes[3].set(xlabel="minutes")
    figure.savefig(target, dpi=110)


def latency(soak: Soak, axes: Axes) -> None:
    """Every reply, the p99 of each half minute, and the bound."""
    blocks: dict[int, list[float]] = {}
    for reply in soak.loud:
        blocks.setdefault(int((reply.at - soak.began) / BLOCK), []).append(reply.last)
    minutes = [(reply.at - soak.began) / 60 for reply in soak.loud]
    axes.semilogy(minutes, [1e3 * reply.last for reply in soak.loud], ".", markersize=1, alpha=0.4, label="a reply")
    axes.semilogy(
        [(number + 0.5) * BLOCK / 60 for number in blocks],
        [1e3 * percentile(values, 0.99) for values in blocks.values()],
        label="p99 of half a minute",
    )
    quiet = 1e3 * soak.p99(soak.quiet)
    axes.axhline(quiet, color="grey", linestyle=":", label="quiet p99")
    axes.axhline(5 * quiet, color="black", linestyle="--", label="5 x quiet p99")
    axes.set(ylabel="good client, ms")


def memory(soak: Soak, axes: Axes) -> None:
    """Resident sets."""
    minutes = [(sample.at - soak.began) / 60 for sample in soak.samples]
    for name, label in (("total_memory", "all processes"), ("engine", "engine"), ("server", "server")):
        axes.plot(minutes, [getattr(sample, name) / MIB for sample in soak.samples], label=label)
    axes.axhline(soak.memory["before"]["all"] / MIB, color="grey", linestyle=":", label="all, before")
    axes.set(ylabel="RSS, MiB", ylim=(0, None))


def requests(soak: Soak, axes: Axes) -> None:
    """What the engine holds."""
    minutes = [(sample.at - soak.began) / 60 for sample in soak.samples]
    for name in ("running", "waiting", "stalled"):
        axes.plot(minutes, [getattr(sample, name) for sample in soak.samples], label=name)
    axes.set(ylabel="requests", yscale="symlog", ylim=(0, None))


def attacks(soak: Soak, axes: Axes) -> None:
    """Attacks that ended so far, and stalls of the event loop."""
    ends = sorted((attack["end"] - soak.began) / 60 for attack in soak.attacks)
    minutes = [(sample.at - soak.began) / 60 for sample in soak.samples]
    axes.plot(ends, range(1, len(ends) + 1), label="attacks ended")
    first = soak.samples[0].stalls
    axes.plot(minutes, [sample.stalls - first for sample in soak.samples], label="stalls above 0.25 s")
    axes.set(ylabel="so far", ylim=(0, None))
