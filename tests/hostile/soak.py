"""A good client and nine hostile ones for a long time: the good client's latency, and the memory that attacks leave.

`python -m tests.hostile.soak --seconds 1200 --out benchmarks/results/hostile.png` starts `tokserve serve demo` with
default options and SGLang's routes, measures the good client alone, then beside hostile clients that draw attacks at
random (`tests.hostile.attacker`, processes of their own that take what the processors have left), prints a table and a
line of JSON, and draws the curves if matplotlib is installed.  The exit status is 1 if a promise is broken: each reply
of the good client is that of its solo run, its p99 stays below five times that of the quiet time, no 5xx but a 503 with
Retry-After (a budget is used up) and the 505 for a version of HTTP that does not exist, nothing is left running, and
the memory comes back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from tests.chaos.soak import percentile
from tests.e2e.server import Server
from tests.hostile.attack import MIB, NO_RETRY_AFTER, Metronome
from tests.hostile.bystander import process_memory
from tests.hostile.good_client import KINDS, GoodClient, Reply
from tests.hostile.grammar_attacks import choices
from tokserve.checkpoint import DEMO_DIR

HOSTILE = 9
SLOWER = 5.0  # times the quiet p99
MORE_MEMORY = 150 * MIB
PATIENCE = 300.0  # seconds for the attacks in flight to end
SETTLING = 60.0  # seconds for the memory to come back
HISTORY = 64 * MIB  # of earlier outputs, by default (--speculative-history-bytes)
STALL = "0.25"  # seconds from which a stall of the event loop counts
GAUGES = ("running", "waiting", "stalled")
Sizes = dict[str, int]  # bytes of the server, the engine and all processes, and of what is kept of grammars


@dataclass(frozen=True)
class Sample:
    """The server at a time: bytes of the server, the engine and all processes; requests; stalls so far."""

    at: float
    server: int
    engine: int
    total_memory: int
    running: float
    waiting: float
    stalled: float
    stalls: float
    late: float  # seconds that a process which does nothing woke too late since the sample before


class Sampler(threading.Thread):
    """Samples a server every second until `stop`."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self.faults: list[str] = []
        self._server = server
        self._engine = server.engine()
        self._metronome = Metronome()
        self._stopped = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=60) as client:
            while not self._stopped.wait(1.0):
                try:
                    text = client.get("/metrics").raise_for_status().text
                except httpx.HTTPError as error:
                    self.faults.append(f"/metrics: {error!r}")
                    continue
                memory = {process.pid: size for process, size in process_memory(self._server)}
                self.samples.append(
                    Sample(
                        time.monotonic(),
                        memory[self._server.process.pid],
                        memory[self._engine.pid],
                        sum(memory.values()),
                        *(metric(text, f"num_requests_{name}") for name in GAUGES),
                        stalls(text),
                        self._metronome.worst(),
                    )
                )

    def stop(self) -> None:
        """End it."""
        self._stopped.set()
        self.join()
        self._metronome.end()


def sizes(server: Server) -> Sizes:
    """What the server holds now."""
    memory = {process.pid: size for process, size in process_memory(server)}
    grammars = int(metric(server.get("/metrics").text, "grammar_cache_bytes"))
    engine = memory[server.engine().pid]
    return {"server": memory[server.process.pid], "engine": engine, "all": sum(memory.values()), "grammars": grammars}


