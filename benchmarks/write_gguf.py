"""Write a Qwen3 checkpoint, dense or with experts, as GGUF: `LLAMA_PYTHON write_gguf.py FOLDER OUT.gguf [--type Q8_0]`.

Run by a Python that has the `gguf` package and numpy.  It is for measuring, so it has no tokenizer: ids go in and
out.  Matrices are of one type; norms are float32, as llama.cpp wants them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import gguf
    import numpy as np
except ImportError as error:
    sys.exit(f"write_gguf.py needs {error.name}: run it by a Python with `pip install gguf`")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bf16 values, as float32, of a folder's safetensors files."""
    for path in sorted(folder.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, "r")
        size = int(raw[:8].view(np.uint64)[0])
        header = json.loads(raw[8 : 8 + size].tobytes())
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{name} is {entry['dtype']}, only BF16 is read")
            begin, end = entry["data_offsets"]
            words = raw[8 + size + begin : 8 + size + end].tobytes()
            values = np.frombuffer(words, np.uint16).astype(np.uint32) << 16
            yield name, values.view(np.float32).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    """llama.cpp's name of a checkpoint's tensor."""
    outer = name.removesuffix(".weight")
    if outer in OUTER:
        return OUTER[outer] + ".weight"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", outer)
    if not match or match[2] not in NAMES:
        raise SystemExit(f"unknown tensor {name}")
    return f"blk.{match[1]}.{NAMES[match[2]]}.weight"


def write(folder: Path, out: str, kind: gguf.GGMLQuantizationType) -> None:
    """Write the file."""
    config = json.loads((folder / "config.json").read_text())
    experts = config.get("num_experts") or config.get("num_local_experts")
    writer = gguf.GGUFWriter(out, "qwen3moe" if experts else "qwen3")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors(folder):
        expert = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight", name)
        if expert:
            whole = f"blk.{expert[1]}.{EXPERTS[expert[3]]}.weight"
            stack = stacks.setdefault(whole, {})
            stack[int(expert[2])] = gguf.quants.quantize(values, kind)
            if len(stack) == experts:
                packed = np.stack([stacks[whole].pop(number) for number in range(experts)])
                writer.add_tensor(whole, packed, raw_dtype=kind)
        elif values.ndim == 1 or "mlp.gate." in name:
            writer.add_tensor(gguf_name(name), values.copy())
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out")
    parser.add_argument("--type", choices=["BF16", "Q8_0", "Q4_0", "Q4_1"], default="BF16")
    args = parser.parse_args()
    write(args.checkpoint, args.out, gguf.GGMLQuantizationType[args.type])


if __name__ == "__main__":
    main()
