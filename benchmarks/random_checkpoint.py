"""Write a Qwen3 or gpt-oss checkpoint of random weights: `random_checkpoint.py OUT --size 0.6b [--mxfp4 | --float8]`.

Weights are bf16; with `--mxfp4`, the experts of gpt-oss are MXFP4, and with `--float8` the projections and experts of
Qwen3 are float8 in blocks of 128 x 128, as in the released models.  Speed does not depend on
the values of weights, so no download is needed to compare servers.  The tokenizer is the demo model's: far smaller than
the vocabulary, which does not matter to prompts of token ids.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tokserve.checkpoint import DEMO_DIR

NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
SIZES = {
    "tiny": (256, 768, 4, 8, 4, 32, 4096),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "1b": (2048, 6144, 14, 16, 8, 128, 151936),  # 2 GB
    "30b-a3b-4-layers": (2048, 6144, 4, 32, 4, 128, 32768),  # Qwen3-30B-A3B, cut to fit small machines
    "30b-a3b-2-layers": (2048, 6144, 2, 32, 4, 128, 32768),
    "gpt-oss-20b-4-layers": (2880, 2880, 4, 64, 8, 64, 32768),  # gpt-oss-20b, likewise
    "gpt-oss-20b-2-layers": (2880, 2880, 2, 64, 8, 64, 32768),
}
OPTIONS: dict[str, dict[str, Any]] = {  # by model type
    "qwen3": {"tie_word_embeddings": True, "max_position_embeddings": 40960},
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "tie_word_embeddings": False,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
    },
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
SCALE = 2e-4  # of all blocks: values are about 0.02


def model_type(size: str) -> str:
    """The family of a size."""
    return "gpt_oss" if "gpt-oss" in size else "qwen3_moe" if "a3b" in size else "qwen3"


def mxfp4_tensors(config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Names and random values of a gpt-oss model's tensors, experts as blocks and scales."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, empty in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = empty.shape
            groups = (experts, outputs, inputs // 32)
            yield f"{name}_blocks", torch.randint(256, (*groups, 16), dtype=torch.uint8)
            yield f"{name}_scales", torch.randint(119, 122, groups, dtype=torch.uint8)  # values of about 0.02
        elif "norm" in name:
            yield name, torch.ones(empty.shape, dtype=torch.bfloat16)
        else:
            yield name, torch.empty(empty.shape, dtype=torch.bfloat16).normal_(std=0.02)


def float8_tensors(config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Names and random values of a Qwen3 model's tensors, projections as float8 with scales."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, empty in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            prefix, (experts, both, width) = name.removesuffix("gate_up_proj"), empty.shape
            for expert in range(experts):
                for half in ("gate", "up"):
                    yield from float8_weight(f"{prefix}{expert}.{half}_proj.weight", both // 2, width)
        elif name.endswith("experts.down_proj"):
            for expert in range(empty.shape[0]):
                yield from float8_weight(f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", *empty.shape[1:])
        elif "_proj" in name:
            yield from float8_weight(name, *empty.shape)
        elif "norm" in name:
            yield name, torch.ones(empty.shape, dtype=torch.bfloat16)
        else:
            yield name, torch.empty(empty.shape, dtype=torch.bfloat16).normal_(std=0.02)


def float8_weight(name: str, rows: int, columns: int) -> Iterator[tuple[str, Tensor]]:
    """A matrix and its scales."""
    yield name, torch.empty(rows, columns).normal_(std=0.02 / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
    yield name + "_scale_inv", torch.full((-(-rows // 128), -(-columns // 128)), SCALE)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--mxfp4", action="store_true", help="experts as MXFP4 (gpt-oss)")
    parser.add_argument("--float8", action="store_true", help="projections and experts as float8 (Qwen3)")
    args = parser.parse_args()
    family = model_type(args.size)
    if args.mxfp4 and family != "gpt_oss":
        parser.error("--mxfp4 needs a size of gpt-oss")
    if args.float8 and family == "gpt_oss":
        parser.error("--float8 needs a size of Qwen3")
    shapes = dict(zip(NAMES, SIZES[args.size], strict=True))
    config = AutoConfig.for_model(family, **shapes, **OPTIONS[family], eos_token_id=2, bos_token_id=None)
    torch.manual_seed(0)
    if args.mxfp4:
        tensors = dict(mxfp4_tensors(config))
        config.quantization_config, config.architectures, config.dtype = MXFP4, ["GptOssForCausalLM"], torch.bfloat16
        config.save_pretrained(args.out)
        save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    elif args.float8:
        config.quantization_config, config.dtype = FLOAT8, torch.bfloat16
        config.architectures = ["Qwen3MoeForCausalLM" if family == "qwen3_moe" else "Qwen3ForCausalLM"]
        config.save_pretrained(args.out)
        save_file(dict(float8_tensors(config)), args.out / "model.safetensors", metadata={"format": "pt"})
    else:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, args.out)


if __name__ == "__main__":
    main()
