"""What TRL 1.16's asynchronous trainer takes from a GPU, without one: its attention of packed rows, and peak FLOPS."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION


def allowed(kv_index: torch.Tensor, query_ends: list[int], key_ends: list[int], tokens: int) -> torch.Tensor:
    """Which keys each token of a row attends to: bool [tokens, tokens].

    A row is segments of a tree.  Segment s is the tokens between `query_ends` s and s + 1, and attends to its path from
    the root, which is `kv_index` between `key_ends` s and s + 1 and ends with the segment itself.
    """
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for s in range(len(query_ends) - 1):
        path = kv_index[key_ends[s] : key_ends[s + 1]]
        length = query_ends[s + 1] - query_ends[s]
        mask[query_ends[s] : query_ends[s + 1], path] = torch.ones(length, len(path), dtype=torch.bool).tril(
            len(path) - length
        )
    return mask


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [1, heads, tokens, head dim] -> [1, tokens, heads, head dim]."""
    mask = allowed(tree_kv_index, tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist(), query.shape[2])
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def register_attention() -> None:
    """Register `attention` in the place of TRL's, which is FlashAttention 3."""
    AttentionInterface.register(TREE_ATTENTION, attention)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)


def use_cpu() -> None:
    """Call it before the trainer is made."""
    async_grpo_trainer.register_tree_attention = register_attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
