"""tokserve beside its peers on this machine, in one run and in turns: `python benchmarks/peers.py --help`.

Figures of a shared machine mean little alone, so every case runs on all peers one after the other (A B C, A B C)
and the ratios are compared.  No two cases or rounds have a prompt in common, so no prefix cache helps.  The times
between tokens of the large model come from `tokserve bench serve`'s own code; the tiny model's rates, where the client
would be a large part of what is measured, from raw sockets (`closed_loop.py`).  llama.cpp is driven through its
bindings, without HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import closed_loop
import peer_servers as servers

from tokserve import __version__
from tokserve.bench import serve
from tokserve.bench.clients import RequestShape
from tokserve.bench.datasets import DatasetSpec, make

ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
OURS = "tokserve"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A closed-loop load and the figure that is read from it."""

    name: str
    unit: str
    figure: Callable[[dict[str, Any]], float]  # of the result of `tokserve bench serve`
    count: int
    concurrency: int
    input_len: int = 128
    output_len: int = 64
    stream: bool = True
    logprobs: int | None = None
    shared_len: int | None = None  # tokens before those of `input_len`, the same in all prompts, and cached

    def load(self, url: str, seed: int, vocab_size: int) -> float:
        """Ask a server; its figure."""
        shape = RequestShape(backend="tokens", stream=self.stream, logprobs=self.logprobs)
        prompts = DatasetSpec(
            kind="shared-prefix" if self.shared_len else "random",
            shared_prefix_len=self.shared_len,
            count=self.count,
            input_len=self.input_len,
            output_len=self.output_len,
            vocab_size=vocab_size,
            seed=seed,
        )
        load = serve.Load(
            base_url=url,
            shape=shape,
            dataset=prompts,
            max_concurrency=self.concurrency,
            goodput={},
            percentiles=(50.0,),
            progress=False,
        )
        row, _ = serve.serve(load)
        if row["failed"]:
            raise SystemExit(f"{self.name}: {row['failed']} requests failed: {row['first_error']}")
        return self.figure(row)

    def ask(self, llama: servers.Llama) -> float:
        """The same of llama.cpp; of its two layouts of shared tokens, the one that is faster here."""
        if self.output_len == 1:
            return llama.ask(sequences=self.count, prompt=self.input_len, steps=0)
        case = {"sequences": self.concurrency, "prompt": self.input_len, "steps": self.output_len}
        if self.shared_len is None:
            return llama.ask(**case)
        return min(llama.ask(**case, shared=self.shared_len, unified=unified) for unified in (False, True))


@dataclass(frozen=True, kw_only=True)
class Flood:
    """A closed loop of requests, `per_lane` after one another on each connection, after one to warm up."""

    name: str
    concurrency: int
    stream: bool
    logprobs: int | None = None
    arrays: bool = False  # logprobs in our own format, which no peer has
    per_lane: int = 16
    unit: str = "tok/s"

    def load(self, url: str, seed: int, vocab_size: int) -> float:
        """Ask a server; output tokens per second."""
        with urllib.request.urlopen(url + "/v1/models") as response:
            model = json.load(response)["data"][0]["id"]
        shape = RequestShape(backend="tokens", model=model, stream=self.stream, logprobs=self.logprobs)
        count = self.concurrency * (self.per_lane + 1)
        talks = make(DatasetSpec(count=count, input_len=128, output_len=64, vocab_size=vocab_size, seed=seed))
        bodies = [shape.body(talk.turns[0].prompt, 64) for talk in talks]
        if self.arrays:
            bodies = [body[:-1] + b',"logprobs_format":"arrays"}' for body in bodies]
        port = int(url.rpartition(":")[2])
        return closed_loop.output_rate(port, bodies, self.concurrency, 64, stream=self.stream)


def step_ms(row: dict[str, Any]) -> float:
    """The median time between two tokens of a request: a step of the batch, whatever prefills were in between."""
    return float(row["median_itl_ms"])


def prompt_rate(row: dict[str, Any]) -> float:
    """Prompt tokens per second."""
    return float(row["total_input_tokens"] / row["duration"])


