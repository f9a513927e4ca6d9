"""Write a Qwen3 checkpoint of random bf16 weights, dense or with experts: `random_checkpoint.py OUT --size 0.6b`.

Speed does not depend on the values of weights, so no download is needed to compare servers.  The tokenizer is the demo
model's: far smaller than the vocabulary, which does not matter to prompts of token ids.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tokserve.checkpoint import DEMO_DIR

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size")  # fmt: skip
SIZES = {
    "tiny": (256, 768, 4, 8, 4, 32, 4096),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "1b": (2048, 6144, 14, 16, 8, 128, 151936),  # 2 GB
    "30b-a3b-4-layers": (2048, 6144, 4, 32, 4, 128, 32768),  # Qwen3-30B-A3B, cut to fit small machines
    "30b-a3b-2-layers": (2048, 6144, 2, 32, 4, 128, 32768),
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--size", choices=SIZES, required=True)
    args = parser.parse_args()
    shapes = dict(zip(NAMES, SIZES[args.size], strict=True))
    mixture = "a3b" in args.size
    config = AutoConfig.for_model(
        "qwen3_moe" if mixture else "qwen3", **shapes, **(EXPERTS if mixture else {}), tie_word_embeddings=not mixture,
        max_position_embeddings=40960, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, args.out)


if __name__ == "__main__":
    main()
