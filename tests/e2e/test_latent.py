"""Latent attention through real engines: the same bits however a request is computed, beside transformers, with
adapters, drafts, quantization and the experts of each token.  What it cannot be combined with is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters import merge, write_adapter
from tests.e2e.test_exact import alone, result, together
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, SamplingParams
from tokserve.base.errors import StartError

pytestmark = pytest.mark.usefixtures("engine_threads")

OPTIONS: dict[str, Any] = {"tokens_only": True, "max_model_len": 256, "cpu_threads": 1}
DENSE = {"first_k_dense_replace": 3}  # in all layers
PROMPT = [7 * n % 311 for n in range(60)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config("deepseek_v3", dtype="bfloat16"), seed=1)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("full"), tiny_config("deepseek_v3"))


def prompt_logprobs(llm: LLM, ids: list[int], **params: Any) -> torch.Tensor:
    output = llm.generate([ids], [SamplingParams(max_tokens=1, prompt_logprobs=0)], use_tqdm=False, **params)[0]
    return torch.tensor(output.prompt_logprobs.token_logprobs.tolist()[-len(ids) + 1 :])


def exact(directory: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
    return logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


@pytest.mark.slow
def test_same_bits_alone_among_others_chunked_preempted_cached_and_with_drafts(checkpoint: Path) -> None:
    with LLM(checkpoint, enable_prefix_caching=False, spec_method="none", **OPTIONS) as llm:
        per_token = llm.ready.facts["kv_bytes"] // (llm.ready.num_blocks * llm.ready.block_size)
        assert per_token == 3 * (32 + 8) * 2  # layers, a row of latent and rotated key, bytes
        bits = alone(llm)
    small: dict[str, Any] = {"kv_cache_memory_bytes": per_token * 264, "block_size": 8, "max_num_batched_tokens": 37}
    with LLM(checkpoint, depth=2, **small, **OPTIONS | {"cpu_threads": 2}) as llm:
        assert together(llm) == bits
        assert together(llm) == bits, "second time, from the prefix cache"
        assert llm.stats.preemptions > 0 and llm.stats.prefix_hits > 0
    with LLM(checkpoint, enforce_eager=True, spec_method="ngram", **OPTIONS) as llm:
        assert together(llm) == bits


@pytest.mark.slow
def test_logprobs_are_transformers_and_a_rescore_is_equal(full: Path) -> None:
    with LLM(full, **OPTIONS) as llm:
        near = prompt_logprobs(llm, PROMPT)
        assert (near - exact(full, PROMPT)).abs().max() < 2e-4
        params = SamplingParams(max_tokens=20, temperature=0.9, seed=1, logprobs=0, ignore_eos=True)
        tokens, (logprobs, *_) = result(llm.generate([PROMPT], [params], use_tqdm=False)[0])
        assert prompt_logprobs(llm, PROMPT + tokens)[-20:].tolist() == torch.tensor(logprobs).tolist()


@pytest.mark.slow
def test_experts_of_each_token_are_those_of_a_rescore(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=1, ignore_eos=True)
    with LLM(checkpoint, enable_return_routed_experts=True, **OPTIONS) as llm:
        first = llm.generate([PROMPT] * 3, [params] * 3, use_tqdm=False)[1].outputs[0]
        again = llm.generate([PROMPT + first.token_ids], [SamplingParams(max_tokens=1)], use_tqdm=False)[0].outputs[0]
        assert first.routed_experts is not None and first.routed_experts.shape == (79, 3, 3)
        assert np.array_equal(again.routed_experts[:-1], first.routed_experts)


@pytest.mark.slow
def test_an_adapter_on_every_projection_but_kv_b(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", tiny_config("deepseek_v3", **DENSE))
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj"]
    adapter = write_adapter(tmp_path / "adapter", base, rank=5, targets=targets)
    with LLM(base, enable_lora=True, lora_modules=[f"a={adapter}"], **OPTIONS) as llm:
        near = prompt_logprobs(llm, PROMPT, lora_request="a")
        assert (near - exact(merge(tmp_path / "merged", base, adapter), PROMPT)).abs().max() < 2e-4
        assert (prompt_logprobs(llm, PROMPT) - near).abs().max() > 0.1
    other = write_adapter(tmp_path / "other", base, rank=4, targets=["kv_b_proj"])
    with pytest.raises(StartError, match="kv_b_proj"):
        LLM(base, enable_lora=True, lora_modules=[f"b={other}"], **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_projections_can_be_quantized_as_they_load(quantization: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path, tiny_config("deepseek_v3", dtype="bfloat16", **DENSE))
    with LLM(base, **OPTIONS) as llm:
        plain = prompt_logprobs(llm, PROMPT)
    with LLM(base, quantization=quantization, enable_prefix_caching=False, **OPTIONS) as llm:
        bits = alone(llm, 6)
        quantized = prompt_logprobs(llm, PROMPT)
    assert 0 < (plain - quantized).abs().mean() < (0.1 if quantization == "int8" else 0.8)
    with LLM(base, quantization=quantization, max_num_batched_tokens=37, **OPTIONS) as llm:
        assert together(llm, 6) == bits
