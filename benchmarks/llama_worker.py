"""llama.cpp through its bindings, for `peers.py`: a line of JSON in is a case, a line of JSON out its figure.

Run by a Python that has llama-cpp-python; it must not import tokserve.  What is timed is `llama_decode` alone, without
sampling and without HTTP: the most favourable reading.  Cases: `{"sequences": s, "prompt": p, "steps": n}` gives the
median milliseconds of a step that decodes one token in each of s sequences; with `steps` 0, the prompt's tokens per
second, one prompt after the other.  `"shared": m` puts m tokens before the prompts that all sequences share: computed
once, and their cells belong to every sequence.
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

SEQUENCES, CELLS = 64, 20480  # the most sequences at once, and tokens in all of them


class Model:
    """A loaded GGUF and a batch that is filled again and again."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"cannot load {path}")
        params: Any = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.kv_unified = CELLS, SEQUENCES, 2048, True
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, params)
        self._batch: Any = llama.llama_batch_init(2048, 0, 1)
        self._rng = random.Random(0)

    def clear(self) -> None:
        """Forget all sequences."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def share(self, tokens: int) -> None:
        """Let all sequences begin with as many random tokens, computed once."""
        for start in range(0, tokens, 2048):
            self.decode([(0, position) for position in range(start, min(start + 2048, tokens))])
        for sequence in range(1, SEQUENCES):
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


def measure(model: Model, sequences: int, prompt: int, steps: int, shared: int = 0) -> float:
    """The figure of one case."""
    model.clear()
    model.share(shared)
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
