"""Write a checkpoint of Qwen3, dense or with experts, or gpt-oss as GGUF.

`LLAMA_PYTHON write_gguf.py FOLDER OUT.gguf [--type Q8_0]`, by a Python that has the `gguf` package and numpy.  It is
for measuring, so it has no tokenizer: ids go in and out.  Matrices are of one type, except that experts stored as MXFP4
stay what they are; norms and biases are float32, as llama.cpp wants them.
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
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
}
GPT_OSS = {"post_attention_layernorm": "post_attention_norm"}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Checkpoint:
    """The tensors of a folder's safetensors files, mapped."""

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, tuple[np.ndarray, str]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            raw = np.memmap(path, np.uint8, "r")
            size = int(raw[:8].view(np.uint64)[0])
            header = json.loads(raw[8 : 8 + size].tobytes())
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] not in ("BF16", "U8"):
                    raise SystemExit(f"{name} is {entry['dtype']}, only BF16 and U8 are read")
                begin, end = entry["data_offsets"]
                data = raw[8 + size + begin : 8 + size + end]
                self._entries[name] = (data.reshape(*entry["shape"], -1), entry["dtype"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def data(self, name: str) -> np.ndarray:
        """The bytes of each number, in the last dimension."""
        return self._entries[name][0]

    def floats(self, name: str) -> np.ndarray:
        """A tensor of bf16, as float32."""
        data, dtype = self._entries[name]
        if dtype != "BF16":
            raise SystemExit(f"{name} is {dtype}, expected BF16")
        return widened(data)


def widened(data: np.ndarray) -> np.ndarray:
    """The bytes of bf16 numbers as float32."""
    words = np.ascontiguousarray(data).view(np.uint16)[..., 0]
    return (words.astype(np.uint32) << 16).view(np.float32)


def gguf_name(name: str, names: dict[str, str]) -> str:
    """llama.cpp's name of a checkpoint's tensor."""
    outer, _, kind = name.rpartition(".")
    if kind == "sinks":
        outer, kind = name, "weight"
    if outer in OUTER:
        return f"{OUTER[outer]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", outer)
    if not match or match[2] not in names:
        raise SystemExit(f"unknown tensor {name}")
    return f"blk.{match[1]}.{names[match[2]]}.{kind}"


def mxfp4(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """[E,N,G,16] and [E,N,G] as llama.cpp has them: an exponent, then 16 bytes, whose low halves are the first 16."""
    codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:3], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate((exponents[..., None], packed), -1).reshape(*blocks.shape[:2], -1)


class Writer:
    """A GGUF file in the making."""

    def __init__(self, folder: Path, out: str, kind: gguf.GGMLQuantizationType) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors, self.kind = Checkpoint(folder), kind
        self.gpt_oss = self.config["model_type"] == "gpt_oss"
        self.experts = self.config.get("num_experts") or self.config.get("num_local_experts")
        self.names = NAMES | (GPT_OSS if self.gpt_oss else {})
        arch = "gpt-oss" if self.gpt_oss else "qwen3moe" if self.experts else "qwen3"
        self.writer = gguf.GGUFWriter(out, arch, use_temp_file=True)

    def add(self, name: str, values: np.ndarray) -> None:
        """Add a matrix, or all experts' matrices."""
        self.writer.add_tensor(name, gguf.quants.quantize(values, self.kind), raw_dtype=self.kind)

    def add_config(self) -> None:
        """What the model is."""
        config, writer = self.config, self.writer
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(config["num_experts_per_tok"])
            inner = config["intermediate_size"] if self.gpt_oss else config["moe_intermediate_size"]
            writer.add_expert_feed_forward_length(inner)
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
        if self.gpt_oss:
            writer.add_sliding_window(config["sliding_window"])
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_tokenizer_model("none")

    def add_layer_experts(self, layer: str) -> None:
        """Add a layer's experts, each in tensors of its own."""
        for projection, name in EXPERTS.items():
            names = [f"model.layers.{layer}.mlp.experts.{e}.{projection}.weight" for e in range(self.experts)]
            packed = np.stack([gguf.quants.quantize(self.tensors.floats(one), self.kind) for one in names])
            self.writer.add_tensor(f"blk.{layer}.{name}.weight", packed, raw_dtype=self.kind)

    def add_stacked_experts(self, layer: str, tensor: str) -> None:
        """Add a tensor of gpt-oss that holds all experts of a layer, gate and up outputs in turns."""
        prefix, block = f"model.layers.{layer}.mlp.experts.{tensor}", f"blk.{layer}."
        projection, _, kind = tensor.partition("_proj")
        shards = [("ffn_gate_exps", 0), ("ffn_up_exps", 1)] if projection == "gate_up" else [("ffn_down_exps", None)]
        for name, first in shards:
            rows = slice(first, None, None if first is None else 2)
            if kind == "_bias":
                self.writer.add_tensor(f"{block}{name}.bias", self.tensors.floats(prefix)[:, rows].copy())
            elif kind == "_blocks":
                scales = self.tensors.data(prefix.removesuffix("_blocks") + "_scales")[:, rows, :, 0]
                packed = mxfp4(self.tensors.data(prefix)[:, rows, ..., 0], scales)
                self.writer.add_tensor(f"{block}{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            elif not kind:
                data = self.tensors.data(prefix)
                experts = [np.ascontiguousarray(widened(expert)[:, rows].T) for expert in data]
                packed = np.stack([gguf.quants.quantize(expert, self.kind) for expert in experts])
                self.writer.add_tensor(f"{block}{name}.weight", packed, raw_dtype=self.kind)

    def write(self) -> None:
        """Write the file."""
        self.add_config()
        for name in self.tensors:
            expert = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(.+)", name)
            if expert and self.gpt_oss:
                self.add_stacked_experts(expert[1], expert[2])
            elif expert:
                if expert[2] == "0.gate_proj.weight":
                    self.add_layer_experts(expert[1])
            elif (values := self.tensors.floats(name)).ndim == 1 or ".mlp.gate." in name or ".mlp.router." in name:
                self.writer.add_tensor(gguf_name(name, self.names), values)
            else:
                self.add(gguf_name(name, self.names), values)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out")
    parser.add_argument("--type", choices=["BF16", "Q8_0", "Q4_0", "Q4_1"], default="BF16")
    args = parser.parse_args()
    Writer(args.checkpoint, args.out, gguf.GGMLQuantizationType[args.type]).write()


if __name__ == "__main__":
    main()
