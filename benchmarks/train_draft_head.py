"""Train a small model and its draft head, and write them in the shapes of a larger one: `train_draft_head.py OUT`.

The model reads bytes.  It has four layers of 256; the checkpoint has the layers, widths and vocabulary of `--size`, and
what the trained weights do not fill is zeros, so that it computes the same function at the cost of the larger model:
drafts are accepted as often as those of a trained model, and steps take as long as those of random weights.
`prompts.json` beside the checkpoint has prompts of text that was not trained on, for `speculation.py --prompts`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

from tokserve.checkpoint import DEMO_DIR

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, BYTES = 256, 768, 4, 4, 2, 64, 256
SIZES = {  # hidden, inner, layers, query and KV heads, vocabulary
    "0.6b": (1024, 3072, 28, 16, 8, 151936),
    "1b": (2048, 6144, 14, 16, 8, 151936),
}
BATCH, LENGTH = 16, 192
PROMPT, PROMPTS, HELD_OUT = 160, 8, 20  # bytes; every HELD_OUT-th file is for prompts


def config_of(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Glm4MoeConfig:
    """GLM-4.5's architecture without experts."""
    return Glm4MoeConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=HEAD_DIM, vocab_size=vocab, first_k_dense_replace=layers + 1,
        max_position_embeddings=2048, num_nextn_predict_layers=1, rms_norm_eps=1e-6, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


class Trained(nn.Module):
    """The model and its head.  Logits of the vocabulary that is not trained are zero, and count in the losses."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        config = config_of(HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, BYTES)
        self.base = Glm4MoeForCausalLM(config)
        self.layer = Glm4MoeDecoderLayer(config, 0)
        self.enorm, self.hnorm, self.norm = (Glm4MoeRMSNorm(HIDDEN, 1e-6) for _ in range(3))
        self.eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self._others = torch.log(torch.tensor(float(vocab - BYTES)))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # [batch, tokens] -> two losses
        states = self.base.model(ids).last_hidden_state
        inputs, after = states[:, :-2], ids[:, 1:-1]
        joined = torch.cat([self.enorm(self.base.model.embed_tokens(after)), self.hnorm(inputs)], -1)
        positions = torch.arange(joined.shape[1])[None]
        rope = self.base.model.rotary_emb(joined, positions)
        x = self.layer(self.eh_proj(joined), position_embeddings=rope, attention_mask=None, position_ids=positions)
        return self._loss(states[:, :-1], ids[:, 1:]), self._loss(self.norm(x), ids[:, 2:])

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        logits = self.base.lm_head(states)
        padded = torch.cat([logits, self._others.expand(*logits.shape[:-1], 1)], -1)
        return cross_entropy(padded.flatten(0, 1), targets.flatten())

    def tensors(self) -> dict[str, Tensor]:
        """Under the names of checkpoints."""
        named = {
            name.removeprefix("base."): tensor for name, tensor in self.state_dict().items() if name.startswith("base.")
        }
        prefix = f"model.layers.{LAYERS}."
        named |= {f"{prefix}{name}": tensor for name, tensor in self.layer.state_dict().items()}
        for name in ("enorm", "hnorm", "eh_proj"):
            named[f"{prefix}{name}.weight"] = getattr(self, name).weight
        return named | {f"{prefix}shared_head.norm.weight": self.norm.weight}


def padded(model: dict[str, Tensor], size: str) -> dict[str, Tensor]:
    """The same function in larger shapes, bfloat16."""
    hidden, inner, layers, heads, kv_heads, vocab = SIZES[size]
    assert heads // kv_heads == HEADS // KV_HEADS, "a query head has the same KV head"
    widths = {BYTES: vocab, HIDDEN: hidden, INNER: inner}
    shapes = {
        "q_proj": (heads * HEAD_DIM, hidden),
        "k_proj": (kv_heads * HEAD_DIM, hidden),
        "v_proj": (kv_heads * HEAD_DIM, hidden),
        "o_proj": (hidden, heads * HEAD_DIM),
        "embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    result: dict[str, Tensor] = {}
    for name, tensor in model.items():
        module = name.split(".")[-2]
        if module == "eh_proj":
            wide = torch.zeros(hidden, 2 * hidden)
            wide[:HIDDEN, :HIDDEN], wide[:HIDDEN, hidden : hidden + HIDDEN] = tensor.chunk(2, dim=1)
        elif tensor.ndim == 1:  # a norm divides by the root of the mean of squares, of which most are zero now
            wide = torch.zeros(widths[HIDDEN])
            wide[:HIDDEN] = tensor * (HIDDEN / hidden) ** 0.5
        else:
            wide = torch.zeros(shapes[module])
            wide[: tensor.shape[0], : tensor.shape[1]] = tensor
        result[name.replace(f"layers.{LAYERS}.", f"layers.{layers}.")] = wide.bfloat16()
    for layer in range(LAYERS, layers):  # they add nothing
        for name, tensor in list(result.items()):
            if name.startswith("model.layers.0."):
                adds = name.split(".")[-2] in ("o_proj", "down_proj")
                result[name.replace("layers.0.", f"layers.{layer}.", 1)] = (
                    torch.zeros_like(tensor) if adds else tensor.clone()
                )
    return result


def read_text(pattern: str) -> tuple[list[bytes], list[bytes]]:
    """Files to train on, and files for prompts."""
    files = [path.read_bytes() for path in sorted(Path().glob(pattern))]
    return [text for i, text in enumerate(files) if i % HELD_OUT], files[::HELD_OUT]


def train(model: Trained, text: bytes, seconds: float, seed: int) -> None:
    """Train for so long, on random pieces of the text."""
    data, rng = torch.frombuffer(bytearray(text), dtype=torch.uint8), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    began, step = time.perf_counter(), 0
    while (done := (time.perf_counter() - began) / seconds) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1.0 - 0.95 * done)
        starts = [rng.randrange(len(data) - LENGTH) for _ in range(BATCH)]
        losses = model(torch.stack([data[start : start + LENGTH] for start in starts]).long())
        optimizer.zero_grad()
        (losses[0] + 0.5 * losses[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(
                f"step {step}: {losses[0].item():.3f} of the next byte, {losses[1].item():.3f} of the one after",
                flush=True,
            )
        step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    add("out", type=Path, help="directory of the checkpoint")
    add("--size", choices=SIZES, default="0.6b", help="its shapes. Default: 0.6b.")
    add("--minutes", type=float, default=6.0, help="of training. Default: 6.")
    add("--text", default="tokserve/**/*.py", help="glob of the text. Default: this package.")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    hidden, inner, layers, heads, kv_heads, vocab = SIZES[args.size]
    model, (texts, held_out) = Trained(vocab), read_text(args.text)
    train(model, b"\n".join(texts), 60 * args.minutes, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    config = config_of(hidden, inner, layers, heads, kv_heads, vocab).to_dict()
    named = {"architectures": ["Glm4MoeForCausalLM"], "dtype": "bfloat16"}
    (args.out / "config.json").write_text(json.dumps(config | named, indent=1, default=str))
    save_file(padded(model.tensors(), args.size), args.out / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, args.out)
    prompts = [list(text[len(text) // 2 :][:PROMPT]) for text in held_out if len(text) > 4 * PROMPT]
    (args.out / "prompts.json").write_text(json.dumps(prompts[:PROMPTS]))


if __name__ == "__main__":
    main()