DECODE: dict[str, Any] = {"unit": "ms/step", "figure": step_ms, "output_len": 32}
PREFILL: dict[str, Any] = {"unit": "tok/s", "figure": prompt_rate, "output_len": 1, "stream": False}
LARGE = [
    *(Case(name=f"decode c={c}", count=max(c, 2), concurrency=c, **DECODE) for c in (1, 4, 16)),
    Case(name="prefill, 1024 tokens", count=3, concurrency=1, input_len=1024, **PREFILL),
]
GROUPS = [
    Case(
        name=f"step of {n} behind {shared:,} tokens", count=n, concurrency=n, input_len=16, shared_len=shared, **DECODE
    )
    for n, shared in ((16, 64), (64, 64), (16, 1024), (64, 1024), (16, 4096))
]
TINY = [
    Flood(name="c=1, stream", concurrency=1, stream=True),
    Flood(name="c=16", concurrency=16, stream=False),
    Flood(name="c=64, stream", concurrency=64, stream=True),
    Flood(name="c=64, stream, logprobs 5", concurrency=64, stream=True, logprobs=5),
    Flood(name="c=64", concurrency=64, stream=False),
    Flood(name="c=64, logprobs of the token, arrays", concurrency=64, stream=False, logprobs=0, arrays=True),
]


@dataclass
class Table:
    """Figures by case and peer, in the order they came."""

    title: str
    peers: list[str]
    figures: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)

    def add(self, case: str, unit: str, peer: str, value: float) -> None:
        """Note a figure and show it."""
        self.figures.setdefault((case, unit), {}).setdefault(peer, []).append(value)
        print(f"  {case:<34} {peer:<16} {value:10.2f} {unit}", flush=True)

    def rows(self) -> Iterator[str]:
        """Markdown: each peer's figures by round and, in brackets, how many times better tokserve's median is."""
        yield f"| {self.title} | unit | " + " | ".join(self.peers) + " |"
        yield "|---" * (len(self.peers) + 2) + "|"
        for (case, unit), by_peer in self.figures.items():
            cells = [self._cell(unit, by_peer[OURS], by_peer.get(peer, []), peer) for peer in self.peers]
            yield f"| {case} | {unit} | " + " | ".join(cells) + " |"

    @staticmethod
    def _cell(unit: str, own_rates: Sequence[float], peer_rates: Sequence[float], peer: str) -> str:
        if not peer_rates:
            return "-"
        text = " / ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" for value in peer_rates)
        if peer == OURS:
            return text
        ratio = statistics.median(own_rates) / statistics.median(peer_rates)
        return f"{text} ({ratio if unit == 'tok/s' else 1 / ratio:.2f}x)"


@contextmanager
def started(args: argparse.Namespace, model: str, table: Table, logs: Path) -> Iterator[list[servers.Process]]:
    """All peers for `model`, up together; what starting took is in the table."""
    for path in Path(model).glob("*.safetensors"):
        path.read_bytes()  # so that the first to start does not read the disk for the others
    kv = args.kv_gib
    starts: list[Callable[[], servers.Process]] = [
        partial(servers.tokserve, model, kv, shlex.split(args.tokserve_flags), logs / "tokserve.base.log")
    ]
    for variant in args.variant:
        name, _, command = variant.partition("=")
        python, *flags = shlex.split(command)
        starts.append(partial(servers.tokserve, model, kv, flags, logs / f"{name}.log", name=name, python=python))
    if args.vllm_python:
        flags = shlex.split(args.vllm_flags)
        starts.append(partial(servers.vllm, args.vllm_python, model, kv, flags, logs / "vllm.log"))
    if args.llama_python and model == args.large:
        starts += [partial(servers.Llama, args.llama_python, path, logs / "llama.log") for path in args.gguf]
    with ExitStack() as stack:
        up = []
        for start in starts:
            up.append(start())
            stack.callback(up[-1].stop)
            table.add("start to ready", "s", up[-1].name, up[-1].wait_ready())
        yield up


