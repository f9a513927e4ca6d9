"""Steps of requests behind one prompt, with its keys read once and with the same keys read for each request.

    python -m benchmarks.groups [--layers 28] [--prompts 64,512,4096] [--members 1,4,16,64] [--turns 3] [--json FILE]

0.6B shapes with random weights in bfloat16, one thread.  Keys are shared where block tables name the same pages, so the
second kind of request has tables of its own whose pages are the same memory, mapped again: it does what a server did
that knew no groups, from the same caches of the processor.  No prompt is computed.  Times are those of the processor,
per step of all requests, the best of the turns: the machine may be shared.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokserve.config import Config
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import NewRow, StepPlan
from tokserve.runner.runner import Runner
from tokserve.runner.startup import load_runner

PAGE = 16
OWN = 4  # pages of each request's own tokens
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
MAP_FIXED = 0x10
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def map_again(pages: Tensor, count: int, starts: list[int]) -> None:
    """Let the `count` pages from each of these on be the same memory, of random numbers."""
    size = pages[0].numel() * pages.element_size()
    file = os.memfd_create("pages")
    os.ftruncate(file, count * size)
    for start in starts:
        address = pages.data_ptr() + start * size
        actual = libc.mmap(
            address, count * size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, file, 0
        )
        if actual != address:
            raise OSError(ctypes.get_errno(), "mmap")
    os.close(file)
    pages[starts[0] : starts[0] + count].normal_()


class Group:
    """The requests of one kind: their slots and tables."""

    def __init__(self, slots: range, tables: list[list[int]], prompt: int) -> None:
        self.slots = np.array(slots, np.int32)
        self.length = prompt
        ids = np.zeros(prompt + 1, np.int32)
        params = SamplingParams(temperature=0.0)
        self.new = [NewRow(slot, "", ids, prompt, params, 0, ()) for slot in slots]
        self.blocks = [(slot, 0, table) for slot, table in zip(slots, tables, strict=True)]

    def plan(self, number: int, freed: list[int]) -> StepPlan:
        """The next step, of one token each; `freed`: slots of earlier groups."""
        ones = np.ones_like(self.slots)
        none = np.zeros(0, np.int32)
        plan = StepPlan(
            number,
            self.slots,
            ones,
            ones * self.length,
            0 * ones,
            ones,
            none,
            new=self.new,
            blocks=self.blocks,
            freed=freed,
        )
        self.new, self.blocks = [], []
        self.length += 1
        return plan


def groups(runner: Runner, members: int, prompt: int) -> tuple[Group, Group]:
    """Requests that share the pages of a prompt, and those that read them by other names."""
    count = prompt // PAGE
    starts = [count * i for i in range(members + 1)]
    for layer in runner.backend.kv:
        for pages in layer:
            map_again(pages, count, starts)
            pages[starts[-1] + count : starts[-1] + count + 2 * members * OWN].normal_()
    own = iter(range(starts[-1] + count, starts[-1] + count + 2 * members * OWN))
    names = [0] * members, starts[1:]
    tables = [[[*range(s, s + count), *(next(own) for _ in range(OWN))] for s in kind] for kind in names]
    return Group(range(members), tables[0], prompt), Group(range(members, 2 * members), tables[1], prompt)


def make_runner(layers: int, members: int, prompt: int) -> Runner:
    """A runner with room for two groups of so many requests behind a prompt of this length."""
    blocks = (prompt // PAGE) * (members + 1) + 2 * members * OWN
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
        config = Config.make(
            model=directory,
            load_format="dummy",
            device="cpu",
            dtype="bfloat16",
            cpu_threads=1,
            max_num_seqs=2 * members,
            max_model_len=prompt + OWN * PAGE,
            kv_cache_memory_bytes=blocks * layers * 2 * 8 * PAGE * 128 * 2,
            spec_method="none",
        )
        return load_runner(config)[0]


def measure(runner: Runner, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Seconds per step of requests that share pages, and of those that do not."""
    number, freed = 0, list[int]()
    for prompt, members in itertools.product(options.prompts, options.members):
        kinds = dict(zip(("shared", "own"), groups(runner, members, prompt), strict=True))
        best = dict.fromkeys(kinds, float("inf"))
        tokens: dict[str, list[int]] = {name: [] for name in kinds}
        for _ in range(options.turns + 1):  # the first one brings the pages
            for (name, group), _ in itertools.product(kinds.items(), range(2)):
                plan = group.plan(number, freed)
                began = time.process_time()
                result = runner.execute(plan)
                best[name] = min(best[name], time.process_time() - began)
                tokens[name] += result.token_ids.tolist()
                number, freed = number + 1, []
        assert tokens["shared"] == tokens["own"]
        freed = list(range(2 * members))
        yield {"prompt": prompt, "members": members, **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--prompts", default=[64, 512, 4096], **numbers)
    parser.add_argument("--members", default=[1, 4, 16, 64], **numbers)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    print("| prompt | n | own, ms | shared, ms | ratio | tokens/s shared |\n|--:|--:|--:|--:|--:|--:|")
    runner = make_runner(options.layers, max(options.members), max(options.prompts))
    for row in measure(runner, options):
        own, shared = row["own"], row["shared"]
        print(
            f"| {row['prompt']:,} | {row['members']} | {own * 1e3:.0f} | {shared * 1e3:.0f} | {own / shared:.2f} "
            f"| {row['members'] / shared:.1f} |",
            flush=True,
        )
        results.append(row)
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
