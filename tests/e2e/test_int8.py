"""Int8 through real engines keeps the exactness contract.  Only `==`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_exact import alone, columns, together
from tokserve import LLM, SamplingParams
from tokserve.models.dummy import tiny_config, write_checkpoint

OPTIONS: dict[str, Any] = {"tokens_only": True, "quantization": "int8", "max_model_len": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config("qwen3", dtype="bfloat16"), seed=1)


def test_same_bits_alone_among_others_chunked_preempted_and_cached(checkpoint: Path) -> None:
    with LLM(checkpoint, enable_prefix_caching=False, cpu_threads=1, **OPTIONS) as llm:
        facts, per_token = llm.ready.facts, llm.ready.facts["kv_bytes"] // (llm.ready.num_blocks * llm.ready.block_size)
        assert facts["quantization"] == "int8"
        expected = alone(llm)
    assert len({tuple(tokens) for tokens, _ in expected}) == len(expected)
    small: dict[str, Any] = {"kv_cache_memory_bytes": per_token * 264, "block_size": 8, "max_num_batched_tokens": 37}
    with LLM(checkpoint, depth=2, cpu_threads=2, **small, **OPTIONS) as llm:
        assert together(llm) == expected
        assert together(llm) == expected, "second time, from the prefix cache"
        assert llm.stats.preemptions > 0
        llm.call("check")


def test_decode_logprobs_equal_rescored_prompt_logprobs(checkpoint: Path) -> None:
    prompt = list(range(5, 40))
    with LLM(checkpoint, quantize_lm_head=True, max_num_batched_tokens=48, **OPTIONS) as llm:
        params = SamplingParams(max_tokens=100, logprobs=3, temperature=0.7, seed=3, ignore_eos=True)
        made = llm.generate([prompt], [params], use_tqdm=False)[0].outputs[0]
        rescore = SamplingParams(max_tokens=1, prompt_logprobs=3, prompt_logprobs_start=len(prompt))
        for _ in range(2):  # cold, then with a warm cache
            scored = llm.generate([prompt + list(made.token_ids)], [rescore], use_tqdm=False)[0]
            assert columns(scored.prompt_logprobs) == columns(made.logprobs)
