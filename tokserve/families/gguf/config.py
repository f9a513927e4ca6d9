"""What a GGUF header says about the model, as the JSON files of a Hugging Face checkpoint.

`unpacked` makes a temporary directory of them, which stands for the file wherever a checkpoint's directory is expected.
The tensors stay in the file.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokserve.base.errors import StartError
from tokserve.checkpoint import ModelFiles
from tokserve.families.gguf import tokenizer as gguf_tokenizer
from tokserve.families.gguf.header import SUFFIX, GgufHeader, read_headers

SOURCE = "gguf.json"  # in that directory: the files
NO_TOKENIZER = "no_tokenizer"  # in it: why the header gives none
LLAMA3_FACTORS = (8.0, 32.0, 16.0)  # of rope scaling in Llama 3.1 and 3.3, 3.2, and others
# beside the tokens that the header names, these end a turn where they are control tokens
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>")
CONTROL = 3


def unpacked(path: Path) -> Path:
    """The directory of a file; it is deleted when this process ends.  Raises StartError."""
    header = read_headers(path)
    config = model_config(header)
    directory = Path(tempfile.mkdtemp(prefix="tokserve-gguf-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    _write(directory, "config.json", config)
    files = [str(file.resolve()) for file in header.files]
    about = {"name": str(path), "files": files, "types": matrix_types(header)}
    _write(directory, "generation_config.json", {"eos_token_id": end_ids(header.metadata)})
    try:
        tokenizer, settings = gguf_tokenizer.convert(header)
    except gguf_tokenizer.Unsupported as error:  # an error only where a tokenizer is needed
        about[NO_TOKENIZER] = str(error)
    else:
        (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        _write(directory, "tokenizer_config.json", settings)
    _write(directory, SOURCE, about)
    return directory


def _about(directory: Path) -> dict[str, Any] | None:
    """What `unpacked` has noted of the file that a directory stands for; None: an ordinary one."""
    path = directory / SOURCE
    if not os.path.isfile(path):  # False, too, for a name that is too long
        return None
    return json.loads(path.read_text(encoding="utf-8"))


def source(directory: Path) -> list[Path] | None:
    """The GGUF files that a directory stands for; None if it is an ordinary one."""
    about = _about(directory)
    return None if about is None else [Path(file) for file in about["files"]]


def file_name(directory: Path) -> tuple[str, str] | None:
    """The GGUF file that a directory stands for, as it was named, and the types of its matrices; None: an ordinary
    one."""
    about = _about(directory)
    return None if about is None else (about["name"], about["types"])


def without_tokenizer(directory: Path) -> str | None:
    """The GGUF file that a directory without a tokenizer stands for, and why there is none; None: an ordinary one."""
    about = _about(directory) or {}
    return f"{about['name']}: {about[NO_TOKENIZER]}" if NO_TOKENIZER in about else None


def matrix_types(header: GgufHeader) -> str:
    """The types of the matrices, that of the most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind] += tensor.size
    return ", ".join(kind for kind, _ in sizes.most_common())


def _write(directory: Path, name: str, value: Mapping[str, Any]) -> None:
    (directory / name).write_text(json.dumps(value), encoding="utf-8")


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end an output: those that the header names, and control tokens that are known to."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    lists = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    tokens, kinds = (value if isinstance(value, list) else [] for value in lists)
    ids = [token for token in named if type(token) is int]
    for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == CONTROL and text in END_TOKENS and token not in ids:
            ids.append(token)
    return ids


class _Fields:
    """Metadata under the architecture's prefix, with errors that name the key."""

    def __init__(self, header: GgufHeader) -> None:
        self.header, self.prefix = header, header.architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise StartError(f"{self.header.files[0].name}: {self.prefix}.{key} must be a number, found {value!r}")
        return value


def model_config(header: GgufHeader) -> dict[str, Any]:
    """config.json of the model.  Raises StartError for an architecture that is not supported."""
    fields = _Fields(header)
    if header.architecture not in FAMILIES:
        raise StartError(
            f"{header.files[0].name} holds a model of GGUF's architecture {header.architecture!r}, which is not "
            f"supported; supported are: {', '.join(FAMILIES)}"
        )
    if fields.get("expert_count", 0) and header.architecture not in MIXTURES:
        raise StartError(
            f"{header.files[0].name} holds a mixture of experts of GGUF's architecture {header.architecture!r}, which "
            f"is not supported; supported are: {', '.join(MIXTURES)}"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartError(f"{header.files[0].name} has no tensor token_embd.weight")
    heads = fields.need("attention.head_count")
    config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.need("embedding_length"),
        "intermediate_size": fields.get("feed_forward_length") or fields.need("expert_feed_forward_length"),
        "num_hidden_layers": fields.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": fields.get("attention.key_length", fields.get("rope.dimension_count"))
        or fields.need("embedding_length") // max(heads, 1),
        "max_position_embeddings": fields.need("context_length"),
        "rms_norm_eps": fields.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": _dtype(header),
        "quantization_config": {"quant_method": "gguf"},
    }
    if fields.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise StartError(f"{header.files[0].name}: heads whose keys and values differ in size are not supported")
    config = config | _rope_scaling(fields) | FAMILIES[header.architecture](fields)
    _check_sizes(header, config)
    return config


