"""The tensors of GGUF files under the model's names, read one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokserve.base.errors import StartError
from tokserve.families.gguf.gguf_types import PLAIN, decoded
from tokserve.families.gguf.header import GgufHeader, GgufTensor, read_header
from tokserve.families.quantization.quantized import QuantizedWeight
from tokserve.layers.parameter import StoredWeight, as_dense

OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MIXTURE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL = {"ffn_gate_inp": "block_sparse_moe.gate"}
GPT_OSS = {
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
EXPERTS = {"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2}  # all experts' in one tensor, of three dimensions
EXPERT_NAMES = {  # of the architecture -> where an expert's matrices are
    "qwen2moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "llama": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
UNUSED = ("rope_freqs.weight",)  # config.json has what it says


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A tensor of a file.  `heads`: its rows are those of so many heads, in llama.cpp's order for rotations.
    `offset`: is subtracted, since llama.cpp adds it to what the model's own checkpoints store."""

    tensor: GgufTensor
    heads: int = 0
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the model's own checkpoints have."""
        return self.tensor.shape

    @property
    def file(self) -> Path:
        """The file that holds it."""
        return self.tensor.file

    @property
    def key(self) -> str:
        """Its name there."""
        return self.tensor.name

    @property
    def kind(self) -> str:
        """GGUF's name of its type."""
        return self.tensor.kind

    @property
    def is_plain(self) -> bool:
        """Whether it is stored as floats."""
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
    """The row of the file for each row of a checkpoint: the file has the two halves of each head in turns."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class GgufExperts:
    """The matrices of all experts of gpt-oss, whose checkpoints have the gate and what it gates in one tensor, gate and
    up outputs in turns [E,K,2N]; files have two tensors [E,N,K].  Or their biases, [E,2N] of [E,N]."""

    tensors: tuple[GgufTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, *columns = self.tensors[0].shape
        return experts, *columns, len(self.tensors) * rows

    @property
    def tensor(self) -> GgufTensor:
        """The first tensor."""
        return self.tensors[0]

    @property
    def file(self) -> Path:
        """The file that holds it."""
        return self.tensor.file

    @property
    def key(self) -> str:
        """Its name there."""
        return self.tensor.name

    @property
    def kind(self) -> str:
        """GGUF's name of its type."""
        return self.tensor.kind

    @property
    def is_plain(self) -> bool:
        """Whether all tensors are stored as floats."""
        return all(tensor.kind in PLAIN for tensor in self.tensors)

    def raw(self) -> Tensor:
        """The bytes as they are in the file: uint8, by expert, one tensor after the other."""
        return torch.cat([GgufSource(tensor).raw().view(tensor.shape[0], -1) for tensor in self.tensors])

    def read(self) -> Tensor | GgufExpertWeights:
        """The weights of all experts, to be read one by one; biases are read at once."""
        if len(self.tensors[0].shape) == 3:
            return GgufExpertWeights(self)
        biases = [GgufSource(tensor).read() for tensor in self.tensors]
        return torch.stack([bias for bias in biases if isinstance(bias, Tensor)], -1).flatten(1)


@dataclass(frozen=True, slots=True)
class GgufExpertWeights:
    """What `GgufExperts` reads."""

    source: GgufExperts
    interleaved: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what the bytes mean: float32."""
        return torch.float32

    def expert(self, index: int) -> Tensor | StoredWeight:
        """An expert's weight [N,K], the gate above what it gates."""
        parts = [GgufSource(_of_expert(tensor, index)).read() for tensor in self.source.tensors]
        first, *others = parts
        if isinstance(first, QuantizedWeight):
            whole = first.joined([part for part in others if not isinstance(part, Tensor)])
            if whole is not None and whole.shape[0] == sum(part.shape[0] for part in parts):
                return whole
        return torch.cat([as_dense(part) for part in parts])

    def dense(self) -> Tensor:
        """[E,K,N], gate and up outputs in turns."""
        experts = []
        for index in range(self.shape[0]):
            rows = as_dense(self.expert(index)).chunk(len(self.source.tensors))
            experts.append(torch.stack(rows, 1).flatten(0, 1).t())
        return torch.stack(experts)

    def tensors(self) -> tuple[Tensor, ...]:
        """The bytes as they are stored."""
        return (self.source.raw(),)

    def clone(self) -> GgufExpertWeights:
        """The same: nothing is read yet."""
        return self

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        return self.dense().narrow(dim, start, length)

    def joined(self, others: Sequence[StoredWeight]) -> None:
        """Returns None: a weight holds all experts, and is not joined with others."""

    def packed_rows(self) -> None:
        """Returns None: its rows are not looked up."""