def metric(text: str, name: str) -> float:
    """The value of a gauge in the text of /metrics."""
    match = re.search(rf"^tokserve:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert match, name
    return float(match[1])


def stalls(text: str) -> float:
    """How often the event loop has stalled for longer than `STALL`."""
    name = "tokserve:event_loop_stall_seconds_bucket"
    counts = {bound: float(count) for bound, count in re.findall(rf'{name}{{.*le="([^"]+)".*}} (\S+)', text)}
    return counts["+Inf"] - counts[STALL]


# --- processors ---


def processor_seconds(server: Server) -> Counter[str]:
    """Seconds of processors so far: of the server, the engine, the processes that try grammars, this process, and of
    all."""
    root = psutil.Process(server.process.pid).cpu_times()
    engine = server.engine().cpu_times()
    trials = [sum(child.cpu_times()[:4]) for child in server.engine().children()]  # with those of ended children
    machine = psutil.cpu_times()
    return Counter(
        {
            "server": root.user + root.system,
            "engine": engine.user + engine.system,
            "grammar trials": sum(trials),
            "good client": time.process_time(),
            "all": sum(machine[:3]) + sum(machine[5:7]),
            "stolen": machine.steal,
            "seconds": time.monotonic(),
        }
    )


def shares(before: Counter[str], after: Counter[str], hostile: float) -> dict[str, float]:
    """Processors in use by each, on average."""
    used = {name: after[name] - before[name] for name in after} | {"hostile clients": hostile}
    seconds = used.pop("seconds")
    known = ("server", "engine", "grammar trials", "good client", "hostile clients")
    used["others"] = used.pop("all") - sum(used[name] for name in known)
    return {name: round(value / seconds, 3) for name, value in used.items()}


# --- the soak ---


class Soak:
    """`run` it; then everything that came of it is there.

    `broken`: promises that were not kept, but for that of latency, which is `too_slow`: it says something of the server
    only where the processors are not in use by others.
    """

    def __init__(self, seconds: float, quiet_seconds: float, seed: int) -> None:
        self.quiet: list[Reply] = []
        self.loud: list[Reply] = []
        self.samples: list[Sample] = []
        self.attacks: list[dict[str, Any]] = []
        self.broken: list[str] = []
        self.too_slow: list[str] = []
        self.stalls: list[str] = []
        self.memory: dict[str, Sizes] = {}
        self.processors: dict[str, float] = {}
        self.began = 0.0
        self._seconds = seconds
        self._quiet_seconds = quiet_seconds
        self._seed = seed

    def run(self) -> None:
        """Run the soak with a new server."""
        with Server("demo", "--sglang-api") as server:
            warm_up(server, self._seed)
            client = GoodClient(server.url, self._seed)
            sampler = Sampler(server)  # in the quiet time, too: it takes its share of the processors
            sampler.start()
            asyncio.run(client.run(self._quiet_seconds))
            self.quiet, client.replies = client.replies, []
            server.wait_idle()
            processes = {process.pid for process, _ in process_memory(server)}
            self.memory["before"] = sizes(server)
            self._attack(server, client)
            self._settle(server, processes)
            sampler.stop()
            self.samples = [sample for sample in sampler.samples if sample.at >= self.began]
            self.loud = client.replies
            self.broken += client.faults + sampler.faults
            self.stalls = [line for line in server.log if "stalled" in line]
            self.broken += [line for line in server.log if "Traceback" in line or " ERROR " in line]
            if code := server.stop():
                self.broken.append(f"the server's exit status is {code}")
        self._judge()

    def _attack(self, server: Server, client: GoodClient) -> None:
        before = processor_seconds(server)
        self.began = time.monotonic()
        with ExitStack() as stack:
            outputs: list[IO[str]] = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(HOSTILE)]
            clients = [
                start_attacker(server.url, i, self._seed + i, self._seconds, output) for i, output in enumerate(outputs)
            ]
            stack.callback(lambda: [process.kill() for process in clients])
            asyncio.run(client.run(self._seconds))
            after = processor_seconds(server)
            end = time.monotonic() + PATIENCE
            for number, process in enumerate(clients):
                try:
                    if process.wait(max(0.0, end - time.monotonic())):
                        self.broken.append(f"hostile client {number} ended with status {process.returncode}")
                except subprocess.TimeoutExpired:
                    self.broken.append(f"an attack of hostile client {number} did not end in {PATIENCE:g} s")
            used = 0.0
            for output in outputs:
                output.seek(0)
                attacks = [json.loads(line) for line in output]
                used += used_until(attacks, self.began + self._seconds)
                self.attacks += attacks
        self.processors = shares(before, after, used)

    def _settle(self, server: Server, processes: set[int]) -> None:
        """Wait until nothing of the attacks remains; the rest is added to `broken`."""
        try:
            server.wait_idle(SETTLING)
        except AssertionError as error:
            self.broken.append(str(error))
        end = time.monotonic() + SETTLING
        while left := self._left(server, processes):
            if time.monotonic() > end:
                self.broken += left
                break
            time.sleep(0.5)
        deep = server.get("/health?deep=1")
        if deep.status_code != 200:
            self.broken.append(f"/health?deep=1: {deep.text}")

    def _left(self, server: Server, processes: set[int]) -> list[str]:
        """What there is that was not there before."""
        left = [f"process {one.pid} is left" for one, _ in process_memory(server) if one.pid not in processes]
        text = server.get("/metrics").text
        for name in (*(f"num_requests_{name}" for name in GAUGES), "grammars_compiling"):
            if value := metric(text, name):
                left.append(f"{name} is {value:g}")
        if any(load := server.get("/load").json().values()):
            left.append(f"/load: {load}")
        self.memory["after"] = sizes(server)
        if (more := self.memory["after"]["all"] - self.memory["before"]["all"]) > MORE_MEMORY:
            left.append(f"memory: {more / MIB:+.0f} MiB")
        return left

    def _judge(self) -> None:
        """Compare the measurements with the limits."""
        quiet, loud = self.p99(self.quiet), self.p99(self.loud)
        if not loud < SLOWER * quiet:
            self.too_slow.append(f"the good client's p99 is {loud / quiet:.1f} times that of the quiet time")
        self.broken += [attack["fault"] for attack in self.attacks if attack["fault"]]
        for outcome, count in sorted(self.answers().items()):
            announced = outcome.startswith("503") and NO_RETRY_AFTER not in outcome
            if outcome.startswith("5") and not announced and outcome != "505 http_version":
                self.broken.append(f"{count} answers: {outcome}")

    def p99(self, replies: list[Reply]) -> float:
        """Seconds to the end of a reply."""
        return percentile([reply.last for reply in replies], 0.99)

    def answers(self) -> Counter[str]:
        """The replies to the hostile clients."""
        counts: Counter[str] = Counter()
        for attack in self.attacks:
            counts.update(attack["answers"])
        return counts


