"""What is read of a PEFT directory, and how each thing that does not fit is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import write_adapter
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import RequestError
from tokserve.features.lora import adapter_files
from tokserve.layers.low_rank import LowRank
from tokserve.models.spec import HEADLESS

HIDDEN, INNER = 64, 160
LAYER = "model.layers.1.mlp.gate_proj"
KEY = f"base_model.model.{LAYER}"
SIZES = {
    f"model.layers.{layer}.{name}": size
    for layer in range(3)
    for name, size in {
        "self_attn.q_proj": (HIDDEN, 64),
        "self_attn.k_proj": (HIDDEN, 32),
        "self_attn.v_proj": (HIDDEN, 32),
        "self_attn.o_proj": (64, HIDDEN),
        "mlp.gate_proj": (HIDDEN, INNER),
        "mlp.up_proj": (HIDDEN, INNER),
        "mlp.down_proj": (INNER, HIDDEN),
    }.items()
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), tiny_config("llama"))


def read(directory: Path, max_rank: int = 16) -> dict[str, LowRank]:
    return adapter_files.read_adapter(directory, SIZES, HEADLESS, max_rank)


def refusal(directory: Path, max_rank: int = 16) -> str:
    with pytest.raises(RequestError) as refused:
        read(directory, max_rank)
    assert refused.value.field == "lora_path" and refused.value.status == 400
    return str(refused.value)


def test_all_linear_layers_are_read_with_their_scale(base: Path, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path, base, rank=4, alpha=6.0)
    actual, written = read(directory), load_file(directory / adapter_files.TENSORS)
    assert actual.keys() == SIZES.keys()
    for module, weights in actual.items():
        assert torch.equal(weights.down, written[f"base_model.model.{module}.lora_A.weight"])
        assert torch.equal(weights.up, written[f"base_model.model.{module}.lora_B.weight"])
        assert weights.scale == 1.5


def test_some_layers_ranks_and_scales_of_their_own(base: Path, tmp_path: Path) -> None:
    directory = write_adapter(
        tmp_path,
        base,
        rank=4,
        alpha=8,
        targets=["q_proj", "down_proj"],
        use_rslora=True,
        rank_pattern={"down_proj": 9},
        alpha_pattern={"layers.1.self_attn.q_proj": 2.0, "proj": 1.0, "n.q_proj": 1.0},
    )
    actual = read(directory)
    assert {name.rpartition(".")[2] for name in actual} == {"q_proj", "down_proj"}
    assert actual["model.layers.0.mlp.down_proj"].down.shape == (9, INNER)
    assert actual["model.layers.0.mlp.down_proj"].scale == pytest.approx(8 / 3)
    assert actual["model.layers.1.self_attn.q_proj"].scale == pytest.approx(2 / math.sqrt(4))
    assert actual["model.layers.2.self_attn.q_proj"].scale == pytest.approx(8 / math.sqrt(4))


def test_patterns_may_be_null(base: Path, tmp_path: Path) -> None:
    actual = read(write_adapter(tmp_path, base, rank=4, alpha=8, rank_pattern=None, alpha_pattern=None))
    assert {low_rank.scale for low_rank in actual.values()} == {2.0}


def test_names_of_a_state_dict_and_of_a_model_without_head_are_known(base: Path, tmp_path: Path) -> None:
    down, up = torch.ones(4, HIDDEN), torch.ones(INNER, 4)
    changes = {f"{KEY}.lora_A.weight": None, f"{KEY}.lora_B.weight": None}
    head_tensors = {
        "base_model.model.layers.1.mlp.gate_proj.lora_A.default.weight": down,
        "base_model.model.layers.1.mlp.gate_proj.lora_B.default.weight": up,
    }
    actual = read(write_adapter(tmp_path, base, tensors=changes | head_tensors))
    assert torch.equal(actual[LAYER].down, down) and torch.equal(actual[LAYER].up, up)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type must be LORA"),
        ({"bias": "all"}, "bias must be none"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"rank_pattern": {"^.*q_proj$": 8}}, "rank_pattern"),
        ({"r": 0}, "r"),
        ({"r": "many"}, "r"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": math.inf}, "lora_alpha must be finite"),
        ({"lora_alpha": 1e308}, "lora_alpha must be finite"),
        ({"alpha_pattern": {"q_proj": math.nan}}, "lora_alpha must be finite"),
        ({"r": 17}, "--max-lora-rank 16"),
        ({"r": 8}, "expected [8, 64], found [4, 64]"),
    ],
)
def test_unsupported_adapter_options_are_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    directory = write_adapter(tmp_path, base, rank=4)
    file = directory / adapter_files.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert words in refusal(directory)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{KEY}.lora_A.weight": torch.ones(4, 63)}, f"{KEY}.lora_A.weight (expected [4, 64], found [4, 63])"),
        ({f"{KEY}.lora_B.weight": torch.ones(161, 4)}, f"{KEY}.lora_B.weight (expected [160, 4], found [161, 4])"),
        ({f"{KEY}.lora_B.weight": torch.ones(160, 4).int()}, f"unsupported dtype: {KEY}.lora_B.weight (I32)"),
        ({f"{KEY}.lora_B.weight": None}, f"missing: {LAYER}.lora_B"),
        ({f"{KEY}.lora_B.default.weight": torch.ones(160, 4)}, "twice"),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.ones(320, 4),
            },
            "lm_head",
        ),
        (
            {
                "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 64),
                "base_model.model.model.layers.7.mlp.up_proj.lora_B.weight": torch.ones(160, 4),
            },
            "layers.7.mlp.up_proj",
        ),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 64)}, "lora_embedding_A"),
        ({f"{KEY}.lora_magnitude_vector": torch.ones(160)}, "lora_magnitude_vector"),
    ],
)
def test_tensors_that_do_not_fit_are_named(base: Path, tmp_path: Path, tensors: dict[str, Any], words: str) -> None:
    assert words in refusal(write_adapter(tmp_path, base, rank=4, tensors=tensors))


def test_missing_and_invalid_adapter_files_are_named(base: Path, tmp_path: Path) -> None:
    assert adapter_files.CONFIG in refusal(tmp_path)
    directory = write_adapter(tmp_path, base)
    (directory / adapter_files.TENSORS).rename(directory / "adapter_model.bin")
    assert "adapter_model.bin" in refusal(directory)
    (directory / adapter_files.TENSORS).write_bytes(b"\x00" * 50)
    assert "safetensors" in refusal(directory)
    for text in ("[]", "{", "[" * 100_000):
        (directory / adapter_files.CONFIG).write_text(text)
        assert f"{adapter_files.CONFIG} of the adapter" in refusal(directory)


def test_an_adapter_without_tensors(base: Path, tmp_path: Path) -> None:
    assert "there are none" in refusal(write_adapter(tmp_path, base, targets=[]))
