"""The policy's logprobs and gradients: equal to the server's decoder however they are cut, near to float64."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.driver import prefill, random_ids
from tests.tiny_models import tiny_config, write_checkpoint
from tests.train import references
from tests.train.references import cosine
from tokserve import SamplingParams, ops
from tokserve.base.errors import StartError
from tokserve.models.load import load_decoder
from tokserve.protocol.params import PARAMS_REFUSED, PARAMS_WITHOUT_EFFECT
from tokserve.protocol.params import SamplingParams as SentParams
from tokserve.runner import processors
from tokserve.train import PolicyModel, scores
from tokserve.train.layers import adjustments

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
VOCAB = 320


def rollouts(vocab: int = VOCAB) -> list[list[int]]:
    """Groups that share prompts of different lengths, one row twice, one row a prefix of others, one alone."""
    prompt, turn = random_ids(37, vocab, 1), random_ids(11, vocab, 2)
    rows = [prompt + random_ids(20, vocab, seed) for seed in (3, 4, 5)]
    rows += [prompt + turn + random_ids(9, vocab, seed) for seed in (6, 7)]
    return [*rows, rows[0], prompt[:30], random_ids(33, vocab, 8), random_ids(2, vocab, 9)]


def half(rows: list[list[int]]) -> list[int]:
    return [max(1, len(row) // 2) for row in rows]


def expected(directory: Path, dtype: str, sequence: list[int], start: int, temperature: Tensor | None = None) -> Tensor:
    hf = json.loads((directory / "config.json").read_text())
    decoder = load_decoder(directory, hf, dtype=dtype, head_dtype="auto", load_format="auto", seed=0)
    logits = prefill(decoder, sequence)[start - 1 : -1]
    return ops.logprobs(logits, torch.tensor(sequence[start:]), 0, None, temperature)[0]


def gradients(policy: PolicyModel, rows: list[list[int]], starts: list[int], **options: object) -> dict[str, Tensor]:
    """The gradients of a weighted sum of the logprobs."""
    policy.zero_grad()
    scored = policy.logprobs(rows, starts, **options)  # type: ignore[arg-type]
    torch.stack([(row * weights(row)).sum() for row in scored]).sum().backward()
    return {name: master.grad.clone() for name, master in policy.named_parameters() if master.grad is not None}


def weights(row: Tensor) -> Tensor:
    return torch.linspace(-1.0, 2.0, len(row), dtype=row.dtype)


@pytest.mark.some(4)
@DTYPES
def test_logprobs_equal_the_decoders(family: Path, dtype: str) -> None:
    policy = PolicyModel.from_pretrained(family, dtype=dtype)
    rows = rollouts()
    starts = half(rows)
    actual = policy.logprobs(rows, starts)
    for row, start, logprobs in zip(rows, starts, actual, strict=True):
        assert logprobs.dtype == torch.float32
        assert torch.equal(logprobs, expected(family, dtype, row, start))


@pytest.mark.some(2)
@DTYPES
def test_how_rows_are_cut_changes_no_bit(family: Path, dtype: str) -> None:
    policy = PolicyModel.from_pretrained(family, dtype=dtype)
    rows = rollouts()
    starts = half(rows)
    expected = policy.logprobs(rows, starts)
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    for options in ({}, {"share_prefixes": False}):
        for max_tokens, activation_bytes in ((4096, 0), (64, 1 << 30), (10, 1 << 18)):
            policy.max_tokens, policy.activation_bytes = max_tokens, activation_bytes
            actual = policy.logprobs([rows[i] for i in order], [starts[i] for i in order], **options)  # type: ignore[arg-type]
            assert all(torch.equal(actual[at], expected[i]) for at, i in enumerate(order))
    with torch.no_grad():
        alone = [policy.logprobs([row], [start])[0] for row, start in zip(rows, starts, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(alone, expected, strict=True))


@pytest.mark.some(3)
@DTYPES
def test_gradients_are_near_to_float64(family: Path, dtype: str) -> None:
    policy = PolicyModel.from_pretrained(family, dtype=dtype)
    rows = rollouts()
    starts = half(rows)
    actual = gradients(policy, rows, starts)
    leaves = {
        name: master.detach().to(torch.bfloat16 if dtype == "bfloat16" else master.dtype).double().requires_grad_()
        for name, master in policy.named_parameters()
    }
    hf = json.loads((family / "config.json").read_text())
    for row, start in zip(rows, starts, strict=True):
        logprobs = references.logprobs(hf, leaves, row, start)
        (logprobs * weights(logprobs)).sum().backward()
    reference = {name: leaf.grad for name, leaf in leaves.items()}
    assert actual.keys() == reference.keys()
    together = [
        torch.cat([gradient.double().flatten() for gradient in by_name.values()]) for by_name in (actual, reference)
    ]
    assert cosine(*together) > (0.9999 if dtype == "float32" else 0.998)  # activations are rounded to bfloat16 as well
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        if dtype == "float32" and not name.endswith("k_proj.bias"):  # zero but for rounding: it shifts scores alike
            assert cosine(gradient, reference[name]) > 0.9999, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_bfloat16_gradients_are_as_near_to_float64_as_transformers(name: str, tmp_path: Path) -> None:
    hf = tiny_config(name, dtype="bfloat16")
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, hf), dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    leaves = {name: master.detach().double().requires_grad_() for name, master in policy.named_parameters()}
    rows = rollouts()
    starts = half(rows)
    for row, start in zip(rows, starts, strict=True):
        for logits in (references.logits(hf, leaves, row[:-1]), model(torch.tensor([row[:-1]])).logits[0].float()):
            column = torch.tensor(row[start:])[:, None]
            logprobs = logits[start - 1 :].log_softmax(-1).gather(1, column)[:, 0]
            (logprobs * weights(logprobs)).sum().backward()
    actual, parameters = gradients(policy, rows, starts), dict(model.named_parameters())
    actual_gradients, other, exact = (
        torch.cat([part.double().flatten() for part in gradient])
        for gradient in zip(
            *((actual[name], parameters[name].grad, leaf.grad) for name, leaf in leaves.items()), strict=True
        )
    )
    assert 1.0 - cosine(actual_gradients, exact) <= 1.0 - cosine(other, exact)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_what_bfloat16_gradients_lack_is_lost_in_the_forward_pass(name: str, seed: int, tmp_path: Path) -> None:
    """A backward pass in float64 through activations that were rounded is no nearer to float64."""
    hf = tiny_config(name, dtype="bfloat16")
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, hf, seed=seed), dtype="bfloat16")
    rows = rollouts()
    starts = half(rows)

    def gradient(keep: Callable[[Tensor], Tensor]) -> Tensor:
        leaves = {name: master.detach().double().requires_grad_() for name, master in policy.named_parameters()}
        for row, start in zip(rows, starts, strict=True):
            logprobs = references.logprobs(hf, leaves, row, start, keep=keep)
            (logprobs * weights(logprobs)).sum().backward()
        return torch.cat([leaf.grad.flatten() for leaf in leaves.values() if leaf.grad is not None])

    exact, rounded = gradient(lambda x: x), gradient(references.rounded)
    actual = gradients(policy, rows, starts)
    actual_gradients = torch.cat([actual[name].double().flatten() for name, _ in policy.named_parameters()])
    assert 1.0 - cosine(actual_gradients, exact) < 1.25 * (1.0 - cosine(rounded, exact))
    assert cosine(actual_gradients, rounded) > 0.9995


@DTYPES
@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe", "qwen3_5_text"])
def test_gradients_of_trees_and_of_recomputed_blocks(name: str, dtype: str, tmp_path: Path) -> None:
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, tiny_config(name)), dtype=dtype)
    rows = rollouts()
    starts = half(rows)
    expected = gradients(policy, rows, starts)
    policy.activation_bytes = 0
    again = gradients(policy, rows, starts)
    assert all(torch.equal(again[name], gradient) for name, gradient in expected.items())
    unshared = gradients(policy, rows, starts, share_prefixes=False)
    for name, gradient in expected.items():
        error = (gradient - unshared[name]).norm() / unshared[name].norm()
        assert error < (1e-5 if dtype == "float32" else 3e-2), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation_bytes", "name", "dtype"),
    [
        (0, "qwen2_moe", "bfloat16"),
        (1 << 30, "qwen3", "float32"),
        pytest.param(0, "qwen3", "float32", marks=pytest.mark.slow),
        pytest.param(1 << 30, "qwen3", "bfloat16", marks=pytest.mark.slow),
        pytest.param(1 << 30, "qwen2_moe", "float32", marks=pytest.mark.slow),
        pytest.param(0, "qwen3", "bfloat16", marks=pytest.mark.slow),
        pytest.param(0, "qwen2_moe", "float32", marks=pytest.mark.slow),
        pytest.param(1 << 30, "qwen2_moe", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_ordered_gradients_do_not_depend_on_the_calls(
    activation_bytes: int, name: str, dtype: str, tmp_path: Path
) -> None:
    hf = tiny_config(name, tie_word_embeddings=True)
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, hf), dtype=dtype, ordered_gradients=True)
    policy.activation_bytes = activation_bytes
    rows = rollouts()
    starts = half(rows)
    expected = gradients(policy, rows, starts)
    for cuts in ([0, 1, 9], [0, 4, 5, 9], list(range(10))):
        policy.zero_grad()
        for begin, end in pairwise(cuts):
            scored = policy.logprobs(rows[begin:end], starts[begin:end])
            torch.stack([(row * weights(row)).sum() for row in scored]).sum().backward()
        for name, master in policy.named_parameters():
            assert torch.equal(master.grad, expected[name]), name  # type: ignore[arg-type]
    policy.ordered_gradients = False
    for name, gradient in gradients(policy, rows, starts).items():
        assert cosine(gradient, expected[name]) > (0.99999 if dtype == "float32" else 0.99), name


@DTYPES
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 2.0**-9])
def test_temperature(dtype: str, temperature: float, tmp_path: Path) -> None:
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, tiny_config("llama")), dtype=dtype)
    rows = rollouts()[:2]
    actual = policy.logprobs(rows, [30, 30], temperature=temperature, logprobs_mode="temperature")
    for row, logprobs in zip(rows, actual, strict=True):
        column = torch.full((len(row) - 30,), temperature)
        assert torch.equal(logprobs, expected(tmp_path, dtype, row, 30, column))


def test_processed_logprobs_are_over_the_mask(tmp_path: Path) -> None:
    hf = tiny_config("llama")
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, hf), dtype="float32")
    row = rollouts()[0]
    masks = [None if n % 3 == 0 else sorted({token, (token + 7) % VOCAB, 5}) for n, token in enumerate(row[30:])]
    arguments = {"temperature": 0.7, "logprobs_mode": "processed", "sampling_masks": [masks]}
    (actual,) = policy.logprobs([row], [30], **arguments)  # type: ignore[arg-type]
    leaves = {name: master.detach().double().requires_grad_() for name, master in policy.named_parameters()}
    reference = references.logprobs(hf, leaves, row, 30, temperature=0.7, masks=masks)
    assert (actual.detach() - reference.detach()).abs().max() < 1e-4
    actual_gradients = gradients(policy, [row], [30], **arguments)
    (reference * weights(reference)).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert cosine(actual_gradients[name], leaf.grad) > 0.9999, name
    every_id = [list(range(VOCAB))] * len(masks)
    free = policy.logprobs([row], [30], 0.7, "processed")[0]
    assert torch.equal(policy.logprobs([row], [30], 0.7, "processed", [every_id])[0], free)


def test_gradients_through_bias_and_penalties(tmp_path: Path) -> None:
    hf = tiny_config("llama")
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, hf), dtype="float32")
    row, start = rollouts()[0], 30
    params = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {5: 1.5}}
    arguments = {"temperature": 0.7, "logprobs_mode": "processed", "sampling_params": [params]}
    leaves = {name: master.detach().double().requires_grad_() for name, master in policy.named_parameters()}
    bias = torch.zeros(VOCAB, dtype=torch.float64).index_fill_(0, torch.tensor([5]), 1.5)
    expected = []
    for position, logits in enumerate(references.logits(hf, leaves, row[:-1])[start - 1 :], start):
        counts = torch.bincount(torch.tensor(row[start:position], dtype=torch.int64), minlength=VOCAB)
        seen = torch.bincount(torch.tensor(row[:position]), minlength=VOCAB) > 0
        logits = logits + bias
        logits = torch.where(seen, torch.where(logits > 0, logits / 1.4, logits * 1.4), logits)
        logits = logits - 0.3 * counts - 0.5 * (counts > 0)
        expected.append((logits / 0.7).log_softmax(-1)[row[position]])
    reference = torch.stack(expected)
    for activation_bytes in (0, 1 << 30):
        policy.activation_bytes = activation_bytes
        (actual,) = policy.logprobs([row], [start], **arguments)  # type: ignore[arg-type]
        assert (actual.detach() - reference.detach()).abs().max() < 1e-4
    found_gradients = gradients(policy, [row], [start], **arguments)
    (reference * weights(reference)).sum().backward()
    for name, leaf in leaves.items():
        assert cosine(found_gradients[name], leaf.grad) > 0.9999, name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"repetition_penalty": -1.0}, r"sampling_params\[0\]"),
        ({"nothing": 1}, r"sampling_params\[0\].*nothing"),
        ({"temperature": 0.5}, r"temperature is 0.5, but temperature 1.0"),
        ({"top_k": 5}, "top_k restricts the draws: give sampling_masks"),
        ({"min_tokens": 2}, "min_tokens restricts the draws"),
    ],
)
def test_sampling_params_that_do_not_fit(params: dict[str, object], message: str) -> None:
    policy = PolicyModel.from_pretrained("demo", dtype="float32")
    with pytest.raises(ValueError, match=message):
        policy.logprobs([[5, 6, 7]], [1], 1.0, "processed", sampling_params=[params])


def test_sampling_params_are_taken_in_every_form_of_a_request() -> None:
    """JSON's, the client's, and objects; with all fields that the route accepts (rl-faults F14)."""
    policy = PolicyModel.from_pretrained("demo", dtype="float32")
    params = {"logit_bias": {5: 4.0, 9: -1.5}, "repetition_penalty": 1.25, "temperature": 0.5, "presence_penalty": 0.5}

    def scored(form: Any) -> list[float]:
        return policy.logprobs([[5, 6, 7, 9]], [1], 0.5, "processed", sampling_params=[form])[0].tolist()

    nulls = dict.fromkeys(SentParams.__struct_fields__)
    ignored = dict.fromkeys(PARAMS_WITHOUT_EFFECT, 1) | dict.fromkeys(PARAMS_REFUSED)
    neutral = {name: values[0] for name, values in PARAMS_REFUSED.items() if values}
    others = {"logprobs": True, "n": 4, "stop": "x", "seed": 1 << 40, "stop_token_ids": np.arange(3)}
    numbers = {"logit_bias": {np.int64(5): np.float32(4), 9: torch.tensor(-1.5)}, "temperature": np.float32(0.5)}
    forms = (
        json.loads(json.dumps(params)),
        nulls | params,
        ignored | params,
        neutral | params,
        others | params,
        params | numbers,
        SentParams(**params),
        SamplingParams(**params, skip_clone=True),
    )
    expected = scored(params)
    assert scored(None) != expected
    for form in forms:
        assert scored(form) == expected, form
    for form in ([1], 5, "x"):
        with pytest.raises(ValueError, match=r"sampling_params\[0\] must be a mapping or null"):
            scored(form)
    for form in ({"best_of": 2}, {"logit_bais": {}}, {"use_beam_search": True}):
        with pytest.raises(ValueError, match=rf"sampling_params\[0\].{next(iter(form))} is no sampling parameter"):
            scored(form)
    with pytest.raises(ValueError, match="structured_outputs restricts the draws"):
        scored({"structured_outputs": {"regex": "a", "backend": "any"}})


def test_extreme_parameters_are_the_servers() -> None:
    assert (adjustments.MAX_PLAIN_BIAS, adjustments.MAX_PLAIN_REPETITION, adjustments.MAX_LOGIT) == (
        processors.MAX_PLAIN_BIAS,
        processors.MAX_PLAIN_REPETITION,
        processors.MAX_LOGIT,
    )
    assert scores.COLD == processors.MIN_PLAIN_TEMPERATURE


def test_each_row_has_its_own_temperature() -> None:
    policy = PolicyModel.from_pretrained("demo", dtype="float32")
    rows = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 9]]
    actual = policy.logprobs(rows, [1, 1, 2], [0.5, 1.0, 2.0], "temperature")
    for row, start, temperature, logprobs in zip(rows, [1, 1, 2], [0.5, 1.0, 2.0], actual, strict=True):
        for same in (temperature, np.float32(temperature), torch.tensor(temperature)):
            assert torch.equal(logprobs, policy.logprobs([row], [start], same, "temperature")[0])
    assert not torch.equal(actual[0], actual[1])


def test_a_changed_weight_is_packed_again(tmp_path: Path) -> None:
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path / "a", tiny_config("llama")), dtype="bfloat16")
    rows, starts = rollouts(), half(rollouts())
    before = policy.logprobs(rows, starts)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    gradients(policy, rows, starts)
    optimizer.step()
    after = policy.logprobs(rows, starts)
    assert not torch.equal(after[0], before[0])
    policy.save_pretrained(tmp_path / "b")
    again = PolicyModel.from_pretrained(tmp_path / "b", dtype="bfloat16")
    assert all(torch.equal(a, b) for a, b in zip(again.logprobs(rows, starts), after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), policy.parameters(), strict=True))
    policy.lm_head.weight.data.mul_(2.0)
    doubled = policy.logprobs(rows, starts)
    assert not torch.equal(doubled[0], after[0])
    policy.weights_changed()
    assert torch.equal(policy.logprobs(rows, starts)[0], doubled[0])


def test_changing_a_weight_between_forward_and_backward_is_an_error() -> None:
    policy = PolicyModel.from_pretrained("demo", dtype="float32")
    for activation_bytes in (0, 1 << 30):
        policy.activation_bytes = activation_bytes
        (row,) = policy.logprobs([[5, 6, 7, 8]], [1])
        with torch.no_grad():
            policy.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            row.sum().backward()


def test_a_frozen_master_gets_no_gradient() -> None:
    policy = PolicyModel.from_pretrained("demo", dtype="float32")
    rows, starts = rollouts(VOCAB // 2), half(rollouts())
    every = gradients(policy, rows, starts)
    for name, master in policy.named_parameters():
        master.requires_grad_("mlp" in name)
    for activation_bytes in (0, 1 << 30):
        policy.activation_bytes = activation_bytes
        partial = gradients(policy, rows, starts)
        assert set(partial) == {name for name in every if "mlp" in name}
        assert all(torch.equal(every[name], gradient) for name, gradient in partial.items())


def test_masters_have_the_checkpoints_names_and_values(family: Path) -> None:
    policy = PolicyModel.from_pretrained(family, dtype="bfloat16")
    hf = json.loads((family / "config.json").read_text())
    decoder = load_decoder(family, hf, dtype="float32", head_dtype="auto", load_format="auto", seed=0)
    assert dict(policy.named_parameters()).keys() == decoder.parameters_by_name().keys()
    assert policy.state_dict().keys() == decoder.parameters_by_name().keys()
    assert all(master.dtype == torch.float32 for master in policy.parameters())


def test_other_ops_bound_since_are_replaced(tmp_path: Path) -> None:
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, tiny_config("llama")), dtype="bfloat16")
    rows, starts = rollouts(), half(rollouts())
    before = policy.logprobs(rows, starts)
    ops.bind("cpu", {"*": "torch"})
    other = PolicyModel.from_pretrained(tmp_path, dtype="float32", ops={"*": "torch"})
    other.logprobs(rows, starts)
    assert all(torch.equal(a, b) for a, b in zip(policy.logprobs(rows, starts), before, strict=True))


def test_the_torch_references_serve_as_well(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("qwen3"))
    compiled = PolicyModel.from_pretrained(directory, dtype="float32")
    rows, starts = rollouts(), half(rollouts())
    actual = gradients(compiled, rows, starts)
    other = PolicyModel.from_pretrained(directory, dtype="float32", ops={"*": "torch"})
    assert all(
        torch.equal(a, b) for a, b in zip(other.logprobs(rows, starts), other.logprobs(rows, starts), strict=True)
    )
    for name, gradient in gradients(other, rows, starts).items():
        assert cosine(gradient, actual[name]) > 0.9999, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2]], [0]), r"starts\[0\] must be between 1 and 2, got 0"),
        (([[1, 2]], [3]), r"starts\[0\] must be between 1 and 2, got 3"),
        (([[1, 2], [3]], [1]), "starts has 1 entries for 2 sequences"),
        (([[1, 99999]], [1]), r"sequences\[0\] holds an id outside the vocabulary"),
        (([[1, -1]], [1]), r"sequences\[0\] holds an id outside the vocabulary"),
        (([[]], [1]), r"sequences\[0\] must be a list of at least one token id"),
        (([[1.5, 2.0]], [1]), r"sequences\[0\] must be a list"),
        (([[1] * 100000], [1]), r"sequences\[0\] has 100000 tokens"),
        (([[1, 2]], [1], -1.0), "temperature must be 0 or a positive number"),
        (([[1, 2]], [1], 1.0, "best"), "logprobs_mode must be one of"),
        (([[1, 2]], [1], 1.0, "processed", [[[1, 3]]]), r"sampling_masks\[0\]\[0\] lacks 2"),
        (([[1, 2]], [1], 1.0, "processed", [[None, None]]), r"sampling_masks\[0\] has 2 entries for 1"),
        (([[1, 2]], [1], 1.0, "processed", [[[2, 99999]]]), r"sampling_masks\[0\]\[0\] must hold ids"),
        (([[1, 2]], [1], 1.0, "processed", [{"counts": [2], "ids": [2]}]), r"sampling_masks\[0\] has 1 ids"),
        (([[1, 2]], [1], 1.0, "processed", [{"ids": [2]}]), r"sampling_masks\[0\].counts is missing"),
        (([[1, 2]], [1], 1.0, "processed", [{"counts": [1, -1], "ids": [2]}]), "has 2 entries for 1 scored"),
    ],
)
def test_a_wrong_argument_is_named(arguments: tuple[object, ...], message: str) -> None:
    policy = PolicyModel.from_pretrained("demo", dtype="float32")
    with pytest.raises(ValueError, match=message):
        policy.logprobs(*arguments)  # type: ignore[arg-type]


def test_nothing_to_score() -> None:
    policy = PolicyModel.from_pretrained("demo", dtype="float32")
    assert policy.logprobs([], []) == []
    actual = policy.logprobs([[5], [5, 6], [5, 6, 7]], [1, 2, 1])
    assert [len(row) for row in actual] == [0, 0, 2]


def test_quantization_is_refused() -> None:
    with pytest.raises(StartError, match="'int8' cannot be trained"):
        PolicyModel.from_pretrained("demo", quantization="int8")


@pytest.mark.slow
def test_importing_leaves_the_server_out() -> None:
    names = {"tokserve.server", "tokserve.client", "tokserve.engine", "tokserve.runner", "fastapi", "zmq"}
    code = f"import sys, tokserve.train; loaded = {names} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
