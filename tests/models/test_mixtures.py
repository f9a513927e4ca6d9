"""Mixtures of experts: layouts of checkpoints, updates, and that a token's bits depend on its prefix alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.driver import Driver, prefill, random_ids
from tests.models.test_load import opened
from tests.tiers import slow_after
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.families.quantization.quantized import quantize_int4
from tokserve.features.weights.coordinates import Coordinates
from tokserve.features.weights.staging import Staging
from tokserve.models import weights
from tokserve.models.load import build
from tokserve.models.registry import decoder_spec
from tokserve.ops import PackedWna16

IDS = random_ids(60, 320)
STACKED = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def stacked(tensors: dict[str, Tensor], names: tuple[str, str, str]) -> dict[str, Tensor]:
    """The tensors as transformers 5 has them in memory: one for all experts."""
    gates = [name for name in tensors if name.endswith(f"experts.0.{names[0]}.weight")]
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for gate in gates:
        prefix = gate.removesuffix(f"0.{names[0]}.weight")
        count = sum(name.startswith(prefix) for name in tensors) // 3
        parts = [[tensors[f"{prefix}{e}.{name}.weight"] for e in range(count)] for name in names]
        result[f"{prefix}gate_up_proj"] = torch.cat((torch.stack(parts[0]), torch.stack(parts[1])), 1)
        result[f"{prefix}down_proj"] = torch.stack(parts[2])
    return {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in result.items()}


def written(directory: Path, family: str, seed: int = 0) -> tuple[Path, dict[str, Tensor]]:
    write_checkpoint(directory, tiny_config(family), seed=seed)
    return directory, load_file(directory / weights.SINGLE)


@pytest.mark.parametrize("family", STACKED)
@pytest.mark.usefixtures("kernels")
def test_one_tensor_for_all_experts_is_the_same_model(family: str, tmp_path: Path) -> None:
    directory, tensors = written(tmp_path, family)
    expected = prefill(opened(directory), IDS)
    both = stacked(tensors, STACKED[family])
    assert len(both) < len(tensors)
    save_file(both, directory / weights.SINGLE)
    assert torch.equal(prefill(opened(directory), IDS), expected)


def test_duplicate_and_missing_experts_are_named(tmp_path: Path) -> None:
    directory, tensors = written(tmp_path, "qwen3_moe")
    both = stacked(tensors, STACKED["qwen3_moe"])
    extra = "model.layers.0.mlp.experts.3.up_proj.weight"
    save_file(both | {extra: tensors[extra]}, directory / weights.SINGLE)
    with pytest.raises(StartError, match=f"1 unexpected: {extra}"):
        opened(directory)
    del tensors[extra]
    save_file(tensors, directory / weights.SINGLE)
    with pytest.raises(StartError, match=f"1 missing: {extra}"):
        opened(directory)


@pytest.mark.parametrize("fused", [False, True], ids=["by expert", "stacked"])
def test_an_update_takes_either_layout(fused: bool, tmp_path: Path) -> None:
    decoder = opened(written(tmp_path / "old", "qwen3_moe", seed=1)[0])
    new, tensors = written(tmp_path / "new", "qwen3_moe", seed=2)
    if fused:
        tensors = stacked(tensors, STACKED["qwen3_moe"])
    staging = Staging(decoder.blank())
    for name, tensor in reversed(tensors.items()):
        staging.push(name, tensor)
    updated = staging.finish()
    assert torch.equal(prefill(updated, IDS), prefill(opened(new), IDS))
    checksums, _ = updated.provenance.checksums(updated.spec.renames, tied=False)
    assert checksums.keys() == tensors.keys()


def test_an_update_that_is_not_complete_or_comes_twice_is_refused(tmp_path: Path) -> None:
    directory, tensors = written(tmp_path, "qwen3_moe")
    decoder, both = opened(directory), stacked(tensors, STACKED["qwen3_moe"])
    expert, gate_up = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"
    for first, second in ((expert, gate_up), (gate_up, expert)):
        staging = Staging(decoder.blank())
        staging.push(first, (tensors | both)[first])
        with pytest.raises(RequestError, match=f"1 sent twice: {second}"):
            staging.push(second, (tensors | both)[second])
        with pytest.raises(RequestError, match="missing: "):
            staging.finish()
    staging = Staging(decoder.blank())
    with pytest.raises(RequestError, match=r"misshapen: .*gate_up_proj"):
        staging.push(gate_up, both[gate_up].transpose(1, 2).contiguous())


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kernels", slow_after(["cpp", "torch"], 1), indirect=True)
@pytest.mark.usefixtures("kernels")
def test_rows_do_not_depend_on_their_batch(family: str, quantization: str | None, tmp_path: Path) -> None:
    """Experts get no rows, one, or many, from other requests, in another order."""
    directory, _ = written(tmp_path, family)
    decoder = opened(directory, dtype="bfloat16", quantization=quantization)
    texts = [random_ids(3 + 7 * row, 320, seed=row) for row in range(4)]
    alone = [prefill(decoder, ids) for ids in texts]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        together = Driver(decoder, rows=4, length=64).step({row: texts[row] for row in order})
        assert all(torch.equal(rows, alone[row]) for row, rows in zip(order, together, strict=True))
    step = Driver(decoder, length=64)
    assert torch.equal(torch.cat([step.step({0: [token]})[0] for token in texts[3]]), alone[3])


def test_int8_changes_the_experts(tmp_path: Path) -> None:
    directory, _ = written(tmp_path, "qwen3_moe")
    plain, quantized = prefill(opened(directory), IDS), prefill(opened(directory, quantization="int8"), IDS)
    assert 0 < (plain - quantized).abs().mean() < 0.4  # one expert of another choice weighs more


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_int4_is_the_model_of_the_rounded_weights(family: str, tmp_path: Path) -> None:
    directory, tensors = written(tmp_path, family)
    quantized = opened(directory, quantization="int4", group_size=32)
    assert all(isinstance(packed, PackedWna16) for packed in quantized.blocks[1].mlp.experts.gate_up)
    result = prefill(quantized, IDS).log_softmax(-1)

    def rounded(name: str, tensor: Tensor) -> Tensor:
        if "_proj" not in name or name.endswith("bias"):
            return tensor
        if tensor.ndim == 2:
            return quantize_int4(tensor, 32).dense()
        return torch.stack([quantize_int4(one.t(), 32).dense().t() for one in tensor]).contiguous()

    save_file({name: rounded(name, tensor) for name, tensor in tensors.items()}, directory / weights.SINGLE)
    assert (result - prefill(opened(directory), IDS).log_softmax(-1)).abs().max() < 2e-4


def test_adapters_take_attention_and_the_shared_block_not_the_experts(tmp_path: Path) -> None:
    decoder = opened(written(tmp_path, "qwen2_moe")[0])
    targets = decoder.adapter_targets()
    assert "model.layers.0.mlp.shared_expert.up_proj" in targets and "model.layers.0.self_attn.q_proj" in targets
    assert "model.layers.1.mlp.up_proj" in targets  # of a layer without experts
    assert not any(".experts." in name or name.endswith(".gate") for name in targets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 99}, "num_experts_per_tok is 99"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be an integer of at least 1"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=message):
        write_checkpoint(tmp_path, tiny_config("qwen3_moe", **changes))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_deltas_are_refused_by_name(family: str, tmp_path: Path) -> None:
    refusal = Coordinates(opened(written(tmp_path, family)[0])).refusal()
    assert refusal is not None and "of experts or packed in parts" in refusal and "push full weights" in refusal


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_trainer_may_round_experts_to_the_models_dtype_first(quantization: str | None) -> None:
    spec = decoder_spec(tiny_config("qwen3_moe"))
    decoder = build(spec, dtype="bfloat16", head_dtype="auto", quantization=quantization)
    parameters = decoder.parameters_by_name() | {k: v.parameter for k, v in decoder.stacked_parameters().items()}
    assert {one.source_dtype for name, one in parameters.items() if "experts" in name} == {torch.bfloat16}
