"""A Ray Data job for tests: `python -m tests.ray.batch ROWS PARAMS FILE` writes its rows to FILE as JSON lines.

Prints "began" when the first row is there.  Every thousandth prompt is longer than the context.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

LONG = 3000  # tokens: more than the demo model's context


def prompt(number: int) -> list[int]:
    """The prompt of a row."""
    return [1] * LONG if number % 1000 == 999 else [2 + number % 250, 3 + number // 250, 7]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """The row without arrays."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}


def main() -> None:
    """The program."""
    rows, params, path = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is not an answer
    import ray

    from tokserve.ray.batch import generate

    ray.init(address=os.environ["RAY_ADDRESS"])
    prompts = [{"number": number, "token_ids": prompt(number)} for number in range(rows)]
    dataset = ray.data.from_items(prompts, override_num_blocks=max(1, rows // 500))
    outputs = generate(
        dataset,
        "demo",
        params,
        replicas=2,
        batch_size=64,
        cpu_threads=1,
        max_num_seqs=32,
        kv_cache_memory_bytes=4 << 20,
    )
    with open(path, "w", encoding="utf-8") as file:
        for count, row in enumerate(outputs.iter_rows()):
            if count == 0:
                print("began", file=answers, flush=True)
            file.write(json.dumps(plain(row)) + "\n")


if __name__ == "__main__":
    main()
