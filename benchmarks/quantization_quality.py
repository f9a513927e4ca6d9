"""What quantization costs on a real model: `quantization_quality.py DIRECTORY [--gguf FILE] [--tokens N]`.

The text is documentation of the standard library (`pydoc`).  A float32 engine scores it first; for each of the other
options: perplexity, the mean absolute difference of the text's logprobs, and the Kullback-Leibler divergence.  KL is
taken over the `TOP` most probable tokens of the float32 model and the mass of all others as one more outcome; that is a
lower bound, and close to it where the mass of the others is small (also printed).
"""

from __future__ import annotations

import argparse
import pydoc
from typing import Any

import numpy as np

from tokserve import LLM, SamplingParams

MODULES = ("json", "argparse", "heapq", "random", "textwrap", "csv", "zipfile", "sched", "bisect", "shelve")
WINDOW = 512  # tokens of a prompt
TOP = 64
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4, groups of 32": {"quantization": "int4", "quantization_group_size": 32},
    "int4, groups of 64": {"quantization": "int4", "quantization_group_size": 64},
    "int4, groups of 128": {"quantization": "int4", "quantization_group_size": 128},
    "int4, groups of 32, activations int8": {
        "quantization": "int4",
        "quantization_group_size": 32,
        "quantization_activations": "int8",
    },
    "int4, groups of 128, activations int8": {
        "quantization": "int4",
        "quantization_group_size": 128,
        "quantization_activations": "int8",
    },
}


def text() -> str:
    """Pages of documentation, one after another."""
    return "\n\n".join(pydoc.plain(pydoc.render_doc(module)) for module in MODULES)


class Scores:
    """The logprob of every token but the first of each window, and the logprobs of the most probable ones."""

    def __init__(self, llm: LLM, prompts: list[list[int]], top: int) -> None:
        params = SamplingParams(max_tokens=1, prompt_logprobs=top, temperature=0.0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        columns = [output.prompt_logprobs for output in outputs]
        self.tokens = np.concatenate([np.asarray(one.token_logprobs, np.float64) for one in columns])
        self.ids = [
            dict(zip(i.tolist(), p.tolist(), strict=True))
            for one in columns
            for i, p in zip(one.top_ids, one.top_logprobs, strict=True)
        ]


def divergence(reference: Scores, scores: Scores) -> tuple[float, float]:
    """Mean KL(reference || scores), and the mean mass outside of what both list."""
    total = outside = 0.0
    for expected, actual in zip(reference.ids, scores.ids, strict=True):
        both = [token for token in list(expected)[:TOP] if token in actual]
        p = np.exp([expected[token] for token in both])
        q = np.exp([actual[token] for token in both])
        rest_p, rest_q = max(1.0 - p.sum(), 1e-9), max(1.0 - q.sum(), 1e-9)
        total += float((p * np.log(p / q)).sum() + rest_p * np.log(rest_p / rest_q))
        outside += rest_p
    return total / len(reference.ids), outside / len(reference.ids)


def main() -> None:
    """Print a row for each option."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--gguf")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", action="append", help="an option by its name; may be given several times")
    args = parser.parse_args()
    cases = [("float32", args.checkpoint, {"dtype": "float32"})]
    cases += [(name, args.checkpoint, {"dtype": "bfloat16"} | options) for name, options in OPTIONS.items()]
    if args.gguf:
        cases.append(("GGUF in bfloat16", args.gguf, {"dtype": "bfloat16"}))
        rounded = {"dtype": "bfloat16", "quantization_activations": "int8"}
        cases.append(("GGUF in bfloat16, activations int8", args.gguf, rounded))
    if args.only:
        cases = [case for case in cases if case[0] in ("float32", *args.only)]
    reference: Scores | None = None
    prompts: list[list[int]] = []
    print("| model | perplexity | mean abs dlogprob | KL | mass outside |\n|---|---|---|---|---|", flush=True)
    for name, model, options in cases:
        with LLM(model, max_model_len=WINDOW + 8, max_logprobs=8 * TOP, enable_prefix_caching=False, **options) as llm:
            if reference is None:
                assert llm.tokenizer is not None
                ids = llm.tokenizer.encode(text())[: args.tokens]
                prompts = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
            scores = Scores(llm, prompts, TOP if reference is None else 8 * TOP)
        reference = reference or scores
        kl, outside = divergence(reference, scores)
        difference = np.abs(scores.tokens - reference.tokens).mean()
        perplexity = np.exp(-scores.tokens.mean())
        print(f"| {name} | {perplexity:.3f} | {difference:.4f} | {kl:.4f} | {outside:.3f} |", flush=True)


if __name__ == "__main__":
    main()
