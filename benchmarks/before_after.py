"""Two builds of tokserve beside each other, for the overhead of a change: `python benchmarks/before_after.py --help`.

Both servers are up together and asked in turns, each first in every other round.  Wall time is what counts, but on
shared cores it varies by more than a change costs; seconds of processors per token, of the server and of the engine,
vary less.  The other build's Python is given: an environment in which it is installed.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import closed_loop
import peer_servers as servers
import psutil
from peers import LARGE, Case, Flood, hardware

from tokserve.bench.clients import RequestShape
from tokserve.bench.datasets import DatasetSpec, make

GRAMMAR = {"structured_outputs": {"regex": "[0-9a-z ]{900}"}}
MASKS = {"temperature": 0.1, "top_p": 0.95, "return_sampling_mask": True}


@dataclass(frozen=True, kw_only=True)
class FloodWithParams(Flood):
    """Every `every`-th request has these sampling parameters, too; 0: those of one connection."""

    params: dict[str, Any]
    every: int = 0

    def load(self, url: str, seed: int, vocab_size: int) -> float:
        """Ask a server; output tokens per second."""
        shape = RequestShape(backend="tokens", stream=self.stream)
        count = self.concurrency * (self.per_lane + 1)
        talks = make(DatasetSpec(count=count, input_len=128, output_len=64, vocab_size=vocab_size, seed=seed))
        bodies = [shape.body(talk.turns[0].prompt, 64) for talk in talks]
        for index in range(0, count, self.every or self.concurrency):
            body = json.loads(bodies[index])
            body["sampling_params"].update(self.params)
            bodies[index] = json.dumps(body).encode()
        return closed_loop.output_rate(int(url.rpartition(":")[2]), bodies, self.concurrency, 64, stream=self.stream)


TINY: list[Flood | Case] = [
    Flood(name="c=64, stream", concurrency=64, stream=True, per_lane=6),
    Flood(name="c=64, whole", concurrency=64, stream=False, per_lane=6),
    Flood(name="c=64, stream, logprobs 5", concurrency=64, stream=True, logprobs=5, per_lane=6),
    FloodWithParams(name="c=64, stream, one grammar", concurrency=64, stream=True, per_lane=6, params=GRAMMAR),
    FloodWithParams(name="c=64, stream, masks", concurrency=64, stream=True, per_lane=6, params=MASKS, every=1),
]
DECODE: list[Flood | Case] = [case for case in LARGE if case.name != "decode c=4"]
STARTS = {"start": [], "start, --tokens-only": ["--tokens-only"]}


@dataclass
class Figures:
    """The figures of one case and build, by round."""

    values: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)  # seconds of processors
    engine: list[float] = field(default_factory=list)


def seconds(process: psutil.Process) -> float:
    """Seconds of processors that it has used, without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(case: Case | Flood, server: servers.HttpServer, figures: Figures, seed: int, vocab_size: int) -> None:
    """Ask one server."""
    top = psutil.Process(server.pid)
    engine = max(top.children(), key=lambda process: process.memory_info().rss)
    before = seconds(top), seconds(engine)
    figures.values.append(case.load(server.url, seed, vocab_size))
    figures.server.append(seconds(top) - before[0])
    figures.engine.append(seconds(engine) - before[1])


def row(case: Case | Flood, old: Figures, new: Figures) -> str:
    """A line of the table: medians of both, and the median of the rounds' ratios (after / before)."""

    def ratio(after: list[float], before: list[float]) -> str:
        return f"{statistics.median(a / b for a, b in zip(after, before, strict=True) if b):.3f}"

    cells = [case.name, case.unit, *(f"{statistics.median(figures.values):,.2f}" for figures in (old, new))]
    cells += [ratio(new.values, old.values), ratio(new.server, old.server), ratio(new.engine, old.engine)]
    return f"| {' | '.join(cells)} |"


def starts(model: str, pythons: dict[str, str], folder: Path, rounds: int) -> None:
    """Print the rows of seconds from the command to the first reply of `/health`, in turns."""
    for name, flags in STARTS.items():
        waits: dict[str, list[float]] = {build: [] for build in pythons}
        for turn in range(rounds):
            for build in pythons if turn % 2 else reversed(pythons):
                server = servers.tokserve(model, 1, flags, folder / "start.log", name=build, python=pythons[build])
                try:
                    waits[build].append(server.wait_ready())
                finally:
                    server.stop()
        old, new = (statistics.median(seconds) for seconds in waits.values())
        ratio = statistics.median(after / before for before, after in zip(*waits.values(), strict=True))
        print(f"| {name} | s | {old:.2f} | {new:.2f} | {ratio:.3f} | | |", flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint")
    parser.add_argument("--before", required=True, metavar="PATH", help="the Python of the other build's environment")
    parser.add_argument("--decode", action="store_true", help="the median time between tokens, for a large model")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each case. Default: 3.")
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="turns of starts, first. Default: none.")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # an exception, so that servers are stopped
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    cases = DECODE if args.decode else TINY
    print(hardware(), flush=True)
    with tempfile.TemporaryDirectory(prefix="before-after-") as folder, ExitStack() as stack:
        print("| case | unit | before | after | ratio | server's processor time | engine's |")
        print("|---" * 7 + "|", flush=True)
        pythons = {"before": args.before, "after": sys.executable}
        if args.starts:
            starts(args.model, pythons, Path(folder), args.starts)
        up = []
        for name, python in pythons.items():
            log = Path(folder) / f"{name}.log"
            up.append(servers.tokserve(args.model, 1, [], log, name=name, python=python))
            stack.callback(up[-1].stop)
        for server in up:
            server.wait_ready()
        for number, case in enumerate(cases):
            both = Figures(), Figures()
            for turn in range(args.rounds):
                order = list(zip(up, both, strict=True))
                for server, figures in order if turn % 2 else order[::-1]:
                    measure(case, server, figures, turn * len(cases) + number + 1, vocab_size)
            print(row(case, *both), flush=True)


if __name__ == "__main__":
    main()
