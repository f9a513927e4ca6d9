"""Forward and backward of a policy: `tokserve.train.PolicyModel` beside transformers, with random weights.

    python -m benchmarks.on_policy --impl tokserve --model smollm2 --dtype bfloat16
    python -m benchmarks.on_policy --impl transformers --model smollm2 --dtype bfloat16 --rows groups
    python -m benchmarks.on_policy --impl tokserve --model qwen3-8b --layers 6 --rows long --device cuda

Prints one line of JSON: the best and the median seconds of the rounds, and the process's peak memory, or with `--device
cuda` the GPU's.  `--rows`: `even` (8 rows of 256 tokens), `long` (8 of 1024), `groups` (one prompt of 512 tokens, 8
completions of 64), `turns` (2 rollouts of an agent of 6 turns of 96 tokens, a row for each turn with all before it, its
last 48 tokens scored), `branches` (8 rollouts of 6 turns of 96 tokens, a row each without padding, that leave the first
one after 0 to 5 turns).  The loss is the mean of all logprobs times a fixed advantage for each row.  transformers gets
one batch, padded at the right, with its default attention.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny_models import tiny_config, write_checkpoint

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-8b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3.5-0.8b": (
        "qwen3_5_text",
        {
            "vocab_size": 32768,  # of 248,320, so that the head does not hide the layers
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "layer_types": None,  # attention in every fourth
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
        },
    ),
}


def sequences(kind: str, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Token ids of the rows, and where the scored part of each begins."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(0, vocab, (count,), generator=generator).tolist()
        return drawn

    if kind == "even":
        return [tokens(256) for _ in range(8)], [1] * 8
    if kind == "long":
        return [tokens(1024) for _ in range(8)], [1] * 8
    if kind == "groups":
        prompt = tokens(512)
        return [prompt + tokens(64) for _ in range(8)], [512] * 8
    if kind == "branches":
        first = tokens(6 * 96)
        return [first[: 96 * turn] + tokens((6 - turn) * 96) for turn in (6, 0, 1, 2, 3, 4, 5, 3)], [96] * 8
    system = tokens(96)
    rollouts = [system + tokens(5 * 96) for _ in range(2)]
    return [rollout[: 96 * turn] for rollout in rollouts for turn in range(1, 7)], [
        96 * t - 48 for t in range(1, 7)
    ] * 2


def with_tokserve(
    directory: Path, dtype: str, device: str, share: bool, activation_bytes: int | None
) -> tuple[torch.nn.Module, Callable[..., Any]]:
    """The model, and what makes its rows of logprobs."""
    from tokserve.train import PolicyModel

    policy = PolicyModel.from_pretrained(directory, dtype, device=device, activation_bytes=activation_bytes)
    return policy, lambda rows, starts: policy.logprobs(rows, starts, share_prefixes=share)


def with_transformers(directory: Path, dtype: str, device: str) -> tuple[torch.nn.Module, Callable[..., Any]]:
    """Likewise; logprobs as TRL computes them, row by row in bfloat16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device)

    def logprobs(rows: list[list[int]], starts: list[int]) -> list[Tensor]:
        length = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
        keep = length - min(starts) + 1
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits
        first = length - keep
        scored = []
        for row, start, row_logits in zip(rows, starts, logits, strict=True):
            part = row_logits[start - 1 - first : len(row) - 1 - first].log_softmax(-1)
            scored.append(part.gather(1, torch.tensor(row[start:], device=device)[:, None])[:, 0])
        return scored

    return model, logprobs


def peak_kib(on_gpu: bool) -> int:
    """The most memory that the process has taken, or that torch has of the GPU."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=["tokserve", "transformers"], required=True)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", choices=["even", "long", "groups", "turns", "branches"], default="even")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ordered", action="store_true", help="ordered_gradients")
    parser.add_argument("--no-share", action="store_true")
    parser.add_argument("--activation-bytes", type=int)
    options = parser.parse_args()
    family, shape = MODELS[options.model]
    shape = shape | ({"num_hidden_layers": options.layers} if options.layers else {})
    config = tiny_config(family, **shape, dtype="bfloat16")
    rows, starts = sequences(options.rows, config["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), config)
        if options.impl == "tokserve":
            model, logprobs = with_tokserve(
                path, options.dtype, options.device, not options.no_share, options.activation_bytes
            )
        else:
            model, logprobs = with_transformers(path, options.dtype, options.device)
    on_gpu = options.device == "cuda"
    loaded = peak_kib(on_gpu)
    if options.ordered:
        model.ordered_gradients = True
    advantages = torch.linspace(-1.0, 1.0, len(rows))
    forward, both = [], []
    for _ in range(options.rounds + 1):
        began = time.perf_counter()
        with torch.no_grad():
            logprobs(rows, starts)
        if on_gpu:
            torch.cuda.synchronize()
        forward.append(time.perf_counter() - began)
    for _ in range(options.rounds):
        model.zero_grad()
        began = time.perf_counter()
        scored = logprobs(rows, starts)
        torch.stack([row.float().mean() * a for row, a in zip(scored, advantages, strict=True)]).sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
        both.append(time.perf_counter() - began)
    peak = peak_kib(on_gpu)
    print(
        json.dumps(
            {
                **vars(options),
                "forward_s": round(min(forward[1:]), 3),
                "forward_median_s": round(statistics.median(forward[1:]), 3),
                "both_s": round(min(both), 3),
                "both_median_s": round(statistics.median(both), 3),
                "loaded_MiB": loaded >> 10,
                "peak_MiB": peak >> 10,
            }
        )
    )


if __name__ == "__main__":
    main()
