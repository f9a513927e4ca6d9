"""Trains the demo model that ships with tokserve, from nothing, on two CPU cores.

A server needs a model to be tried, tested and measured with, and the public ones are too large to put in a
package. This script makes one that is small enough (about 3 MB) and still does something that can be checked:
short arithmetic and word puzzles. It writes a complete Hugging Face model directory (Qwen3 architecture,
byte-level BPE tokenizer, ChatML template), so that the server treats it like any other checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tasks import TASKS, Example
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Only words that begin with a capital become tokens of several letters: digits and the letters of a puzzle's
# word stay one token each, which is what makes the puzzles learnable by a model of this size.
MERGED_WORDS = ("What", "Subtract", "Reverse", "Spell", "Sort", "How", "Count")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are a calculator.", "Be concise.")
# Shares of the tasks among the examples: the slower one is learnt, the larger its share.
TASK_WEIGHTS = {"add": 1.6, "subtract": 1.8, "reverse": 0.6, "sort": 0.8, "count": 1.4}
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' + tools | map(attribute='function.name') | join(', ') + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content if part.type == 'text' %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
IGNORED = -100


@dataclass(frozen=True)
class Shape:
    """One kind of batch: conversations alike in length, so that little of the batch is padding."""

    share: float
    rows: int
    turns: int
    system: bool


@dataclass(frozen=True)
class Batch:
    """Token ids padded on the right, and the targets: the answers' tokens, IGNORED elsewhere."""

    ids: torch.Tensor
    targets: torch.Tensor


SHAPES = (
    Shape(0.80, 192, turns=1, system=False),
    Shape(0.10, 112, turns=1, system=True),
    Shape(0.10, 64, turns=3, system=False),
)


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer made by hand: the 256 bytes, MERGED_WORDS, the special tokens."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in MERGED_WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    return tokenizer


def build_config(tokenizer: Tokenizer) -> Qwen3Config:
    """The architecture: four Qwen3 layers with three query heads to each key/value head."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


class BatchMaker:
    """Draws fresh random conversations without end; nothing is ever repeated on purpose."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._names = list(TASK_WEIGHTS)
        self._weights = list(TASK_WEIGHTS.values())
        pad = tokenizer.token_to_id(END_OF_TEXT)
        assert pad is not None
        self._pad = pad

    def draw(self) -> Batch:
        """A training batch of one of the SHAPES, its tasks mixed by TASK_WEIGHTS."""
        shape = self._rng.choices(SHAPES, weights=[shape.share for shape in SHAPES])[0]
        names = self._rng.choices(self._names, weights=self._weights, k=shape.rows * shape.turns)
        examples = [TASKS[name].example(self._rng) for name in names]
        rows = [examples[start : start + shape.turns] for start in range(0, len(examples), shape.turns)]
        prompts = [self._rng.choice(SYSTEM_PROMPTS) if shape.system else None for _ in rows]
        return self._encode(list(zip(prompts, rows, strict=True)))

    def draw_task(self, name: str, count: int) -> Batch:
        """Single questions of one task, for an evaluation."""
        return self._encode([(None, [TASKS[name].example(self._rng)]) for _ in range(count)])

    def _encode(self, conversations: list[tuple[str | None, list[Example]]]) -> Batch:
        """Lay out the conversations as the chat template does, and mark the answers and their ends."""
        pieces: list[tuple[int, str, bool]] = []
        for row, (system, examples) in enumerate(conversations):
            opening = f"{TURN_START}system\n{system}{TURN_END}\n" if system else ""
            for example in examples:
                question = f"{TURN_START}user\n{example.question}{TURN_END}\n{TURN_START}assistant\n"
                pieces.append((row, opening + question, False))
                pieces.append((row, example.answer + TURN_END, True))
                opening = "\n"
        ids: list[list[int]] = [[] for _ in conversations]
        targets: list[list[int]] = [[] for _ in conversations]
        encoded = self._tokenizer.encode_batch_fast([text for _, text, _ in pieces])
        for (row, _, answer), encoding in zip(pieces, encoded, strict=True):
            ids[row] += encoding.ids
            targets[row] += encoding.ids if answer else [IGNORED] * len(encoding.ids)
        longest = max(map(len, ids))
        return Batch(_pad_rows(ids, longest, self._pad), _pad_rows(targets, longest, IGNORED))


