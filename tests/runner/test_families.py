"""Every family in the engine and the runner: cache, batch, preemption, adapters and updates under checkpoint names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.adapters import merge, write_adapter
from tests.runner.drive import make_runner
from tests.runner.test_lora import load, scores
from tests.runner.test_runner import prompt
from tests.runner.test_with_engine import RealEngine
from tests.tiny_families import FAMILIES
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.features.weights.staging import Staging
from tokserve.models.load import load_decoder as load_model
from tokserve.models.provenance import HEAD
from tokserve.rl.weight_pairs import named_tensors

# Those with a KV cache: without one, no request is preempted.
NEW = sorted(FAMILIES.keys() - {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "mamba2"})
FAST = ("gemma2", "cohere2")
EVERY = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NEW]


def run_all(directory: Path, family: str, **options: Any) -> tuple[dict[str, Any], int]:
    """What comes of requests of all kinds, and how many were preempted."""
    directory.mkdir()
    overrides = tiny_config(family) | {"num_hidden_layers": 2}
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        if name in overrides:
            overrides[name] = overrides[name][:2]
    if family == "nemotron_h":
        overrides["layers_block_type"] = ["linear_attention", "full_attention"]
    engine = RealEngine(directory, hf_overrides=overrides, **options)
    results = engine.run_all()
    return results, engine.stats.preemptions


@pytest.mark.some(1)
@pytest.mark.parametrize("family", EVERY)
def test_cache_batch_depth_and_preemption_change_no_bit(family: str, tmp_path: Path) -> None:
    known, _ = run_all(tmp_path / "one", family, depth=1, max_num_seqs=1, enable_prefix_caching=False)
    kinds = tiny_config(family).get("layer_types", [""] * 2)[:2]
    attending = (
        1 if family in ("bamba", "nemotron_h") else sum(kind not in ("linear_attention", "conv") for kind in kinds)
    )
    latent = "kv_lora_rank" in tiny_config(family)
    row = 32 + 8 if latent else 2 * 2 * 16  # a latent and a rotated key, or keys and values of two heads
    block = 16 * attending * row * 2  # tokens, layers, elements, bytes
    tight, preempted = run_all(tmp_path / "tight", family, depth=2, kv_cache_memory_bytes=18 * block)
    assert tight == known and preempted


ADAPTED = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "starcoder2": ["k_proj", "c_fc", "c_proj"],
    "granitemoehybrid": ["v_proj", "input_linear", "output_linear"],
    "glm4": ["q_proj", "gate_up_proj"],
    "cohere": ["q_proj", "up_proj"],
    "lfm2": ["in_proj", "out_proj", "k_proj", "w2"],
    "qwen3_5_text": ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj"],
    "olmo2": ["q_proj", "k_proj", "o_proj"],
    "minicpm3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


@pytest.mark.parametrize(
    "family", [name if name == "phi3" else pytest.param(name, marks=pytest.mark.slow) for name in ADAPTED]
)
def test_adapters_target_the_tensors_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    hf = tiny_config(family)
    base = write_checkpoint(tmp_path / "base", hf)
    adapter = write_adapter(tmp_path / "adapter", base, rank=5, targets=ADAPTED[family])
    runner, facts = make_runner(base, hf, load_format="auto", enable_lora=True)
    load(runner, 0, adapter)
    model = AutoModelForCausalLM.from_pretrained(merge(tmp_path / "merged", base, adapter))
    ids = prompt(60, 1)
    with torch.no_grad():
        exact = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
    assert (scores(runner, facts, ids, 0) - exact).abs().max() <= (2e-4 if family == "qwen3_5_text" else 1e-4)
    assert (scores(runner, facts, ids, -1) - exact).abs().max() > 0.1


ROUTED_BY_BUFFERS = {
    "glm4_moe": "mlp.gate.e_score_correction_bias",
    "deepseek_v3": "mlp.gate.e_score_correction_bias",
    "glm4_moe_lite": "mlp.gate.e_score_correction_bias",
    "dots1": "mlp.gate.e_score_correction_bias",
    "minimax_m2": "mlp.e_score_correction_bias",
    "lfm2_moe": "feed_forward.expert_bias",
}


@pytest.mark.parametrize(
    "family", [name if name == "glm4_moe" else pytest.param(name, marks=pytest.mark.slow) for name in ROUTED_BY_BUFFERS]
)
def test_a_module_of_transformers_is_a_whole_update(family: str, tmp_path: Path) -> None:
    """Its buffers too, which bias the choice of experts (rl-faults F5)."""
    hf = tiny_config(family)
    directory = write_checkpoint(tmp_path / "model", hf, seed=1)
    options: dict[str, Any] = {"dtype": "float32", "head_dtype": "auto", "load_format": "auto", "seed": 0}
    staging = Staging(load_model(directory, hf, **options).blank())
    tensors = named_tensors(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    assert any(name.endswith(ROUTED_BY_BUFFERS[family]) for name in tensors)
    for name, tensor in tensors.items():
        staging.push(name, tensor)
    staging.finish()


@pytest.mark.parametrize(
    "family", [name if name in ("cohere2", "glm4_moe") else pytest.param(name, marks=pytest.mark.slow) for name in NEW]
)
def test_random_weights_are_a_whole_update(family: str, tmp_path: Path) -> None:
    hf = tiny_config(family)
    options: dict[str, Any] = {"dtype": "float32", "head_dtype": "auto", "load_format": "dummy"}
    served, expected = (load_model(tmp_path, hf, **options, seed=seed) for seed in (0, 7))
    staging = Staging(served.blank())
    staging.draw(7)
    sums, expected_sums = (
        decoder.provenance.checksums(decoder.spec.renames, tied=decoder.spec.tied)[0]
        for decoder in (staging.finish(), expected)
    )
    assert sums == expected_sums and sums


LATER = {  # families whose tensors are named as those of others
    "olmoe",
    "flex_olmo",
    "dots1",
    "hunyuan_v1_moe",
    "granitemoe",
    "deepseek_v2",
    "glm4_moe_lite",
    "minicpm3",
    "youtu",
}


@pytest.mark.some(7)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name in LATER else name for name in NEW]
)
def test_updates_and_checksums_have_the_checkpoints_names(family: str, tmp_path: Path) -> None:
    hf = tiny_config(family)
    write_checkpoint(tmp_path / "old", hf)
    new = load_file(write_checkpoint(tmp_path / "new", hf, seed=1) / "model.safetensors")
    options: dict[str, Any] = {"dtype": "float32", "head_dtype": "auto", "load_format": "auto", "seed": 0}
    served, target = (load_model(tmp_path / name, hf, **options) for name in ("old", "new"))
    staging = Staging(served.blank())
    for name, tensor in new.items():
        staging.push(name, tensor)
    fresh = staging.finish()
    sums, expected = (
        decoder.provenance.checksums(decoder.spec.renames, tied=decoder.spec.tied)[0] for decoder in (fresh, target)
    )
    assert sums == expected and set(sums) - {HEAD} == set(new) - {HEAD}  # a tied head is listed under both names
    ids = torch.tensor(json.loads("[1, 2, 3]"))
    assert torch.equal(fresh.embedding(ids), target.embedding(ids))
    for number, linear in enumerate(fresh.named_linears().values()):
        other = list(target.named_linears().values())[number]
        assert torch.equal(linear.packed.packed, other.packed.packed)  # type: ignore[union-attr]
