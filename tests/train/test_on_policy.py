"""Twenty optimizer steps of the demo model against a real server, with pushes between them: the ratio stays one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.server import Server
from tests.models.driver import random_ids
from tests.needs import PEFT
from tests.tiny_models import tiny_config, write_checkpoint
from tests.train.on_policy import train
from tests.train.test_server import arithmetic, in_client
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient
from tokserve.train import PolicyModel, exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.*:FutureWarning", "ignore:.*(lora_bias|unmerged|tied layer).*:UserWarning"
    ),
]

STEPS = 20
HYBRIDS = {  # projections of both kinds of layers
    "qwen3_5_text": ["q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "down_proj"],
    "lfm2": ["q_proj", "in_proj", "out_proj", "w1"],
    "bamba": ["q_proj", "in_proj", "out_proj", "down_proj"],
}
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def prompts() -> list[list[int]]:
    return [random_ids(33, 256, 1), random_ids(20, 256, 2)]


@pytest.mark.parametrize("trainer", ["policy", "exact"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_full_pushes_and_deltas(dtype: str, trainer: str) -> None:
    with Server("demo", "--dtype", dtype, "--tokens-only") as server:
        model = trainer_of(trainer, dtype, server)

        async def scene(client: TokserveClient) -> None:
            modes = set()

            async def push(step: int) -> None:
                pushed = await client.push(model, str(step + 1), delta=step % 5 != 4)
                modes.add(pushed.mode)

            await train(client, model, prompts(), STEPS, push, lr=2e-6)
            assert "full" in modes
            if dtype == "bfloat16":  # in float32 nearly every element moves
                assert "delta" in modes

        in_client(server, scene)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids(family: str, adapter: bool, tmp_path: Path) -> None:
    """Models with recurrent states: pushes and deltas of all weights, or adapters of all projections."""
    checkpoint = write_checkpoint(tmp_path / "base", tiny_config(family))
    flags = ["--enable-lora"] if adapter else []
    with Server(str(checkpoint), "--dtype", "bfloat16", "--tokens-only", *flags) as server:
        policy = PolicyModel.from_pretrained(checkpoint, dtype="bfloat16", cpu_arithmetic=arithmetic(server))
        if adapter:
            policy.add_adapter(HYBRIDS[family], rank=6, alpha=24.0)

        async def scene(client: TokserveClient) -> None:
            async def publish(step: int) -> None:
                if adapter:
                    policy.save_adapter(tmp_path / str(step))
                    await client.load_lora_adapter("policy", str(tmp_path / str(step)))
                else:
                    await client.push(policy, str(step + 1), delta=step % 3 != 2)

            await publish(-1)
            served = "policy" if adapter else None
            await train(client, policy, prompts(), 6, publish, lr=1e-2 if adapter else 1e-4, served=served)

        in_client(server, scene)


def trainer_of(trainer: str, dtype: str, server: Server) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "cpu_arithmetic": arithmetic(server)}
    if trainer == "policy":
        return PolicyModel.from_pretrained("demo", **options)
    return exact(AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32), **options)


@pytest.mark.parametrize("trainer", ["policy", pytest.param("exact", marks=PEFT.skips())])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_adapter(dtype: str, trainer: str, tmp_path: Path) -> None:
    with Server("demo", "--dtype", dtype, "--tokens-only", "--enable-lora") as server:
        model = trainer_of(trainer, dtype, server)
        if trainer == "policy":
            model.add_adapter(TARGETS, rank=6, alpha=24.0)
            save = model.save_adapter
        else:
            peft = importlib.import_module("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=6, lora_alpha=24, target_modules=TARGETS))
            save = model.save_pretrained

        async def scene(client: TokserveClient) -> None:
            async def load(step: int) -> None:
                save(tmp_path / str(step))
                await client.load_lora_adapter("policy", str(tmp_path / str(step)))

            await load(-1)
            await train(client, model, prompts(), STEPS, load, lr=1e-2, served="policy")

        in_client(server, scene)
