"""Writes tiny models of transformers as GGUF files, quantized by gguf-py's own quantizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM, CONTEXT = 300, 256, 512, 2, 4, 2, 64, 256
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def model(architecture: str) -> Any:
    """A small model with random weights, whose outputs are not flat."""
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[architecture])
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": architecture != "llama",
    }
    if architecture != "qwen2":
        sizes["head_dim"] = DIM
    if architecture == "gemma3":
        sizes |= {"sliding_window": 32, "query_pre_attn_scalar": DIM}
    torch.manual_seed(1)
    built = model_class(config_class(**sizes)).float().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            spread = 0.1 if parameter.ndim == 1 else 2 / parameter.shape[1] ** 0.5
            parameter.copy_(spread * torch.randn_like(parameter) + (parameter if parameter.ndim == 1 else 0))
    return built


def blocks(weight: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """The weight as blocks of that type; random ones of about its size where gguf-py has no quantizer."""
    number = GGMLQuantizationType[kind]
    try:
        return quantize(weight, number)
    except NotImplementedError:
        elements, size = gguf.GGML_QUANT_SIZES[number]
        random = np.random.default_rng(len(weight))
        raw = random.integers(0, 256, (weight.size // elements, size), dtype=np.uint8)
        for at in HALVES[kind]:
            halves = (random.random(len(raw)) * weight.std() / 500).astype(np.float16)
            raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
        return raw.reshape(len(weight), -1)


def _metadata(writer: GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(DIM)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    if architecture in ("qwen3", "gemma3"):
        writer.add_key_length(DIM)
        writer.add_value_length(DIM)
    if architecture == "gemma3":
        writer.add_sliding_window(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*bytes_to_unicode().values(), *(f"<extra_{i}>" for i in range(VOCAB - 256))])
    writer.add_token_types([1] * 256 + [3] * (VOCAB - 256))
    writer.add_token_merges([])
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)


def _rotated(weight: np.ndarray[Any, Any], name: str, *, back: bool = False) -> np.ndarray[Any, Any]:
    """The rows of q and k as llama.cpp's converter orders them, or back."""
    heads = HEADS if "q_proj" in name else KV_HEADS
    half = len(weight) // heads // 2
    shape = (heads, half, 2, *weight.shape[1:]) if back else (heads, 2, half, *weight.shape[1:])
    return np.ascontiguousarray(weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape))


def write(path: Path, architecture: str, kind: str, value_kind: str | None = None, *, split: int = 0) -> Any:
    """Write a model whose matrices are of a type (those of values: of `value_kind`); returns the model of the weights
    that the file means.  `split`: tensors of a shard."""
    built = model(architecture)
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    _metadata(writer, architecture, built.config)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], LAYERS)
    dequantized: dict[str, Tensor] = {}
    for name, parameter in built.state_dict().items():
        if name == "lm_head.weight" and built.config.tie_word_embeddings:
            continue
        weight = parameter.numpy()
        rotates = architecture == "llama" and ("q_proj" in name or "k_proj" in name)
        offset = 1.0 if architecture == "gemma3" and name.endswith("norm.weight") else 0.0
        stored = (_rotated(weight, name) if rotates else weight) + np.float32(offset)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        used = value_kind or kind if "v_proj" in name else kind
        if stored.ndim == 2 and used != "F32":
            raw = blocks(stored, used)
            writer.add_tensor(target, raw, raw_dtype=GGMLQuantizationType[used])
            stored = dequantize(raw, GGMLQuantizationType[used])
        else:
            writer.add_tensor(target, stored)
        stored = stored - np.float32(offset)
        dequantized[name] = torch.from_numpy(_rotated(stored, name, back=True) if rotates else stored.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    built.load_state_dict(dequantized, strict=False)
    return built
