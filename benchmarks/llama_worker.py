"""llama.cpp through its bindings, for `peers.py`: a line of JSON in is a case, a line of JSON out its figure.

Run by a Python that has llama-cpp-python; it must not import tokserve.  What is timed is `llama_decode` alone, without
sampling and without HTTP: the most favourable reading.  Cases: `{"sequences": s, "prompt": p, "steps": n}` gives the
median milliseconds of a step that decodes one token in each of s sequences; with `steps` 0, the prompt's tokens per
second, one prompt after the other.  `"shared": m` puts m tokens before the prompts that all sequences share: computed
once.  `"unified": true`: all sequences' cells are in one cache, as a step's attention reads them all; otherwise each
sequence has its own, with a copy of the shared ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

try:
    import llama_cpp as llama
except ImportError:
    sys.exit("llama_worker.py needs llama_cpp: run it by a Python with `pip install llama-cpp-python` (peers.py does)")

BATCH = 2048  # tokens of a call


class Model:
    """A loaded GGUF and a batch that is filled again and again."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"cannot load {path}")
        self._threads = threads
        self._context: Any = None
        self._batch: Any = llama.llama_batch_init(BATCH, 0, 1)
        self._rng = random.Random(0)

    def begin(self, sequences: int, shared: int, own: int, *, unified: bool) -> None:
        """A context for sequences that share so many random tokens, computed now, and have room for `own` more each."""
        if self._context is not None:
            llama.llama_free(self._context)
        params: Any = llama.llama_context_default_params()
        params.n_ctx = shared + sequences * own if unified else sequences * (shared + own)
        params.n_seq_max, params.n_batch, params.kv_unified = sequences, BATCH, unified
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"no context of {params.n_ctx} tokens")
        for start in range(0, shared, BATCH):
            self.decode([(0, position) for position in range(start, min(start + BATCH, shared))])
        for sequence in range(1, sequences if shared else 0):
            llama.llama_memory_seq_cp(llama.llama_get_memory(self._context), 0, sequence, -1, -1)

    def decode(self, rows: list[tuple[int, int]]) -> float:
        """Run one random token for each (sequence, position), with logits for the last of each; seconds."""
        batch = self._batch
        batch.n_tokens = len(rows)
        last = {sequence: row for row, (sequence, _) in enumerate(rows)}
        for row, (sequence, position) in enumerate(rows):
            batch.token[row], batch.pos[row] = self._rng.randrange(10, 4000), position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = last[sequence] == row
        began = time.perf_counter()
        if llama.llama_decode(self._context, batch):
            raise SystemExit("llama_decode failed")
        llama.llama_synchronize(self._context)
        return time.perf_counter() - began


def measure(model: Model, sequences: int, prompt: int, steps: int, shared: int = 0, unified: bool = False) -> float:
    """The figure of one case."""
    model.begin(sequences, shared, prompt + steps, unified=unified)
    prompts = [range(shared, shared + prompt)] * sequences
    seconds = [model.decode([(sequence, i) for i in prompts[sequence]]) for sequence in range(sequences)]
    if not steps:
        return sequences * prompt / sum(seconds)
    return 1e3 * statistics.median(
        model.decode([(sequence, shared + prompt + step) for sequence in range(sequences)]) for step in range(steps)
    )


def main() -> None:
    """Load, say so, answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    model = Model(args.gguf, args.threads)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"value": measure(model, **json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