def _check_sizes(header: GgufHeader, config: Mapping[str, Any]) -> None:
    """Refuse sizes that are not those of the first layer's tensors: what is built of them takes memory."""
    name = header.files[0].name
    layers, blocks = config["num_hidden_layers"], len(header.tensors)
    if type(layers) is not int or not 0 < layers <= blocks:
        raise StartError(f"{name} announces {layers!r} layers and holds {blocks} tensors")
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if not all(type(size) is int and 0 < size < 1 << 20 for size in (hidden, dim, heads, kv_heads)):
        raise StartError(f"{name} announces {heads!r} and {kv_heads!r} heads of {dim!r} for a width of {hidden!r}")
    shapes: dict[str, tuple[Any, ...]] = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "blk.0.attn_q.weight": (heads * dim, hidden),
        "blk.0.attn_k.weight": (kv_heads * dim, hidden),
    }
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is not None:
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        shapes["blk.0.ffn_up_exps.weight"] = (experts, inner, hidden)
        if shared := config.get("shared_expert_intermediate_size"):
            shapes["blk.0.ffn_up_shexp.weight"] = (shared, hidden)
    else:
        shapes["blk.0.ffn_up.weight"] = (config["intermediate_size"], hidden)
    for tensor, shape in shapes.items():
        if tensor not in header.tensors:
            raise StartError(f"{name} has no tensor {tensor}")
        if header.tensors[tensor].shape != shape:
            raise StartError(f"{name}: {tensor} is {list(header.tensors[tensor].shape)}, where the header says {shape}")


def _dtype(header: GgufHeader) -> str:
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {frozenset(("F32",)): "float32", frozenset(("F16",)): "float16"}.get(frozenset(kinds), "bfloat16")


def _rope_scaling(fields: _Fields) -> dict[str, Any]:
    kind, factor = fields.get("rope.scaling.type"), fields.get("rope.scaling.factor")
    if "rope_freqs.weight" in fields.header.tensors:
        return {"rope_scaling": {"rope_type": "llama3", **_llama3_factors(fields)}}
    if kind in (None, "none") or not factor:
        return {}
    if kind not in ("linear", "yarn"):
        raise StartError(f"{fields.header.files[0].name}: rope scaling {kind!r} is not supported")
    original = fields.get("rope.scaling.original_context_length")
    extra = {"original_max_position_embeddings": original} if kind == "yarn" and original else {}
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **extra}}


def _llama3_factors(fields: _Fields) -> dict[str, Any]:
    """The parameters of which rope_freqs.weight has the result, a divisor per frequency."""
    tensor = fields.header.tensors["rope_freqs.weight"]
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise StartError(f"{tensor.file.name}: rope_freqs.weight must be a vector of F32")
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        divisors = memoryview(file.read(tensor.size)).cast("f").tolist()
    base, dim = fields.get("rope.freq_base", 10000.0), 2 * len(divisors)
    for factor in LLAMA3_FACTORS:
        config = {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = [_llama3_divisor(base ** (-2 * i / dim), factor) for i in range(len(divisors))]
        if all(abs(a - b) <= 1e-3 * b for a, b in zip(divisors, expected, strict=True)):
            return config
    raise StartError(f"{tensor.file.name}: the frequencies of rope_freqs.weight are not those of Llama 3 models")


def _llama3_divisor(frequency: float, factor: float) -> float:
    turns = 8192 * frequency / 6.283185307179586
    if turns < 1:
        return factor
    if turns > 4:
        return 1.0
    smooth = (turns - 1) / 3
    return 1 / ((1 - smooth) / factor + smooth)


def _llama(fields: _Fields) -> dict[str, Any]:
    if fields.get("expert_count", 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": fields.need("expert_count"),
            "num_experts_per_tok": fields.need("expert_used_count"),
        }
    bias = "blk.0.attn_q.bias" in fields.header.tensors
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": bias}


def _gemma3(fields: _Fields) -> dict[str, Any]:
    dim, hidden, heads = (
        fields.need(key) for key in ("attention.key_length", "embedding_length", "attention.head_count")
    )
    # 62: the model of 27B; a file without heads is refused later
    scalar = hidden // max(1, heads) if fields.need("block_count") == 62 else dim
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "sliding_window": fields.need("attention.sliding_window"),
        "rope_theta": fields.get("rope.freq_base", 1e6),
        "query_pre_attn_scalar": scalar,
    }


def _experts(fields: _Fields) -> dict[str, Any]:
    return {
        "num_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "moe_intermediate_size": fields.need("expert_feed_forward_length"),
    }


def _qwen2moe(fields: _Fields) -> dict[str, Any]:
    shared = fields.need("expert_shared_feed_forward_length")
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": shared,
        **_experts(fields),
    }


def _qwen3moe(fields: _Fields) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        **_experts(fields),
    }


def _gpt_oss(fields: _Fields) -> dict[str, Any]:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_local_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "intermediate_size": fields.need("expert_feed_forward_length"),
        "sliding_window": fields.need("attention.sliding_window"),
    }
    scaling = _rope_scaling(fields).get("rope_scaling")
    if scaling is not None:  # the model's own; the header does not say them
        config["rope_scaling"] = scaling | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    else:
        config["rope_scaling"] = {"rope_type": "default"}
    return config


MIXTURES = ("llama", "qwen2moe", "qwen3moe", "gpt-oss")
FAMILIES: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": lambda _: {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": lambda _: {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gemma3": _gemma3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gpt-oss": _gpt_oss,
}
GGUF = ModelFiles(SUFFIX, unpacked, source, file_name, without_tokenizer, "tokserve.families.gguf.gguf_weights:sources")
