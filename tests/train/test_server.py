"""The policy against a real server: what decoding returned, scored again by the trainer.  Only `==`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.server import Served
from tests.e2e.test_deltas import in_client
from tests.models.driver import random_ids
from tests.threads import ServerThread
from tests.tiny_models import tiny_config, write_checkpoint
from tests.train.conftest import FAMILIES, MIXTURES
from tests.train.test_exact import padded, scored
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient
from tokserve.rl.client import Rollout
from tokserve.train import PolicyModel, exact, selective_logprobs

MODES = ("raw", "temperature", "processed")
CASES = [
    ("demo", "bfloat16"),
    *(
        pytest.param((name, dtype), marks=pytest.mark.slow)
        for name in FAMILIES | MIXTURES
        for dtype in ("bfloat16", "float32", "float16")
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    name, dtype = request.param
    if name == "demo":
        return name, dtype
    family, changes = (FAMILIES | MIXTURES)[name]
    return str(write_checkpoint(tmp_path_factory.mktemp(name), tiny_config(family, **changes))), dtype


@pytest.fixture(scope="module")
def server(checkpoint: tuple[str, str]) -> Iterator[Served]:
    model, dtype = checkpoint
    with ServerThread(model, "--dtype", dtype, "--tokens-only") as server:
        yield server


def arithmetic(server: Served) -> str:
    """What the server chose, which a policy has to be given where the choice is left to a measurement."""
    return str(server.get("/inference/v1/state").json()["arithmetic"])


@pytest.fixture
def policy(checkpoint: tuple[str, str], server: Served) -> PolicyModel:
    model, dtype = checkpoint
    return PolicyModel.from_pretrained(model, dtype=dtype, cpu_arithmetic=arithmetic(server))


def groups(server: Served, **sampling: Any) -> list[Rollout]:
    prompts = [random_ids(45, 256, seed) for seed in (1, 2)] + [[7]]
    return in_client(
        server,
        lambda client: client.generate(prompts, n=3, seeds=[11, 22, 33], max_tokens=20, ignore_eos=True, **sampling),
    )


def rescored(policy: PolicyModel, rollouts: list[Rollout], **options: Any) -> list[np.ndarray]:
    """The rollouts' logprobs by the policy."""
    rows = [np.concatenate([rollout.prompt_ids, rollout.token_ids]).tolist() for rollout in rollouts]
    scored = policy.logprobs(rows, [len(rollout.prompt_ids) for rollout in rollouts], **options)
    return [row.detach().numpy() for row in scored]


def assert_equal(policy: PolicyModel, rollouts: list[Rollout], **options: Any) -> None:
    for rollout, row in zip(rollouts, rescored(policy, rollouts, **options), strict=True):
        assert row.tolist() == rollout.logprobs.tolist()


@pytest.mark.some(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0**-9])
def test_decoded_logprobs(server: Served, policy: PolicyModel, mode: str, temperature: float) -> None:
    rollouts = groups(server, temperature=temperature, logprobs_mode=mode)
    assert len({tuple(rollout.token_ids.tolist()) for rollout in rollouts}) > 3 or temperature < 0.1
    assert_equal(policy, rollouts, temperature=temperature, logprobs_mode=mode)
    assert_equal(policy, rollouts, temperature=temperature, logprobs_mode=mode, share_prefixes=False)


def test_an_exact_model(checkpoint: tuple[str, str], server: Served) -> None:
    model, dtype = checkpoint
    directory = DEMO_DIR if model == "demo" else model
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    transformer = exact(plain, dtype=dtype, cpu_arithmetic=arithmetic(server))
    rollouts = groups(server, temperature=0.7, logprobs_mode="temperature")
    ids, mask = padded([[*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()] for rollout in rollouts], "left")
    logits = transformer(ids, attention_mask=mask).logits[:, :-1]
    actual = scored(selective_logprobs(logits, ids[:, 1:], 0.7), mask)
    for rollout, row in zip(rollouts, actual, strict=True):
        assert row[len(rollout.prompt_ids) - 1 :].tolist() == rollout.logprobs.tolist()


def test_logprobs_over_the_support_of_the_draws(server: Served, policy: PolicyModel) -> None:
    rows, starts, masks, expected = [], [], [], []
    for seed in range(3):
        prompt = random_ids(40, 256, seed)
        params = {"seed": seed, "max_tokens": 15, "ignore_eos": True, "temperature": 1.3, "top_k": 12, "top_p": 0.8}
        body = {
            "token_ids": prompt,
            "sampling_params": params | {"logprobs": 12, "logprobs_mode": "processed"},
            "logprobs_format": "arrays",
        }
        choice = server.post("/inference/v1/generate", body).json()["choices"][0]
        columns = choice["logprobs"]
        rows.append(prompt + choice["token_ids"])
        starts.append(len(prompt))
        kept = zip(columns["top_token_ids"], columns["top_logprobs"], strict=True)
        masks.append(
            [[i for i, value in zip(*row, strict=True) if value is not None and value > -9999.0] for row in kept]
        )
        expected.append(columns["token_logprobs"])
    assert len({len(mask) for row in masks for mask in row}) > 3
    actual = policy.logprobs(rows, starts, 1.3, "processed", masks)
    assert [np.float32(row).tolist() for row in expected] == [row.tolist() for row in actual]


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": -0.4, "logit_bias": {5: 2.5, 31: -1.25}},
    {"repetition_penalty": 30.0, "logit_bias": {7: 400.0}, "frequency_penalty": 2.0},  # extreme
    {"repetition_penalty": 0.6, "temperature": 0.0},
]


