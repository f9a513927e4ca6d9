"""A decoder in plain differentiable torch, in any dtype: what gradients are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokserve.layers.rope import rope_table
from tokserve.models.registry import decoder_spec


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, table: Tensor) -> Tensor:  # [n, heads, D], [n, rot]
    cos, sin = table.unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float = 0.0) -> Tensor:
    """q [n, Hq, D] are the last n positions of k and v [m, Hk, D]."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    position, key = torch.arange(m - n, m)[:, None], torch.arange(m)
    hidden = key > position
    if window:
        hidden |= key <= position - window
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def activation(name: str, x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) if name == "silu" else torch.nn.functional.gelu(x, approximate="tanh")


def rounded(x: Tensor) -> Tensor:
    """The values rounded to bfloat16, with the identity as backward pass."""
    return x + (x.detach().to(torch.bfloat16).to(x.dtype) - x.detach())


def logits(
    hf: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    ids: Sequence[int],
    keep: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """[n, vocab] of one sequence, in the weights' dtype.  Of the server it shares the rope tables alone.

    `keep`: what becomes of the result of each op.
    """
    spec = decoder_spec(hf)
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    windows = _windows(hf)
    dtype = weights["model.norm.weight"].dtype
    tables = {rope: rope_table(rope, len(ids)).to(dtype) for rope in spec.ropes}
    gemma = hf["model_type"] == "gemma3_text"
    scale = hf.get("query_pre_attn_scalar", dim) ** -0.5
    x = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    if gemma:
        x = x * hf["hidden_size"] ** 0.5
    for layer, window in enumerate(windows):
        block = {
            name.removeprefix(f"model.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        table = tables[spec.blocks[layer].attention.rope]

        def linear(x: Tensor, name: str, block: Mapping[str, Tensor] = block) -> Tensor:
            return keep(torch.nn.functional.linear(x, block[f"{name}.weight"], block.get(f"{name}.bias")))

        def normed(x: Tensor, name: str, block: Mapping[str, Tensor] = block) -> Tensor:
            return keep(norm(x, block[f"{name}.weight"] + gemma, hf["rms_norm_eps"]))

        h = normed(x, "input_layernorm")
        q, k, v = (linear(h, f"self_attn.{part}_proj").view(len(ids), -1, dim) for part in "qkv")
        if "self_attn.q_norm.weight" in block:
            q, k = normed(q, "self_attn.q_norm"), normed(k, "self_attn.k_norm")
        mixed = keep(attention(keep(rope(q, table)), keep(rope(k, table)), v, scale, window))
        h = linear(mixed.flatten(1), "self_attn.o_proj")
        x = keep(x + (normed(h, "post_attention_layernorm") if gemma else h))
        h = normed(x, "pre_feedforward_layernorm" if gemma else "post_attention_layernorm")
        name = "silu" if hf.get("hidden_activation", hf["hidden_act"]) == "silu" else "gelu_tanh"
        h = linear(keep(activation(name, linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj")), "mlp.down_proj")
        x = keep(x + (normed(h, "post_feedforward_layernorm") if gemma else h))
    x = keep(norm(x, weights["model.norm.weight"] + gemma, hf["rms_norm_eps"]))
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).t()


def _windows(hf: Mapping[str, Any]) -> list[int]:
    layers = hf["num_hidden_layers"]
    if hf["model_type"] == "gemma3_text":
        return [hf["sliding_window"] if (layer + 1) % hf["sliding_window_pattern"] else 0 for layer in range(layers)]
    if hf["model_type"] == "mistral":
        return [hf["sliding_window"] or 0] * layers
    if hf.get("use_sliding_window"):
        return [hf["sliding_window"] if kind == "sliding_attention" else 0 for kind in hf["layer_types"]]
    return [0] * layers


def logprobs(
    hf: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    sequence: Sequence[int],
    start: int,
    *,
    temperature: float = 1.0,
    masks: Sequence[Sequence[int] | None] | None = None,
    keep: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """The logprobs of the tokens from `start` on, over the kept ids of each (None: all)."""
    rows = logits(hf, weights, sequence[:-1], keep)[start - 1 :] / temperature
    for number, mask in enumerate(masks or []):
        if mask is not None:
            hidden = torch.ones(rows.shape[1], dtype=torch.bool)
            hidden[list(mask)] = False
            rows = torch.cat(
                [rows[:number], rows[number : number + 1].masked_fill(hidden, float("-inf")), rows[number + 1 :]]
            )
    return rows.log_softmax(-1).gather(1, torch.tensor(sequence[start:])[:, None])[:, 0]


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.cosine_similarity(one.double().flatten(), other.double().flatten(), 0))
