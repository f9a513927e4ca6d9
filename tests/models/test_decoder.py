"""The decoder: its declarations, and the same bits however the work is cut and batched."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.driver import Driver, prefill, random_ids
from tests.tiers import paired, slow_except
from tests.tiny_families import FAMILIES
from tests.tiny_models import tiny_config
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.places import gather
from tokserve.layers.rope import RopeSpec
from tokserve.models import dummy
from tokserve.models.block import AROUND
from tokserve.models.decoder import Decoder
from tokserve.models.load import build, load_decoder
from tokserve.models.registry import decoder_spec
from tokserve.models.weights import load_into
from tokserve.protocol.kv_spec import KVSpec

SLOW = {  # families whose parts are those of others
    "olmoe",
    "flex_olmo",
    "granitemoe",
    "granitemoeshared",
    "ernie4_5_moe",
    "dots1",
    "minimax_m2",
    "hunyuan_v1_moe",
    "deepseek_v2",
    "glm4_moe_lite",
    "minicpm3",
    "youtu",
    "arcee",
    "cwm",
    "solar_open",
}
FEW = [family for family in FAMILIES if family not in SLOW]
EVERY = slow_except(FAMILIES, *FEW)
DTYPES = ["float32", "bfloat16"]
EVERY_PAIR = [
    *paired(FEW, DTYPES),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in product(sorted(SLOW), DTYPES)),
]
PROJECTIONS = ("self_attn.qkv", "self_attn.out", "mlp.gate_up", "mlp.down")


def make_decoder(family: str, dtype: str = "float32", **changes: Any) -> Decoder:
    hf = tiny_config(family, **changes)
    return load_decoder(Path("/nowhere"), hf, dtype=dtype, head_dtype="auto", load_format="dummy", seed=0)


def test_kv_specs_have_a_window_where_the_layer_has_one() -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    specs = make_decoder("qwen3", "bfloat16", **windowed).kv_specs()
    assert specs == (KVSpec(2, 16, "bfloat16"), KVSpec(2, 16, "bfloat16"), KVSpec(2, 16, "bfloat16", window=9))


def test_a_second_set_of_weights_shares_the_rope_table() -> None:
    decoder = make_decoder("llama")
    assert decoder.blank().rope_table is decoder.rope_table


def test_parameters_have_the_names_of_checkpoints() -> None:
    names = make_decoder("llama", num_hidden_layers=1, attention_bias=True).parameters_by_name()
    layer = "model.layers.0."
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    expected |= {f"{layer}{norm}_layernorm.weight" for norm in ("input", "post_attention")}
    expected |= {f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    expected |= {f"{layer}self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")}
    assert set(names) == expected
    assert names[f"{layer}self_attn.k_proj.weight"].shape == (32, 64)
    assert "lm_head.weight" not in make_decoder("qwen3").parameters_by_name()


@pytest.mark.parametrize(("family", "dtype"), EVERY_PAIR)
@pytest.mark.parametrize("kernels", ["cpp", pytest.param("torch", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.usefixtures("kernels")
def test_chunks_decoding_and_batching_change_no_bit(family: str, dtype: str) -> None:
    decoder = make_decoder(family, dtype)
    ids = random_ids(75, 320)
    alone = prefill(decoder, ids)
    cut = Driver(decoder, length=len(ids))
    chunks = [ids[:1], ids[1:18], ids[18:50], *([token] for token in ids[50:])]
    assert torch.equal(torch.cat([cut.step({0: chunk})[0] for chunk in chunks]), alone)
    others = Driver(decoder, rows=3, length=len(ids))
    others.step({1: random_ids(33, 320, seed=1), 2: random_ids(5, 320, seed=2)})
    first = others.step({2: random_ids(9, 320, seed=3), 0: ids[:40], 1: random_ids(1, 320, seed=4)})[1]
    rest = others.step({1: random_ids(2, 320, seed=5), 0: ids[40:]})[1]
    assert torch.equal(torch.cat((first, rest)), alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("kernels")
def test_computing_few_hidden_states_changes_no_bit(dtype: str) -> None:
    decoder = make_decoder("qwen3", dtype)
    work = {row: random_ids(count, 320, seed=row) for row, count in enumerate((40, 1, 17))}
    every, few = Driver(decoder, rows=3, length=64), Driver(decoder, rows=3, length=64)
    expected = every.step(work)
    for number, logits in zip((0, 2), few.step(work, ends=[0, 2]), strict=True):
        assert torch.equal(logits, expected[number][-1:])
    more = {0: [5], 1: random_ids(20, 320, seed=3), 2: [6, 7]}
    every.step(more)
    assert few.step(more, ends=[]) == []
    last = {0: [1], 1: [2], 2: [3]}  # reads what the steps before have stored
    assert torch.equal(torch.cat(few.step(last)), torch.cat(every.step(last)))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("kernels")
def test_given_embeddings_take_the_place_of_the_ids(family: str, dtype: str) -> None:
    decoder = make_decoder(family, dtype)
    ids, placeholder = random_ids(40, 320), 7
    expected = prefill(decoder, ids)
    embedded = decoder.embedding(torch.tensor(ids))
    rows = [*range(3, 9), 20, 39]
    hidden = [placeholder if row in rows else token for row, token in enumerate(ids)]
    assert not torch.equal(prefill(decoder, hidden), expected)

    def embeds(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        within = [row for row in rows if start <= row < stop]
        return torch.tensor(within) - start, embedded[within].float()

    driver = Driver(decoder, length=len(ids))
    assert torch.equal(driver.step({0: hidden}, embeds=embeds(0, 40))[0], expected)
    chunks = Driver(decoder, length=len(ids))
    parts = [chunks.step({0: hidden[a:b]}, embeds=embeds(a, b))[0] for a, b in ((0, 5), (5, 39), (39, 40))]
    assert torch.equal(torch.cat(parts), expected)
    ends = Driver(decoder, length=len(ids)).step({0: hidden}, ends=[0], embeds=embeds(0, 40))
    assert torch.equal(ends[0], expected[-1:])


def test_linear_layers_are_named_once() -> None:
    decoder = make_decoder("llama", num_hidden_layers=2)
    linears = decoder.named_linears()
    layers = [f"model.layers.{number}.{name}" for number in (0, 1) for name in PROJECTIONS]
    assert list(linears) == layers and len(set(linears.values())) == len(layers)
    targets = decoder.adapter_targets()
    assert targets["model.layers.1.self_attn.v_proj"] == ("model.layers.1.self_attn.qkv", "v_proj")
    weights = {name.removesuffix(".weight") for name in decoder.parameters_by_name() if name.endswith("_proj.weight")}
    assert targets.keys() == weights


@pytest.mark.usefixtures("kernels")
def test_blocks_need_not_be_alike() -> None:
    spec = decoder_spec(tiny_config("qwen3"))
    first, second, third = spec.blocks
    attention = first.attention
    other = replace(attention, kv_heads=4, dim=24, rope=RopeSpec(24, 500.0), scale=0.3, qk_norm=None, out_bias=True)
    blocks = (
        replace(first, attention=replace(attention, window=9)),
        replace(second, attention=other, mlp=MLPSpec(96, "gelu_tanh", bias=True)),
        replace(third, norm=NormSpec(1e-5, offset=1.0), norms=AROUND),
    )
    decoder = build(replace(spec, blocks=blocks), dtype="float32", head_dtype="auto", max_model_len=128)
    parameters = decoder.parameters_by_name()
    load_into(parameters, dummy.tensors(parameters, 0))
    assert decoder.kv_specs() == (KVSpec(2, 16, "float32", 9), KVSpec(4, 24, "float32"), KVSpec(2, 16, "float32"))
    assert [table.shape for table in decoder.rope_tables] == [(128, 16), (128, 24)]
    ids = random_ids(75, 320)
    alone = prefill(decoder, ids)
    assert alone.std() > 0.5
    cut = Driver(decoder, length=len(ids))
    chunks = [ids[:1], ids[1:18], ids[18:50], *([token] for token in ids[50:])]
    assert torch.equal(torch.cat([cut.step({0: chunk})[0] for chunk in chunks]), alone)
    assert decoder.row_bytes() > 4 * 320


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_but_those_of_experts_can_be_changed_by_elements(family: str) -> None:
    """Updates by deltas need it: where one tensor lacks its places, all weights are pushed."""
    hf = tiny_config(family, dtype="float32")
    decoder = load_decoder(Path("/nowhere"), hf, dtype="float32", head_dtype="auto", load_format="dummy", seed=0)
    parameters = decoder.parameters_by_name()
    lost = {name.removesuffix(".weight") for name, one in parameters.items() if not one.places()}
    assert all("expert" in name or name.endswith(("_correction_bias", ".kv_b_proj", ".sinks")) for name in lost)
    for name, tensor in dummy.tensors(parameters, 0):
        if places := parameters[name].places():
            held, indices = parameters[name].held, np.arange(0, tensor.numel(), 3)
            read, local = places[0].read, indices
            if held is None:
                actual = read(0, len(tensor))
            else:  # in another order
                actual, (_, local) = held.spread(read, 0, torch.zeros_like(tensor)), held.local(indices, tensor.shape)
            assert torch.equal(actual.float().view(tensor.shape), tensor)
            assert torch.equal(gather(places[0], places[0].positions(local), torch.float32), tensor.flatten()[indices])
