"""Which families' checkpoints have a draft head, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from tokserve.base.errors import StartError
from tokserve.features.draft_heads.head import DraftHeadSpec, HeadNames
from tokserve.models.decoder import DecoderSpec, Renames

QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
DEEPSEEK = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # the head is the layer after the last
QWEN_NAMES = HeadNames("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
METHOD = "option speculative_config: the method mtp"


def head_of(hf: Mapping[str, Any], spec: DecoderSpec) -> tuple[DraftHeadSpec, Renames]:
    """The head of the model of `hf` (config.json), and the renames of `spec` with which its tensors are read.  Raises
    StartError."""
    family = hf.get("model_type")
    block = next((one for one in reversed(spec.blocks) if one.attention_name == "self_attn"), None)
    sparse = next((one.mlp for one in reversed(spec.blocks) if one.mlp.has_experts), None)
    if family not in (*QWEN, *DEEPSEEK) or block is None:
        known = ", ".join((*QWEN, *DEEPSEEK))
        raise StartError(f"{METHOD} is for models with a draft head ({known}), and this one's model_type is {family!r}")
    block = block if sparse is None else replace(block, mlp=sparse)
    if family in QWEN:
        renames = tuple((old, new) for old, new in spec.renames if old != "mtp.")
        return DraftHeadSpec(QWEN_NAMES, block, spec.norm, repeats_normed=True), (("mtp.layers.1.", ""), *renames)
    layer = f"layers.{len(spec.blocks)}"
    parts = (f"model.{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    copies = ("embed_tokens", "shared_head.head")  # of the model's own
    unused = tuple((f"{prefix}{layer}.{name}.", "") for prefix in ("model.", "") for name in copies)
    renames = tuple((old, new) for old, new in spec.renames if old not in (f"model.{layer}.", f"{layer}."))
    head = DraftHeadSpec(HeadNames(f"model.{layer}", *parts), block, spec.norm, repeats_normed=False)
    return head, unused + renames


def require_tensors(head: DraftHeadSpec, names: Collection[str]) -> None:
    """Raise StartError if a checkpoint with tensors of these names has none of the head's."""
    if not any(name.startswith(f"{head.names.projection}.") for name in names):
        raise StartError(f"{METHOD} needs the draft head, and the checkpoint has no {head.names.projection}.weight")
