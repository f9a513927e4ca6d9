"""A policy that computes with the Triton kernels alone, in the interpreter: it has the bits of a server on a GPU, and
gradients near to float64 and to a CPU's.

The interpreter multiplies no bfloat16, so models are float32 or float16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

triton = pytest.importorskip("triton")

from tests.models.driver import prefill, random_ids  # noqa: E402
from tests.runner import test_triton  # noqa: E402
from tests.runner.drive import Driver, Job, make_runner  # noqa: E402
from tests.runner.test_runner import outcomes  # noqa: E402
from tests.tiny_models import tiny_config, write_checkpoint  # noqa: E402
from tests.train import references  # noqa: E402
from tests.train.references import cosine  # noqa: E402
from tests.train.test_families import by_master  # noqa: E402
from tests.train.test_policy import gradients, half, weights  # noqa: E402
from tokserve import ops  # noqa: E402
from tokserve.models.load import load_decoder  # noqa: E402
from tokserve.ops import devices  # noqa: E402
from tokserve.ops.registry import OPS  # noqa: E402
from tokserve.protocol.params import SamplingParams  # noqa: E402
from tokserve.train import PolicyModel, exact, exact_model, selective_logprobs  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="for the interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
on_triton = test_triton.kernels  # runners that run the kernels
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16"])


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is asked for on "cuda" gets the kernels, and tensors of the CPU, where the interpreter runs."""
    bind, before = ops.bind, {name: getattr(ops, name) for name in [*OPS, "torch_device"]}

    def bind_kernels(kind: str, *rest: object, **options: object) -> dict[str, str]:
        bound = bind(kind, *rest, **options)  # type: ignore[arg-type]
        ops.torch_device = torch.device("cpu")
        return bound

    monkeypatch.setattr(ops, "bind", bind_kernels)
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    yield
    for name, value in before.items():
        setattr(ops, name, value)


def model_of(directory: Path, name: str = "qwen3", **changes: object) -> Path:
    return write_checkpoint(directory, tiny_config(name, num_hidden_layers=1, **changes))


def rollouts() -> list[list[int]]:
    """A group with a common prompt, one of whose rows another one begins with; and a row alone."""
    prompt = random_ids(19, 320, 1)
    return [prompt + random_ids(7, 320, 2), prompt + random_ids(4, 320, 3), prompt[:11], random_ids(6, 320, 4)]


def near(actual: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).norm() <= error * expected[name].norm(), name


@DTYPES
def test_logprobs_equal_the_decoders_and_gradients_are_near_to_float64(tmp_path: Path, dtype: str) -> None:
    directory = model_of(tmp_path)
    policy = PolicyModel.from_pretrained(directory, dtype=dtype, device="cuda")
    assert {one for name, one in policy._binding._chosen.items() if name != "packed_positions"} == {"triton"}
    rows = rollouts()
    starts = half(rows)
    actual = gradients(policy, rows, starts)
    hf = json.loads((directory / "config.json").read_text())
    decoder = load_decoder(directory, hf, dtype=dtype, head_dtype="auto", load_format="auto", seed=0)
    leaves = {
        name: master.detach().to(getattr(torch, dtype)).double().requires_grad_()
        for name, master in policy.named_parameters()
    }
    scored = policy.logprobs(rows, starts)
    for row, start, logprobs in zip(rows, starts, scored, strict=True):
        logits = prefill(decoder, row)[start - 1 : -1]
        assert torch.equal(logprobs, ops.logprobs(logits, torch.tensor(row[start:]), 0, None, None)[0])
        reference = references.logprobs(hf, leaves, row, start)
        (reference * weights(reference)).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert cosine(actual[name], leaf.grad) > (0.999999 if dtype == "float32" else 0.999), name