def compare(args: argparse.Namespace, model: str, cases: Sequence[Case | Flood], rounds: int, logs: Path) -> Table:
    """Run `cases` against everything that is there, in turns."""
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    table = Table(Path(model).name, [])
    print(f"{model}:", flush=True)
    with started(args, model, table, logs) as up:
        table.peers = [peer.name for peer in up]
        for turn in range(rounds):
            for number, case in enumerate(cases):
                for peer in up:
                    seed = turn * len(cases) + number + 1
                    if isinstance(case, Flood) and case.arrays and peer.name != OURS:
                        continue
                    if isinstance(peer, servers.HttpServer):
                        value = case.load(peer.url, seed, vocab_size)
                    else:
                        assert isinstance(peer, servers.Llama) and isinstance(case, Case)
                        value = case.ask(peer)
                    table.add(case.name, case.unit, peer.name, value)
        for peer in up:
            table.add(f"resident memory after, {args.kv_gib} GiB KV configured", "MiB", peer.name, peer.resident_mib())
    return table


def hardware() -> str:
    """Processor, cores, instruction sets that matter, and how busy the machine is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", facts.get("Features", "")).split()
    isa = " ".join(name for name in ISA if name in flags)
    family = f"family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
    name = facts.get("model name", "unknown processor")
    return f"{name} ({family}), {len(os.sched_getaffinity(0))} cores, {isa}; load average {os.getloadavg()[0]:.1f}"


def version(python: str | None, package: str) -> str:
    """The version of a package in another Python, or that the peer is left out."""
    if not python:
        return f"{package} left out (no flag)"
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return f"{package} {subprocess.check_output([python, '-c', code], text=True).strip()}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--large", metavar="DIR", help="checkpoint for decode, prefill, start and memory (Qwen3-0.6B)")
    add("--tiny", metavar="DIR", help="checkpoint so small that the server is what is measured")
    add("--vllm-python", metavar="PATH", help="the Python of an environment with vLLM's CPU build")
    add("--llama-python", metavar="PATH", help="the Python of an environment with llama-cpp-python; needs --gguf")
    add("--gguf", metavar="FILE", action="append", default=[], help="--large as NAME-TYPE.gguf (repeatable)")
    add("--groups", action="store_true", help="with --large: requests that share a prefix, instead of its other cases")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each case. Default: 3.")
    add("--quick", action="store_true", help="one turn")
    add("--kv-gib", type=int, default=2, metavar="N", help="KV cache of the servers in GiB. Default: 2.")
    add("--tokserve-flags", default="", metavar="'FLAGS'", help="more for `tokserve serve`")
    add(
        "--variant",
        metavar="'NAME=PYTHON FLAGS'",
        action="append",
        default=[],
        help="another tokserve beside it: of another environment, or with other flags (repeatable)",
    )
    add("--vllm-flags", default="", metavar="'FLAGS'", help="more for `vllm serve`")
    args = parser.parse_args()
    if bool(args.llama_python) != bool(args.gguf) or not (args.large or args.tiny):
        parser.error("--llama-python and --gguf go together, and at least one of --large and --tiny is needed")
    return args


def main() -> None:
    """Run everything, then print the tables."""
    args = arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM")
    )  # an exception, so that the peers are stopped
    rounds = 1 if args.quick else args.rounds
    peers = [version(args.vllm_python, "vllm"), version(args.llama_python, "llama_cpp_python")]
    about = [
        f"{datetime.now():%d %B %Y}. {hardware()}.",
        f"tokserve {__version__}, {', '.join(peers)}.",
        f"`{shlex.join(['python', *sys.argv])}`",
    ]
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        sets = [
            (model, cases)
            for model, cases in ((args.large, GROUPS if args.groups else LARGE), (args.tiny, TINY))
            if model
        ]
        tables = [compare(args, model, cases, rounds, Path(folder)) for model, cases in sets]
    print("\n" + "\n\n".join(["\n".join(about), *("\n".join(table.rows()) for table in tables)]))


if __name__ == "__main__":
    main()
