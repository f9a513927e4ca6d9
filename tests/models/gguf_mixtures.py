"""Writes tiny mixtures of experts as GGUF files, under llama.cpp's names and in its layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file
from torch import Tensor

from tests.models import gguf_models

FAMILIES = {"qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe", "gpt-oss": "gpt_oss", "llama": "mixtral"}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SHARDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def write(path: Path, checkpoint: Path, architecture: str, kinds: dict[str, str]) -> dict[str, Tensor]:
    """Write a checkpoint as a file whose experts' gate, up and down matrices, and other ones (""), are of these types.

    Returns what the file means, under the names of the checkpoint.
    """
    hf = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    writer = GGUFWriter(path, architecture)
    _metadata(writer, architecture, hf)
    dequantized: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.(.+)", name)
        expert = re.search(r"experts\.(\d+)\.(\w+)\.weight", name)
        if layer and expert:
            stacks.setdefault(f"blk.{layer[1]}.ffn_{SHARDS[expert[2]]}_exps.weight", {})[int(expert[1])] = tensor
        elif layer and ".experts." in name:
            dequantized[name] = _stacked(writer, layer[1], name.rpartition(".")[2], tensor, kinds)
        else:
            dequantized[name] = _single(writer, name, tensor, architecture, hf, kinds[""])
    for name, experts in stacks.items():
        dequantized |= _experts(writer, name, experts, architecture, kinds[name.split("_")[1]])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return dequantized


def _add(writer: GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: str) -> Tensor:
    """Write a matrix, or one for each expert; returns what it means."""
    values = np.ascontiguousarray(values)
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
        return torch.from_numpy(values.copy())
    raw = gguf_models.blocks(values.reshape(-1, values.shape[-1]), kind)
    writer.add_tensor(name, raw.reshape(*values.shape[:-1], -1), raw_dtype=GGMLQuantizationType[kind])
    return torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]).reshape(values.shape))


def _single(writer: GGUFWriter, name: str, tensor: Tensor, architecture: str, hf: dict[str, Any], kind: str) -> Tensor:
    values, (stem, _, ending) = tensor.float().numpy(), name.rpartition(".")
    if stem in OUTER:
        return _add(writer, f"{OUTER[stem]}.{ending}", values, kind)
    layer = re.match(r"model\.layers\.(\d+)\.(.+)", name)
    assert layer is not None
    if layer[2] == "self_attn.sinks":
        return _add(writer, f"blk.{layer[1]}.attn_sinks.weight", values, "F32")
    short = NAMES[layer[2].rpartition(".")[0]]
    if architecture == "gpt-oss" and short == "ffn_norm":
        short = "post_attention_norm"
    target, used = f"blk.{layer[1]}.{short}.{ending}", "F32" if short.startswith("ffn_gate_inp") else kind
    if short == "ffn_gate_inp_shexp":
        return _add(writer, target, values[0], used)[None]
    if architecture == "llama" and short in ("attn_q", "attn_k"):
        heads = hf["num_attention_heads" if short == "attn_q" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
        order = halves.swapaxes(1, 2).reshape(values.shape)
        meaning = _add(writer, target, order, used)
        return meaning.view(heads, -1, 2, meaning.shape[1]).transpose(1, 2).reshape(meaning.shape)
    return _add(writer, target, values, used)


def _experts(
    writer: GGUFWriter, name: str, experts: dict[int, Tensor], architecture: str, kind: str
) -> dict[str, Tensor]:
    meaning = _add(writer, name, torch.stack([experts[e] for e in range(len(experts))]).float().numpy(), kind)
    layer, shard = name.split(".")[1], name.split("_")[1]
    module = "block_sparse_moe" if architecture == "llama" else "mlp"
    projection = {"gate": "w1", "up": "w3", "down": "w2"}[shard] if architecture == "llama" else f"{shard}_proj"
    return {
        f"model.layers.{layer}.{module}.experts.{e}.{projection}.weight": meaning[e].clone()
        for e in range(len(meaning))
    }


def _stacked(writer: GGUFWriter, layer: str, name: str, tensor: Tensor, kinds: dict[str, str]) -> Tensor:
    """Add a tensor of gpt-oss's experts: gate and up alternate, and the matrix is transposed."""
    bias = name.endswith("_bias")
    values, ending = (tensor if bias else tensor.transpose(1, 2)).float().numpy(), "bias" if bias else "weight"
    if name.startswith("down"):
        down = _add(writer, f"blk.{layer}.ffn_down_exps.{ending}", values, "F32" if bias else kinds["down"])
        return down if bias else down.transpose(1, 2).contiguous()
    halves = [
        _add(writer, f"blk.{layer}.ffn_{shard}_exps.{ending}", values[:, start::2], "F32" if bias else kinds[shard])
        for start, shard in enumerate(("gate", "up"))
    ]
    both = torch.stack(halves, 2).flatten(1, 2)
    return both if bias else both.transpose(1, 2).contiguous()


def _metadata(writer: GGUFWriter, architecture: str, hf: dict[str, Any]) -> None:
    inner = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(hf["head_dim"])
    writer.add_value_length(hf["head_dim"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_expert_count(hf.get("num_experts") or hf["num_local_experts"])
    writer.add_expert_used_count(hf["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(inner)
    rope = hf["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(hf["shared_expert_intermediate_size"])
    if architecture == "gpt-oss":
        from gguf import RopeScalingType

        writer.add_sliding_window(hf["sliding_window"])
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_tokenizer_model("none")