def warm_up(server: Server, seed: int) -> None:
    """Fill the caches, whose size is an option: the KV cache, whose pages count when they are used first, that of
    grammars, and that of earlier outputs for drafts; and the texts of all tokens."""
    rng = random.Random(seed)
    tokens = int(re.search(r'kv_cache_size_tokens="(\d+)"', server.get("/metrics").text)[1])  # type: ignore[index]
    for _ in range(tokens // 2000 + 2):
        server.generate([rng.randrange(3, 250) for _ in range(2000)], max_tokens=1)
    vocab_size = json.loads((DEMO_DIR / "config.json").read_text())["vocab_size"]
    for token in range(vocab_size):
        body = {"prompt": [token], "echo": True, "logprobs": 20, "max_tokens": 1}
        server.post("/v1/completions", body).raise_for_status()
    ids = [rng.randrange(3, 250) for _ in range(40_000)]
    for number in range(HISTORY // (20 * 8 * 20_000) + 1):  # 20 bytes a token
        outputs = [ids[8 * number + i : 8 * number + i + 20_000] for i in range(8)]
        body = {"draft_group": f"warm {number}", "token_ids": outputs}
        server.post("/add_draft_corpus", body).raise_for_status()
    size = 0.0
    while (larger := server.metric("tokserve:grammar_cache_bytes")) > size or not size:
        size = larger
        for _ in range(10):
            server.generate([5], max_tokens=2, structured_outputs=choices(rng))


def start_attacker(url: str, number: int, seed: int, seconds: float, output: IO[str]) -> subprocess.Popen[bytes]:
    """Start a hostile client with an address of its own."""
    arguments = [url, f"127.0.0.{11 + number}", str(seed), str(seconds)]
    return subprocess.Popen([sys.executable, "-m", "tests.hostile.attacker", *arguments], stdout=output)


def used_until(attacks: list[dict[str, Any]], end: float) -> float:
    """Processor seconds of a hostile client until about this time: those of its last attack count by its part of it."""
    used = 0.0
    for attack in attacks:
        part = min(1.0, (end - attack["begin"]) / max(attack["end"] - attack["begin"], 1e-9))
        used += max(0.0, part) * attack["cpu"]
    return used


# --- the report ---


def row(name: str, quiet: list[float], loud: list[float]) -> str:
    """Median, p99 and worst, quiet and beside the attacks, in milliseconds."""
    cells = [name]
    for values in (quiet, loud):
        figures = (percentile(values, 0.5), percentile(values, 0.99), max(values, default=float("nan")))
        cells += [str(len(values)), ", ".join(f"{1e3 * figure:.0f}" for figure in figures)]
    return f"| {' | '.join(cells)} | {percentile(loud, 0.99) / percentile(quiet, 0.99):.1f} |"


def table(soak: Soak) -> list[str]:
    """The figures in Markdown."""
    lines = [
        "| good client | quiet | p50, p99, worst, ms | beside attacks | p50, p99, worst, ms | p99 ratio |",
        "|---|---|---|---|---|---|",
        row("whole reply, all", [reply.last for reply in soak.quiet], [reply.last for reply in soak.loud]),
    ]
    for kind in KINDS:
        lines.append(
            row(kind, *([reply.last for reply in part if reply.kind == kind] for part in (soak.quiet, soak.loud)))
        )
    lines.append(
        row("first token", *([reply.first for reply in part if reply.first] for part in (soak.quiet, soak.loud)))
    )
    memory = [sample.total_memory / MIB for sample in soak.samples]
    lines += [
        "",
        f"memory of all processes: {max(memory):.0f} MiB at most, {percentile(memory, 0.5):.0f} median",
        *(
            f"memory {when}, MiB: " + ", ".join(f"{name} {size >> 20}" for name, size in sizes.items())
            for when, sizes in soak.memory.items()
        ),
        f"requests at most: {max(s.running for s in soak.samples):g} running, "
        f"{max(s.waiting for s in soak.samples):g} waiting",
        f"event loop: {soak.samples[-1].stalls - soak.samples[0].stalls:g} stalls above {STALL} s; "
        f"an idle process woke up to {max(s.late for s in soak.samples):.2f} s late",
        "processors: " + ", ".join(f"{name} {value:.2f}" for name, value in soak.processors.items()),
        f"attacks: {len(soak.attacks)}; " + counts(Counter(attack["attack"] for attack in soak.attacks)),
        "answers: " + counts(soak.answers()),
        *(f"stall: {line}" for line in soak.stalls[:20]),
        *(f"BROKEN: {problem}" for problem in soak.broken[:50] + soak.too_slow),
    ]
    return lines


def counts(counter: Counter[str]) -> str:
    """The most common first."""
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def summary(soak: Soak, seconds: float) -> dict[str, Any]:
    """The figures for a machine to read."""
    quiet, loud = soak.p99(soak.quiet), soak.p99(soak.loud)
    return {
        "seconds": seconds,
        "good_replies": len(soak.loud),
        "quiet_p99_s": round(quiet, 4),
        "p99_s": round(loud, 4),
        "p99_ratio": round(loud / quiet, 2),
        "memory_bytes": soak.memory,
        "memory_most_mib": max(sample.total_memory for sample in soak.samples) >> 20,
        "processors": soak.processors,
        "stalls": soak.samples[-1].stalls - soak.samples[0].stalls,
        "attacks": len(soak.attacks),
        "answers": dict(soak.answers()),
        "broken": soak.broken + soak.too_slow,
    }


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0, help="of attacks. Default: 1200.")
    parser.add_argument("--quiet-seconds", type=float, default=60.0, help="without attacks, before. Default: 60.")
    parser.add_argument("--seed", type=int, default=1, help="of requests and attacks. Default: 1.")
    parser.add_argument("--out", type=Path, help="picture of the curves; needs matplotlib (the extra `plot`)")
    options = parser.parse_args(arguments)
    soak = Soak(options.seconds, options.quiet_seconds, options.seed)
    soak.run()
    print("\n".join(table(soak)))
    print(json.dumps(summary(soak, options.seconds)), flush=True)
    if options.out:
        try:
            from tests.hostile.plot import draw
        except ImportError as error:
            print(f"no picture: {error}; install the extra `plot`")
        else:
            draw(soak, options.out)
    return 1 if soak.broken or soak.too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