def test_trees_masks_penalties_and_recomputed_blocks_are_as_on_a_cpu(tmp_path: Path) -> None:
    directory = model_of(tmp_path, "llama", attention_bias=True, tie_word_embeddings=True)
    rows = rollouts()
    starts = half(rows)
    masks = [
        [None if at % 3 == 0 else [row[at], 5, 300] for at in range(start, len(row))]
        for row, start in zip(rows, starts, strict=True)
    ]
    params = [{"temperature": 0.7, "repetition_penalty": 1.3, "logit_bias": {"7": 2.0}}, None, None, None]
    options = {
        "temperature": [0.7, 1.0, 0.0, 0.5],
        "logprobs_mode": "processed",
        "sampling_masks": masks,
        "sampling_params": params,
    }
    on_cpu = PolicyModel.from_pretrained(directory, dtype="float32")
    expected_rows, expected = on_cpu.logprobs(rows, starts, **options), gradients(on_cpu, rows, starts, **options)  # type: ignore[arg-type]
    policy = PolicyModel.from_pretrained(directory, dtype="float32", device="cuda")
    actual = gradients(policy, rows, starts, **options)
    near(actual, expected, 1e-5)
    policy.activation_bytes = 0
    again = gradients(policy, rows, starts, **options)
    assert all(torch.equal(again[name], gradient) for name, gradient in actual.items())
    near(gradients(policy, rows, starts, share_prefixes=False, **options), expected, 1e-5)
    with torch.no_grad():
        shared = policy.logprobs(rows, starts, **options)  # type: ignore[arg-type]
        alone = policy.logprobs(rows[1:2], starts[1:2], 1.0, "processed", masks[1:2], False)
    for row, expected_row in zip(shared, expected_rows, strict=True):
        torch.testing.assert_close(row, expected_row.detach(), atol=2e-5, rtol=2e-5)
    assert torch.equal(alone[0], shared[1])


def test_ordered_gradients_and_an_adapter(tmp_path: Path) -> None:
    directory, rows = model_of(tmp_path), rollouts()
    starts = half(rows)
    policy = PolicyModel.from_pretrained(directory, dtype="float32", device="cuda", ordered_gradients=True)
    together = gradients(policy, rows, starts)
    policy.zero_grad()
    for row, start in zip(rows, starts, strict=True):
        scored = policy.logprobs([row], [start])[0]
        (scored * weights(scored)).sum().backward()
    for name, gradient in together.items():
        assert torch.equal(policy.get_parameter(name).grad, gradient)  # type: ignore[arg-type]
    adapted = {}
    for device in ("cpu", "cuda"):
        adapted[device] = PolicyModel.from_pretrained(directory, dtype="float32", device=device)
        adapted[device].add_adapter(["q_proj", "v_proj", "down_proj"], rank=4, seed=3)
        for name, factor in adapted[device].named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(factor, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    expected, actual = (gradients(adapted[device], rows, starts) for device in ("cpu", "cuda"))
    assert len(actual) == 6
    near(actual, expected, 1e-5)


def test_a_runner_on_the_kernels_has_the_same_logprobs(tmp_path: Path, on_triton: None) -> None:
    hf = tiny_config("qwen3", num_hidden_layers=1)
    runner, facts = make_runner(tmp_path, hf, max_num_seqs=2, max_num_batched_tokens=16)
    prompts = [random_ids(9, 320, 1), random_ids(14, 320, 2)]
    jobs = [
        Job(prompt, SamplingParams(max_tokens=3, temperature=0.8, logprobs=1, prompt_logprobs=1), seed)
        for seed, prompt in enumerate(prompts)
    ]
    served = outcomes(Driver(runner, facts, max_num_seqs=2).run(jobs, chunk=5))
    policy = PolicyModel.from_pretrained(tmp_path, dtype="float32", load_format="dummy", device="cuda")
    for prompt, (tokens, _, of_tokens, of_prompt, *_) in zip(prompts, served, strict=True):
        with torch.no_grad():
            (scored,) = policy.logprobs([[*prompt, *tokens]], [1])
        expected = [*(row[0] for row in of_prompt.values()), *(row[0] for row in of_tokens)]
        assert scored.tolist() == expected


@pytest.mark.parametrize(("name", "changes"), [("qwen2", {}), ("qwen3_moe", {}), ("lfm2", {"layer_types": ["conv"]})])
def test_an_exact_model_is_the_policy(
    name: str, changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rows = model_of(tmp_path, name, **changes), rollouts()[:2]
    policy = PolicyModel.from_pretrained(directory, dtype="float32", device="cuda")
    expected = gradients(policy, rows, [1, 1])
    monkeypatch.setattr(exact_model, "_device_of", lambda causal: "cuda")
    model = exact(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits = model(ids, attention_mask=mask).logits
    scored = [
        selective_logprobs(logits[i, : len(row) - 1], torch.tensor(row[1:]), logprobs_mode="raw")
        for i, row in enumerate(rows)
    ]
    with torch.no_grad():
        assert all(map(torch.equal, scored, policy.logprobs(rows, [1, 1])))
    torch.stack([(row * weights(row)).sum() for row in scored]).sum().backward()
    actual = by_master(policy, {name: parameter.grad for name, parameter in model.named_parameters()})
    near({name: gradient for name, gradient in actual.items() if gradient is not None}, expected, 1e-5)
