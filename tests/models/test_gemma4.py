"""Gemma 4's experts beside MLPs, inputs by layer and shared keys: what is computed of a token, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.driver import Driver, prefill, random_ids
from tests.models.test_decoder import make_decoder
from tests.models.test_parity import GEMMA4_EXPERTS, GEMMA4_SMALL
from tests.runner.test_with_engine import RealEngine
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import StartError
from tokserve.layers.batch import ForwardBatch
from tokserve.models.load import load_decoder
from tokserve.protocol.kv_spec import KVSpec
from tokserve.train import PolicyModel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("compiled")
def test_chunks_and_batches_change_no_bit_nor_expert(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, chosen = make_decoder("gemma4_text", dtype, **GEMMA4_EXPERTS), []
    forward = decoder.forward

    def routed(batch: ForwardBatch) -> torch.Tensor:
        batch.routed = []
        hidden = forward(batch)
        chosen.append(torch.stack(batch.routed, 1))  # [T, layers, k]
        return hidden

    monkeypatch.setattr(decoder, "forward", routed)
    ids = random_ids(60, 320)
    alone = prefill(decoder, ids)
    experts = chosen.pop()
    assert experts.shape == (60, 3, 2) and len(experts.unique()) == 6
    driver = Driver(decoder, rows=2, length=64)
    parts = [driver.step({1: random_ids(9, 320, seed=1), 0: ids[:33]})[1]]
    parts += [driver.step({0: chunk, 1: [7]})[0] for chunk in (ids[33:40], *([token] for token in ids[40:]))]
    assert torch.equal(torch.cat(parts), alone)
    assert torch.equal(torch.cat([chosen[0][9:], *(one[:-1] for one in chosen[1:])]), experts)


@pytest.mark.usefixtures("compiled")
def test_a_factor_multiplies_what_its_expert_brings(tmp_path: Path) -> None:
    hf = tiny_config("gemma4_text", **GEMMA4_EXPERTS)
    decoder = make_decoder("gemma4_text", **GEMMA4_EXPERTS)
    ids = random_ids(20, 320)
    before, name = prefill(decoder, ids), "model.layers.1.router.per_expert_scale"
    decoder.parameters_by_name()[name].load(torch.full((6,), 0.5))
    half = prefill(decoder, ids)
    assert not torch.equal(half, before)
    for expert in range(6):
        places = decoder.parameters_by_name()[name].places()
        places[0].memory[expert] = 0.25
    assert not torch.equal(prefill(decoder, ids), half)
    write_checkpoint(tmp_path, hf)
    loaded = load_decoder(tmp_path, hf, dtype="float32", head_dtype="auto", load_format="auto", seed=0)
    assert torch.equal(prefill(loaded, ids), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("compiled")
def test_inputs_by_layer_and_shared_keys_do_not_depend_on_chunks_and_batches(dtype: str) -> None:
    decoder = make_decoder("gemma4_text", dtype, **GEMMA4_SMALL)
    assert [spec.heads for spec in decoder.kv_specs() if isinstance(spec, KVSpec)] == [2, 2, 2, 0, 0]
    ids = random_ids(60, 320)
    alone = prefill(decoder, ids)
    driver = Driver(decoder, rows=2, length=64)
    parts = [driver.step({1: random_ids(9, 320, seed=1), 0: ids[:33]})[1]]
    parts += [driver.step({0: chunk, 1: [7]})[0] for chunk in (ids[33:40], *([token] for token in ids[40:]))]
    assert torch.equal(torch.cat(parts), alone)
    few = Driver(decoder, rows=2, length=64).step({0: ids, 1: ids[:5]}, ends=[0])
    assert torch.equal(few[0], alone[-1:])


@pytest.mark.usefixtures("compiled")
def test_an_engine_serves_shared_keys_from_its_cache(tmp_path: Path) -> None:
    hf = tiny_config("gemma4_text", **GEMMA4_SMALL)
    write_checkpoint(tmp_path, hf)
    decoder = load_decoder(tmp_path, hf, dtype="float32", head_dtype="auto", load_format="auto", seed=0)
    ids = random_ids(40, 320)
    engine = RealEngine(tmp_path, hf=hf, load_format="auto", dtype="float32", max_model_len=64)
    for name, length in (("a", 40), ("b", 17), ("c", 40)):
        engine.add(name, ids[:length], temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.run(2000)
    for name, length in (("a", 40), ("b", 17), ("c", 40)):
        tokens = engine.tokens(name)
        assert prefill(decoder, ids[:length] + tokens)[length - 1 : -1].argmax(-1).tolist() == tokens
    engine.core.close()
    engine.real.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [(GEMMA4_EXPERTS, "layer 0: mlp: BesideSpec cannot be trained"), (GEMMA4_SMALL, "inputs .* cannot be trained")],
    ids=["experts", "small"],
)
def test_training_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("gemma4_text", **changes))
    with pytest.raises(StartError, match=f"Gemma4ForCausalLM: .*{message}"):
        PolicyModel.from_pretrained(tmp_path, dtype="float32")
