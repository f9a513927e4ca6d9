"""Requests to rows of logprobs: sequences in batches, each a tree of common prefixes, and batches through the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tokserve.models.provenance import EMBEDDING
from tokserve.train import tree
from tokserve.train.batch import PackedBatch
from tokserve.train.byte_budget import ByteBudget
from tokserve.train.layers.modules import DecoderModules
from tokserve.train.layers.order import in_order
from tokserve.train.requests import ScoringRequest, items_of


def rows(
    modules: DecoderModules,
    masters: Mapping[str, Tensor],
    requests: Sequence[ScoringRequest],
    *,
    mode: str,
    share: bool,
    max_tokens: int,
    activation_bytes: int,
    ordered: bool = False,
) -> list[Tensor]:
    """Logprobs float32 [len(tokens) - start] of each request.  `masters` are packed already; `mode`: logprobs_mode.
    `ordered`: sequences go through the model one by one, and add their gradients to the masters' `grad` in order."""
    inputs = [request.tokens[:-1] for request in requests]
    budget = ByteBudget(activation_bytes)
    scored: list[Tensor] = [torch.empty(0)] * len(requests)
    ordered = ordered and torch.is_grad_enabled()
    groups = tree.chunks(inputs, max_tokens, share=share)
    if ordered:  # autograd begins with what came last
        groups = [[number] for number in reversed(range(len(requests)))]
    for group in groups:
        members = [requests[number] for number in group]
        leaves = in_order(masters) if ordered else masters
        for number, row in zip(group, _scored(modules, leaves, members, budget, mode, share=share), strict=True):
            scored[number] = row
    return scored


def _scored(
    modules: DecoderModules,
    masters: Mapping[str, Tensor],
    requests: list[ScoringRequest],
    budget: ByteBudget,
    mode: str,
    *,
    share: bool,
) -> Iterator[Tensor]:
    packing = tree.pack([request.tokens[:-1] for request in requests], share=share, block=modules.page)
    device = masters[EMBEDDING].device
    tokens, items, indices = items_of(requests, packing, mode, device)
    hidden = modules.hidden(PackedBatch(packing, device), tokens, masters, budget)
    values = modules.logprobs(hidden, masters, items, budget)
    return (values.index_select(0, index) for index in indices)