def _pad_rows(rows: list[list[int]], length: int, value: int) -> torch.Tensor:
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


def answer_logits(model: Qwen3ForCausalLM, batch: Batch, bf16: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and targets at the answers' tokens only, and the row that each of them belongs to."""
    rows, columns = (batch.targets[:, 1:] != IGNORED).nonzero(as_tuple=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        # Padding is on the right, so causal attention alone keeps it away from the answers.
        hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[rows, columns]).float()
    return logits, batch.targets[rows, columns + 1], rows


@torch.no_grad()
def exact_rates(model: Qwen3ForCausalLM, maker: BatchMaker, count: int, bf16: bool) -> dict[str, float]:
    """Share of exact answers per task under greedy decoding.

    An answer would be generated exactly if and only if each of its tokens is the likeliest one after the
    right beginning, so a single pass over the whole answer is enough.
    """
    rates = {}
    for name in TASKS:
        logits, targets, rows = answer_logits(model, maker.draw_task(name, count), bf16)
        wrong = set(rows[logits.argmax(-1) != targets].tolist())
        rates[name] = 1 - len(wrong) / count
    return rates


def schedule(steps: int, warmup: int) -> Callable[[int], float]:
    """Factor of the learning rate: a linear rise over the warm-up, then a cosine down to nearly nothing."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor


def build_optimizers(model: Qwen3ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which here needs about half of AdamW's steps, and AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def train(args: argparse.Namespace, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Train a fresh model for the number of steps asked for, and report on the way."""
    torch.manual_seed(args.seed)
    model = Qwen3ForCausalLM(build_config(tokenizer))
    # With sequences this short, plain attention has a much faster backward pass on a CPU than the fused one.
    model.set_attn_implementation("eager")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    optimizers = build_optimizers(model, args.lr)
    shape = schedule(args.steps, args.warmup)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in optimizers]
    maker, checker = BatchMaker(tokenizer, args.seed), BatchMaker(tokenizer, args.seed + 1)
    started, losses = time.monotonic(), []
    for step in range(1, args.steps + 1):
        logits, targets, _ = answer_logits(model, maker.draw(), args.bf16)
        loss = torch.nn.functional.cross_entropy(logits, targets)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        losses.append(loss.item())
        if step % args.report == 0 or step == args.steps:
            rates = exact_rates(model, checker, 512, args.bf16)
            table = "  ".join(f"{name} {rate:6.1%}" for name, rate in rates.items())
            mean = sum(losses) / len(losses)
            seconds = time.monotonic() - started
            print(f"step {step:5}  {seconds:6.0f} s  loss {mean:.4f}  {table}", flush=True)
            losses = []
    return model


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model directory: weights in bfloat16, configurations, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embeddings
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    end, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    write_json(out / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": pad})
    # The names that published checkpoints use and every version of transformers reads.
    config = model.config.to_diff_dict()
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    write_json(out / "config.json", config | {"torch_dtype": "bfloat16"})
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.max_position_embeddings,
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    default_out = Path(__file__).resolve().parents[2] / "tokserve" / "demo_model"
    parser = argparse.ArgumentParser(
        description="Train tokserve's demo model from scratch; write it as a Hugging Face model directory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=default_out, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=1, help="seed of the initial weights and of the examples")
    parser.add_argument("--steps", type=int, default=2200, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps over which the learning rate rises")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to use")
    parser.add_argument("--report", type=int, default=250, help="steps between two reports")
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute in bfloat16; turn it off on a CPU without bfloat16 instructions",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    model = train(args, tokenizer)
    save(model, tokenizer, args.out)
    size = sum(path.stat().st_size for path in args.out.iterdir() if path.is_file())
    print(f"wrote {args.out} ({size / 1e6:.2f} MB); {time.process_time():.0f} s of CPU time in all")


if __name__ == "__main__":
    main()
