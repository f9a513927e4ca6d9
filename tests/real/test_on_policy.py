"""SmolLM2 as a trainer's policy: twenty optimizer steps with pushes between them, and no logprob ever differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.server import Server
from tests.real.conftest import Model
from tests.train.on_policy import train
from tests.train.test_server import arithmetic, in_client
from tokserve.rl import TokserveClient
from tokserve.train import PolicyModel, exact

pytestmark = [pytest.mark.network, pytest.mark.timeout(1800)]

STEPS = 20


@pytest.mark.parametrize("trainer", ["policy", "exact", "adapter"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_ratio_stays_one(smollm2: Model, dtype: str, trainer: str, tmp_path: Any) -> None:
    flags = ["--dtype", dtype, "--max-model-len", "1024", "--tokens-only", "--enable-lora"]
    with Server(str(smollm2.directory), *flags) as server:
        options: dict[str, Any] = {"dtype": dtype, "cpu_arithmetic": arithmetic(server)}
        if trainer == "exact":
            plain = AutoModelForCausalLM.from_pretrained(smollm2.directory, dtype=torch.float32)
            model: Any = exact(plain, **options)
        else:
            model = PolicyModel.from_pretrained(smollm2.directory, **options)
        if trainer == "adapter":
            model.add_adapter(["q_proj", "v_proj", "down_proj"], rank=8)

        async def scene(client: TokserveClient) -> None:
            async def publish(step: int) -> None:
                if trainer != "adapter":
                    await client.push(model, str(step + 1), delta=step % 5 != 4)
                    return
                model.save_adapter(tmp_path / str(step))
                await client.load_lora_adapter("policy", str(tmp_path / str(step)))

            if trainer == "adapter":
                await publish(-1)
            served = "policy" if trainer == "adapter" else None
            lr = 1e-3 if trainer == "adapter" else 1e-6
            await train(client, model, smollm2.prompts[:2], STEPS, publish, lr=lr, served=served)

        in_client(server, scene)
