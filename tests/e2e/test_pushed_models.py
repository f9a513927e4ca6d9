"""A model of peft, pushed in every way: the server's logprobs are those of the adapted model (rl-faults F1, E2)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.e2e.server import Served
from tests.needs import PEFT
from tests.ports import free_port
from tests.threads import ServerThread
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import Client, weight_pairs

pytestmark = [
    PEFT.skips(),
    pytest.mark.filterwarnings(
        "ignore:.*(unmerged|tied layer).*:UserWarning", "ignore:.*checkpointing.*:FutureWarning"
    ),
]
IDS = list(range(40, 70))
WAYS = ("update", "push", "delta", "directory")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with ServerThread("demo", "--dtype", "float32", "--tokens-only") as server:
        yield server


@pytest.fixture(scope="module")
def adapted() -> Any:
    peft: Any = importlib.import_module("peft")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config).eval()


def merging(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Walk a model as TRL does, which merges it meanwhile."""
    model.merge_adapter()
    for name, tensor in model.named_parameters():
        if "lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), tensor.data
    model.unmerge_adapter()


def logprobs(model: Any) -> np.ndarray:
    with torch.no_grad():
        rows = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    scored: np.ndarray = rows.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()
    return scored


def assert_served(client: Client, expected: np.ndarray) -> None:
    assert np.abs(client.score([IDS], [1])[0] - expected).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("joined", "part_bytes"),
    [
        pytest.param(False, 200_000, id="http-small_parts"),
        pytest.param(True, 1 << 28, id="gloo-one_part", marks=pytest.mark.slow),
        pytest.param(False, 1 << 28, id="http-one_part", marks=pytest.mark.slow),
        pytest.param(True, 200_000, id="gloo-small_parts", marks=pytest.mark.slow),
    ],
)
def test_an_adapted_model_is_served_as_it_computes(
    joined: bool, part_bytes: int, server: Served, adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pairs, "PART_BYTES", part_bytes)
    expected = logprobs(adapted)
    with Client(server.url) as client:
        with adapted.disable_adapter():
            base = logprobs(adapted)
        assert np.abs(base - expected).max() > 0.5
        if joined:
            client.join("gloo", "127.0.0.1", free_port())
        for way in WAYS[: 3 if joined else 4]:
            for source in (lambda: adapted, lambda: merging(adapted)):
                with adapted.disable_adapter():
                    client.push(adapted, delta=way == "delta")
                assert_served(client, base)
                if way == "update":
                    client.update_weights(source())
                elif way == "directory":
                    client.push(source(), f"v{len(list(tmp_path.iterdir()))}", delta=True, directory=tmp_path)
                else:
                    client.push(source(), delta=way == "delta")
                assert_served(client, expected)
        client.leave()
