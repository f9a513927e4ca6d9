"""Families beyond dense ones with RMS norms on the Triton kernels, in the interpreter: a policy has the decoder's bits,
and gradients near to a CPU's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.models.driver import prefill  # noqa: E402
from tests.tiny_models import tiny_config, write_checkpoint  # noqa: E402
from tests.train.test_gpu_policy import near, on_gpu, rollouts  # noqa: E402
from tests.train.test_policy import gradients, half  # noqa: E402
from tokserve import ops  # noqa: E402
from tokserve.models.load import load_decoder  # noqa: E402
from tokserve.train import PolicyModel  # noqa: E402

assert on_gpu  # a fixture of every test here
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="for the interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CASES: dict[str, dict[str, Any]] = {  # all with one layer
    "cohere": {},  # norms that subtract the mean, without a bias
    "starcoder2": {},  # with one
    "qwen2_moe": {"mlp_only_layers": []},  # a softmax, a shared expert with a gate
    "glm4_moe": {"first_k_dense_replace": 0},  # a sigmoid, groups, a bias of the choice
    "granitemoe": {},  # experts in one tensor
    "qwen3_5_text": {"layer_types": ["linear_attention"]},  # the gated delta rule
    "lfm2": {"layer_types": ["conv"]},
    "bamba": {"attn_layer_indices": []},  # a state space
}


@pytest.mark.parametrize("name", CASES)
def test_a_family_has_the_decoders_bits_and_a_cpus_gradients(name: str, tmp_path: Path) -> None:
    hf = tiny_config(name, **{"num_hidden_layers": 1} | CASES[name])
    directory, rows = write_checkpoint(tmp_path, hf), rollouts()
    starts = half(rows)
    expected = gradients(PolicyModel.from_pretrained(directory, dtype="float32"), rows, starts)
    policy = PolicyModel.from_pretrained(directory, dtype="float32", device="cuda")
    actual = gradients(policy, rows, starts)
    near(actual, expected, 1e-5)
    policy.activation_bytes = 0
    again = gradients(policy, rows, starts)
    assert all(torch.equal(again[name], gradient) for name, gradient in actual.items())
    hf = json.loads((directory / "config.json").read_text())
    decoder = load_decoder(directory, hf, dtype="float32", head_dtype="auto", load_format="auto", seed=0)
    with torch.no_grad():
        scored = policy.logprobs(rows, starts)
    for row, start, logprobs in zip(rows, starts, scored, strict=True):
        logits = prefill(decoder, row)[start - 1 : -1]
        assert torch.equal(logprobs, ops.logprobs(logits, torch.tensor(row[start:]), 0, None, None)[0])


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_5_text", "bamba"])
def test_a_sequences_gradients_do_not_depend_on_the_others(name: str, tmp_path: Path) -> None:
    """Seen at the embeddings of tokens that no other sequence has."""
    hf = tiny_config(name, **{"num_hidden_layers": 1, "tie_word_embeddings": False} | CASES[name])
    policy = PolicyModel.from_pretrained(write_checkpoint(tmp_path, hf), dtype="float32", device="cuda")
    row, others = [5, 9, 5, 17, 23, 40, 9], [[102, 140, 111, 102, 133], [205, 230, 250, 241, 205, 205, 260, 219, 204]]
    alone = gradients(policy, [row], [2])["model.embed_tokens.weight"]
    together = gradients(policy, [others[0], row, others[1]], [1, 2, 3])["model.embed_tokens.weight"]
    tokens = torch.tensor(row[:-1])
    assert alone[tokens].any(1).all()
    assert torch.equal(alone[tokens], together[tokens])
