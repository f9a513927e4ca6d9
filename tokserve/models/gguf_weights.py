"""The tensors of GGUF files under the model's names, read one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokserve.errors import StartError
from tokserve.gguf import GgufHeader, GgufTensor, read_header
from tokserve.layers.parameter import StoredWeight
from tokserve.models.formats.gguf_types import PLAIN, decoded

OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
UNUSED = ("rope_freqs.weight",)  # config.json has what it says


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A tensor of a file.  `heads`: its rows are those of so many heads, in llama.cpp's order for rotations.
    `offset`: is subtracted, since llama.cpp adds it to what the model's own checkpoints store."""

    tensor: GgufTensor
    heads: int = 0
    offset: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Stored as floats."""
        return self.tensor.kind in PLAIN

    def raw(self) -> Tensor:
        """The bytes as they are in the file: uint8, by row."""
        data = bytearray(self.tensor.size)
        with self.tensor.file.open("rb") as file:
            file.seek(self.tensor.start)
            if file.readinto(data) != len(data):
                raise StartError(f"{self.tensor.file} has become shorter: {self.tensor.name} is not all there")
        rows = self.tensor.shape[0] if len(self.tensor.shape) == 2 else 1
        return torch.frombuffer(data, dtype=torch.uint8).view(rows, -1)

    def read(self) -> Tensor | StoredWeight:
        """The weight in the order of the model's own checkpoints."""
        raw, shape = self.raw(), self.tensor.shape
        if self.heads:
            raw = raw.view(shape[0], -1)[rotation_order(shape[0], self.heads)].contiguous()
        weight = decoded(raw.view(-1), self.tensor.kind, shape)
        return weight - self.offset if self.offset and isinstance(weight, Tensor) else weight


def rotation_order(rows: int, heads: int) -> Tensor:
    """For each row of a checkpoint, the row of the file: that has the two halves of each head in turns."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def sources(files: Sequence[Path]) -> dict[str, GgufSource]:
    """Name in the model's own checkpoints -> tensor.  Raises StartError for a tensor that has none."""
    named: dict[str, GgufSource] = {}
    metadata: dict[str, object] = {}
    for header in map(read_header, files):
        metadata = metadata or header.metadata
        whole = GgufHeader(header.files, metadata, header.tensors)
        for tensor in header.tensors.values():
            if tensor.name not in UNUSED:
                named[_name(whole, tensor)] = _source(whole, tensor)
    return named


def _name(header: GgufHeader, tensor: GgufTensor) -> str:
    stem, _, ending = tensor.name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{ending}"
    names = INNER | POST_NORMS if header.architecture == "gemma3" else INNER
    match stem.split("."):
        case ["blk", number, name] if number.isdigit() and name in names:
            return f"model.layers.{int(number)}.{names[name]}.{ending}"
    raise StartError(f"{tensor.file.name} holds {tensor.name}, which no {header.architecture} model here takes")


def _source(header: GgufHeader, tensor: GgufTensor) -> GgufSource:
    heads: Any = 0
    if header.architecture == "llama" and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        queries = header.metadata.get("llama.attention.head_count", 0)
        heads = queries if ".attn_q." in tensor.name else header.metadata.get("llama.attention.head_count_kv", queries)
        shape = tensor.shape[0]
        if not isinstance(heads, int) or heads <= 0 or shape % (2 * heads):
            raise StartError(f"{tensor.file.name}: {tensor.name} has {shape} rows, which {heads} heads do not divide")
    is_norm = header.architecture == "gemma3" and tensor.name.endswith("norm.weight")
    return GgufSource(tensor, heads, 1.0 if is_norm else 0.0)
