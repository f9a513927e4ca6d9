"""A trainer on a real GPU: a server's logprobs with ==, and gradients near to a CPU's; for scripts/gpu_check.sh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.e2e.server import Server
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.train import PolicyModel

pytestmark = [
    pytest.mark.gpu,
    needs.GPU.skips(),
]
DEVICE = "cuda"


def ids(number: int, count: int) -> list[int]:
    return [5 + (number * 7 + i * i) % 200 for i in range(count)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_policy_has_the_bits_of_the_server(dtype: str) -> None:
    prompts = [ids(number // 4, 3 + number // 4 * 90) for number in range(12)]  # groups of four
    with Server("demo", "--device", DEVICE, "--dtype", dtype) as server:

        def ask(number: int) -> Any:
            return server.generate(prompts[number], max_tokens=30, temperature=0.9, seed=number, logprobs=0)["choices"][
                0
            ]

        replies = [ask(number) for number in range(12)]
    rows = [prompt + reply["token_ids"] for prompt, reply in zip(prompts, replies, strict=True)]
    starts = [len(prompt) for prompt in prompts]
    policy = PolicyModel.from_pretrained("demo", dtype=dtype, device=DEVICE)
    for share in (True, False):
        scored = policy.logprobs(rows, starts, share_prefixes=share)
        for row, reply in zip(scored, replies, strict=True):
            assert row.tolist() == [entry["logprob"] for entry in reply["logprobs"]["content"]]


def gradient(policy: PolicyModel, rows: list[list[int]], **options: Any) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    scored = policy.logprobs(rows, [1] * len(rows), **options)
    torch.stack(
        [(row * torch.linspace(-1.0, 2.0, len(row), device=row.device)).sum() for row in scored]
    ).sum().backward()
    return {name: master.grad.cpu() for name, master in policy.named_parameters() if master.grad is not None}


def test_gradients_are_near_to_a_cpus_and_have_one_order() -> None:
    rows = [ids(0, 100) + ids(number, 20 + number * 50) for number in range(1, 6)] + [ids(9, 37)]
    expected = gradient(PolicyModel.from_pretrained("demo", dtype="float32"), rows)
    for dtype, error in (("float32", 1e-4), ("bfloat16", 5e-2)):
        policy = PolicyModel.from_pretrained("demo", dtype=dtype, device=DEVICE)
        actual = gradient(policy, rows)
        flat, exact = (torch.cat([part.flatten() for part in grads.values()]) for grads in (actual, expected))
        assert (flat - exact).norm() < error * exact.norm()
        again = gradient(policy, rows)
        assert all(torch.equal(again[name], part) for name, part in actual.items())
        policy.activation_bytes = 0
        recomputed = gradient(policy, rows)
        assert all(torch.equal(recomputed[name], part) for name, part in actual.items())
        policy.ordered_gradients = True
        together = gradient(policy, rows)
        policy.zero_grad()
        for row in rows:
            (scored,) = policy.logprobs([row], [1])
            (scored * torch.linspace(-1.0, 2.0, len(scored), device=scored.device)).sum().backward()
        assert all(torch.equal(policy.get_parameter(name).grad.cpu(), part) for name, part in together.items())  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["cohere", "qwen2_moe", "glm4_moe", "qwen3_5_text", "lfm2", "bamba"])
def test_other_layers_have_a_cpus_gradients_and_one_order(family: str, tmp_path: Path) -> None:
    """Norms that subtract the mean, mixtures and recurrent states; a sequence's logprobs are the same by itself."""
    directory = write_checkpoint(tmp_path, tiny_config(family))
    rows = [ids(0, 100) + ids(number, 20 + number * 30) for number in range(1, 4)] + [ids(9, 37)]
    expected = gradient(PolicyModel.from_pretrained(directory, dtype="float32"), rows)
    policy = PolicyModel.from_pretrained(directory, dtype="float32", device=DEVICE)
    actual = gradient(policy, rows)
    flat, exact = (torch.cat([grads[name].flatten() for name in expected]) for grads in (actual, expected))
    assert (flat - exact).norm() < 1e-3 * exact.norm()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # which a trainer may do
    try:
        again = gradient(policy, rows)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert all(torch.equal(again[name], part) for name, part in actual.items())
    policy.activation_bytes = 0
    recomputed = gradient(policy, rows)
    assert all(torch.equal(recomputed[name], part) for name, part in actual.items())
    with torch.no_grad():
        together = policy.logprobs(rows, [1] * len(rows))
        assert torch.equal(policy.logprobs(rows[1:2], [1])[0], together[1])
    halves = PolicyModel.from_pretrained(directory, dtype="bfloat16", device=DEVICE)
    once, twice = (gradient(halves, rows) for _ in range(2))
    assert all(torch.equal(twice[name], part) for name, part in once.items())