def test_bias_and_penalties(server: Served, policy: PolicyModel) -> None:
    rows, starts, expected, params = [], [], [], []
    for seed, penalties in enumerate(PENALTIES):
        sampling = {"temperature": 0.8, "max_tokens": 20, "ignore_eos": True, "seed": seed} | penalties
        options = {key: value for key, value in sampling.items() if key != "seed"}
        (rollout,) = in_client(
            server,
            lambda c, o=options, s=seed: c.generate(
                [random_ids(40, 256, s)], seeds=[s], logprobs_mode="processed", **o
            ),
        )
        rows.append([*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()])
        starts.append(len(rollout.prompt_ids))
        expected.append(rollout.logprobs.tolist())
        params.append(sampling)
    temperatures = [penalties["temperature"] for penalties in params]
    actual = policy.logprobs(rows, starts, temperatures, "processed", sampling_params=params)
    assert [row.tolist() for row in actual] == expected
    again = policy.logprobs(rows[1:2], starts[1:2], temperatures[1:2], "processed", sampling_params=params[1:2])
    assert torch.equal(again[0], actual[1])


def test_prompt_logprobs(server: Served, policy: PolicyModel) -> None:
    sequence = random_ids(150, 256, 5)
    params = {"max_tokens": 1, "prompt_logprobs": 0}
    body = {"token_ids": sequence, "sampling_params": params, "logprobs_format": "arrays"}
    reply = server.post("/inference/v1/generate", body).json()
    scored = reply["prompt_logprobs"]["token_logprobs"]
    (actual,) = policy.logprobs([sequence], [1])
    assert np.float32(scored[-149:]).tolist() == actual.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "steps", "delta"),
    [
        ("qwen3", "bfloat16", 3, True),
        *(
            pytest.param(family, dtype, 20, delta, marks=pytest.mark.slow)
            for family in ("qwen3", "qwen3_moe")
            for dtype in ("bfloat16", "float32")
            for delta in (True, False)
        ),
    ],
)
def test_steps_with_pushes(family: str, dtype: str, steps: int, delta: bool, tmp_path: Path) -> None:
    """Rollouts, a policy gradient, a push: the ratio stays exactly one, step after step."""
    directory = write_checkpoint(tmp_path, tiny_config(family))
    with ServerThread(str(directory), "--dtype", dtype, "--tokens-only") as server:
        policy = PolicyModel.from_pretrained(directory, dtype=dtype, cpu_arithmetic=arithmetic(server))
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5 if delta else 3e-4)

        async def scene(client: TokserveClient) -> None:
            for step in range(steps):
                rollouts = await client.generate(
                    [random_ids(45, 256, seed) for seed in (1, 2)],
                    n=3,
                    seeds=[11, 22],
                    max_tokens=20,
                    ignore_eos=True,
                    temperature=0.9,
                    logprobs_mode="temperature",
                )
                rows = [np.concatenate([rollout.prompt_ids, rollout.token_ids]).tolist() for rollout in rollouts]
                starts = [len(rollout.prompt_ids) for rollout in rollouts]
                scored = policy.logprobs(rows, starts, 0.9, "temperature")
                for rollout, row in zip(rollouts, scored, strict=True):
                    assert row.tolist() == rollout.logprobs.tolist(), step
                    assert rollout.weight_versions[0][0] == str(step)
                optimizer.zero_grad()
                advantages = torch.linspace(-1.0, 1.0, len(scored))
                torch.stack([row.sum() * a for row, a in zip(scored, advantages, strict=True)]).sum().backward()
                optimizer.step()
                pushed = await client.push(policy, str(step + 1), delta=delta)
                assert pushed.weight_version == str(step + 1)
                if delta and step and (family, dtype) == ("qwen3", "bfloat16"):  # fewer elements move
                    assert (pushed.mode, pushed.reason) == ("delta", None)
            digests = await client.weight_checksums()
            await client.update_weights(policy.named_parameters(), "whole")
            assert await client.compare_weights(policy.named_parameters()) == []
            await client.push(policy, "rounded")
            assert await client.weight_checksums() == digests

        in_client(server, scene)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_an_adapter_trained_here_and_served_there(dtype: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "base", tiny_config("llama"))
    with ServerThread(str(directory), "--dtype", dtype, "--tokens-only", "--enable-lora") as server:
        policy = PolicyModel.from_pretrained(directory, dtype=dtype, cpu_arithmetic=arithmetic(server))
        policy.add_adapter(["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], rank=6, alpha=24.0)
        trained = [master for master in policy.parameters() if master.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-2)
        seen = []
        for step in range(3):
            in_client(server, lambda c, at=str(step): c.push_adapter(policy, "policy", at, delta=True))
            rollouts = groups(server, model="policy", temperature=0.9, logprobs_mode="temperature")
            assert_equal(policy, rollouts, temperature=0.9, logprobs_mode="temperature")
            with policy.adapter_disabled():
                assert_equal(policy, groups(server))
            seen.append(rollouts[0].logprobs.tolist())
            rows = [np.concatenate([rollout.prompt_ids, rollout.token_ids]).tolist() for rollout in rollouts]
            scored = policy.logprobs(rows, [len(rollout.prompt_ids) for rollout in rollouts])
            optimizer.zero_grad()
            torch.stack([row.sum() * (-1) ** number for number, row in enumerate(scored)]).sum().backward()
            optimizer.step()
        assert seen[0] != seen[1] != seen[2]
