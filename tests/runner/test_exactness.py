"""The check at start-up: rows of a product must not depend on how many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_config
from tokserve import ops
from tokserve.config import LoraConfig, WeightsConfig
from tokserve.features.lora.adapter_slots import LoraTables
from tokserve.layers.linear import GatedLinear, Linear
from tokserve.models.decoder import Decoder
from tokserve.models.load import load_decoder
from tokserve.runner import exactness


def by_the_batch(out: Tensor) -> Tensor:
    """Summed in another order from 64 rows on, as a library may."""
    return out * (1.0 + 2**-20 if len(out) >= 64 else 1.0)


class ByTheBatch(Linear):
    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        return by_the_batch(super().__call__(*arguments, **options))


class GatedByTheBatch(GatedLinear):
    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        return by_the_batch(super().__call__(*arguments, **options))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setattr(exactness, "SIZES", (1, 64))
    monkeypatch.setattr(exactness, "MOST", 70)
    monkeypatch.setattr(exactness, "LONG", 400)
    return load_decoder(
        Path(), tiny_config("qwen3"), dtype="float32", head_dtype="auto", load_format="dummy", seed=0, max_model_len=64
    )


def test_products_that_depend_on_the_batch_are_detected(model: Decoder) -> None:
    assert exactness.unequal_products(model) == []
    model.blocks[0].mlp.down.__class__ = ByTheBatch
    model.blocks[0].mlp.gate_up.__class__ = GatedByTheBatch
    assert exactness.unequal_products(model) == ["gate_up", "down", "the gate of gate_up"]


def test_a_gate_that_differs_from_its_parts_is_detected(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = ops.gated_linear

    def other(x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        return fused(x, packed, bias, activation) * (1.0 if activation is None else 1.0 + 2**-20)

    monkeypatch.setattr(ops, "gated_linear", other)
    assert exactness.unequal_products(model) == ["the gate of gate_up"]


def test_norms_that_depend_on_the_batch_are_detected(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    add_rms_norm = ops.add_rms_norm

    def by_their_number(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        normed, total = add_rms_norm(x, *rest)
        return by_the_batch(normed), total

    monkeypatch.setattr(ops, "add_rms_norm", by_their_number)
    assert exactness.unequal_products(model) == ["norms and products in turn"]


def test_attention_that_differs_between_steps_chunks_and_prompts_is_detected(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [tuple(torch.zeros(9, *shape) for shape in spec.shapes(16)) for spec in model.kv_specs()]
    assert exactness.unequal_attention(model, pages) == []
    attend, requested = ops.paged_attention, []

    def attend_by_the_batch(q: Tensor, *rest: Any) -> Tensor:
        requested.append(q.shape[0])
        out = attend(q, *rest)
        return out * (1.0 + 2**-20) if q.shape[0] == wrong else out

    monkeypatch.setattr(ops, "paged_attention", attend_by_the_batch)
    for wrong in (2, exactness.CHUNK + 1, exactness.PROMPT):  # noqa: B007  (read above)
        requested.clear()
        assert exactness.unequal_attention(model, pages) == ["attention of 4 heads of 16"]
        assert requested[2:] == [exactness.PROMPT, 2, exactness.CHUNK + 1]


def test_attention_of_ragged_rows_is_asked(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [tuple(torch.zeros(9, *shape) for shape in spec.shapes(16)) for spec in model.kv_specs()]
    spans = exactness.ragged(exactness.LONG)
    counts = {end - start for start, end in spans}
    assert len(spans) == 40 and counts == {1, 4, exactness.CHUNK} and spans[-1][1] == exactness.LONG
    attend = ops.paged_attention

    def attend_drafts_otherwise(q: Tensor, *rest: Any) -> Tensor:
        out = attend(q, *rest)
        starts = rest[3]
        if len(starts) == 41:
            out[starts[40] - 1] *= 1.0 + 2**-20  # the last draft of the last row
        return out

    monkeypatch.setattr(ops, "paged_attention", attend_drafts_otherwise)
    assert exactness.unequal_attention(model, pages) == ["attention of 4 heads of 16"]


def test_experts_that_depend_on_the_batch_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "SIZES", (1, 64))
    monkeypatch.setattr(exactness, "MOST", 70)
    hf = tiny_config("qwen3_moe")
    model = load_decoder(Path(), hf, dtype="float32", head_dtype="auto", load_format="dummy", seed=0, max_model_len=64)
    assert exactness.unequal_products(model) == []
    experts = ops.experts

    def by_their_number(x: Tensor, *rest: Any) -> Tensor:
        return by_the_batch(experts(x, *rest))

    monkeypatch.setattr(ops, "experts", by_their_number)
    assert exactness.unequal_products(model) == ["experts", "norms and products in turn"]


def test_rows_in_another_order_are_asked(model: Decoder) -> None:
    def by_place(rows: Tensor, adapters: Tensor) -> Tensor:
        out = rows * 2.0
        return out * (1.0 + 2**-20 if len(rows) > 64 and rows[0, 0] != first else 1.0)

    first = exactness.random_rows(0, 70, 4)[0, 0]
    assert not exactness.is_batch_invariant(by_place, 4, torch.float32)


class DoesNotFit(Exception):
    pass


def test_layers_whose_kernels_do_not_fit_are_named(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [tuple(torch.zeros(9, *shape) for shape in spec.shapes(16)) for spec in model.kv_specs()]

    def attend(*arguments: Any) -> Tensor:
        raise DoesNotFit("shared memory, required: 131072, limit: 101376")

    assert exactness.unsupported(model, pages, (DoesNotFit,)) == []
    monkeypatch.setattr(ops, "paged_attention", attend)
    assert exactness.unsupported(model, pages, (DoesNotFit,)) == [
        "attention of 4 heads of 16: shared memory, required: 131072, limit: 101376"
    ]


def test_latent_attention_that_differs_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_config("deepseek_v3")
    model = load_decoder(Path(), hf, dtype="float32", head_dtype="auto", load_format="dummy", seed=0, max_model_len=64)
    pages = [tuple(torch.zeros(9, *shape) for shape in spec.shapes(16)) for spec in model.kv_specs()]
    assert exactness.unequal_attention(model, pages) == []
    attend = ops.latent_attention

    def attend_by_the_batch(q: Tensor, *rest: Any) -> Tensor:
        return attend(q, *rest) * (1.0 + 2**-20 if q.shape[0] == 2 else 1.0)

    monkeypatch.setattr(ops, "latent_attention", attend_by_the_batch)
    heads = hf["num_attention_heads"]
    assert exactness.unequal_attention(model, pages) == [f"latent attention of {heads} heads"]


def test_adapter_products_that_depend_on_the_batch_are_detected(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    LoraTables(LoraConfig(enable_lora=True, max_loras=1, max_lora_rank=8), model, WeightsConfig()).attach(model)
    assert exactness.unequal_products(model) == []
    add = ops.add_lora
    requested: list[Tensor] = []

    def add_by_the_batch(out: Tensor, x: Tensor, adapters: Tensor, *rest: Any) -> None:
        requested.append(adapters)
        add(out, x, adapters, *rest)
        if x.shape[1] == model.blocks[0].mlp.down.inputs:
            out.copy_(by_the_batch(out))

    monkeypatch.setattr(ops, "add_lora", add_by_the_batch)
    assert exactness.unequal_products(model) == ["adapters of down"]
    assert {len(adapters) for adapters in requested} == {1, 64, 70} and requested[0].unique().tolist() == [-1, 0, 1]