def _of_expert(tensor: GgufTensor, index: int) -> GgufTensor:
    size = tensor.size // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], start=tensor.start + index * size, size=size)


GgufTensors = GgufSource | GgufExperts


def sources(files: Sequence[Path]) -> dict[str, GgufTensors]:
    """Name in the model's own checkpoints -> tensor.  Raises StartError for a tensor that has none."""
    named: dict[str, GgufTensors] = {}
    metadata: dict[str, object] = {}
    for header in map(read_header, files):
        metadata = metadata or header.metadata
        whole = GgufHeader(header.files, metadata, header.tensors)
        for tensor in header.tensors.values():
            if tensor.name in UNUSED:
                continue
            if len(tensor.shape) == 3 and whole.architecture in EXPERT_NAMES:
                named |= _experts(whole, tensor)
            else:
                named[_name(whole, tensor)] = _source(whole, tensor)
    return _gpt_oss(named) if metadata.get("general.architecture") == "gpt-oss" else named


def _experts(header: GgufHeader, tensor: GgufTensor) -> dict[str, GgufTensors]:
    match tensor.name.split("."):
        case ["blk", number, name, "weight"] if number.isdigit() and name in EXPERTS:
            module, names = EXPERT_NAMES[header.architecture]
            prefix = f"model.layers.{int(number)}.{module}"
            return {
                f"{prefix}.{index}.{names[EXPERTS[name]]}.weight": GgufSource(_of_expert(tensor, index))
                for index in range(tensor.shape[0])
            }
    raise _unknown(header, tensor)


def _gpt_oss(named: dict[str, GgufTensors]) -> dict[str, GgufTensors]:
    """Join the gate and up projections of all experts into one weight."""
    joined: dict[str, GgufTensors] = {}
    for name, source in named.items():
        stem, _, shard = name.rpartition(".experts.")
        if not stem:
            joined[name] = source
            continue
        both = f"{stem}.experts.gate_up_proj" + ("_bias" if shard.endswith("_bias") else "")
        if shard.startswith("up_proj"):
            gate = named.get(name.replace(".experts.up_proj", ".experts.gate_proj"))
            if gate is None or gate.shape != source.shape:
                raise StartError(f"{source.tensor.file.name}: {source.tensor.name} has no gate of its shape")
            joined[both] = GgufExperts((gate.tensor, source.tensor))
        elif shard.startswith("down_proj"):
            joined[name] = GgufExperts((source.tensor,))
    return joined


def _unknown(header: GgufHeader, tensor: GgufTensor) -> StartError:
    return StartError(f"{tensor.file.name} holds {tensor.name}, which no {header.architecture} model here takes")


def _names(header: GgufHeader) -> dict[str, str]:
    match header.architecture:
        case "gemma3":
            return INNER | POST_NORMS
        case "qwen2moe" | "qwen3moe":
            return INNER | MIXTURE
        case "llama" if header.metadata.get("llama.expert_count"):
            return INNER | MIXTRAL
        case "gpt-oss":
            return INNER | GPT_OSS
    return INNER


def _name(header: GgufHeader, tensor: GgufTensor) -> str:
    stem, _, ending = tensor.name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{ending}"
    names = _names(header)
    match stem.split("."):
        case ["blk", number, "attn_sinks"] if number.isdigit() and "attn_sinks" in names:
            return f"model.layers.{int(number)}.{names['attn_sinks']}"
        case ["blk", number, name] if number.isdigit() and name in names:
            return f"model.layers.{int(number)}.{names[name]}.{ending}"
        case ["blk", number, name] if number.isdigit() and name in EXPERTS and header.architecture == "gpt-oss":
            shard = ("gate_proj", "up_proj", "down_proj")[EXPERTS[name]]
            return f"model.layers.{int(number)}.mlp.experts.{shard}" + ("_bias" if ending == "bias" else "")
    raise _unknown(header, tensor)


def _source(header: GgufHeader, tensor: GgufTensor) -> GgufSource:
    heads: Any = 0
    if header.architecture == "llama" and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        queries = header.metadata.get("llama.attention.head_count", 0)
        heads = queries if ".attn_q." in tensor.name else header.metadata.get("llama.attention.head_count_kv", queries)
        shape = tensor.shape[0]
        if not isinstance(heads, int) or heads <= 0 or shape % (2 * heads):
            raise StartError(f"{tensor.file.name}: {tensor.name} has {shape} rows, which {heads} heads do not divide")
    if tensor.name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    is_norm = header.architecture == "gemma3" and tensor.name.endswith("norm.weight")
    return GgufSource(tensor, heads, 1.0 if is_norm else 0.0)
