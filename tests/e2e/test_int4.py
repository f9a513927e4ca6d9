"""Int4 and a GGUF file through real engines keep the exactness contract.  Only `==`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_exact import alone, columns, together
from tests.models import gguf_models
from tokserve import LLM, SamplingParams
from tokserve.models.dummy import tiny_config, write_checkpoint

OPTIONS: dict[str, Any] = {
    "tokens_only": True, "quantization": "int4", "quantization_group_size": 32, "max_model_len": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config("qwen3", dtype="bfloat16"), seed=1)


@pytest.mark.slow
def test_same_bits_alone_among_others_chunked_preempted_and_cached(checkpoint: Path) -> None:
    with LLM(checkpoint, enable_prefix_caching=False, cpu_threads=1, **OPTIONS) as llm:
        facts, per_token = llm.ready.facts, llm.ready.facts["kv_bytes"] // (llm.ready.num_blocks * llm.ready.block_size)
        assert facts["quantization"] == "int4"
        expected = alone(llm)
    assert len({tuple(tokens) for tokens, _ in expected}) == len(expected)
    small: dict[str, Any] = {"kv_cache_memory_bytes": per_token * 264, "block_size": 8, "max_num_batched_tokens": 37}
    with LLM(checkpoint, depth=2, cpu_threads=2, **small, **OPTIONS) as llm:
        assert together(llm) == expected
        assert together(llm) == expected, "second time, from the prefix cache"
        assert llm.stats.preemptions > 0
        llm.call("check")
    with LLM(checkpoint, enforce_eager=True, **OPTIONS) as llm:
        assert together(llm) == expected, "op by op, without recorded steps"


def test_a_gguf_file_decodes_as_it_scores_prompts(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "m.gguf", "qwen3", "Q4_K", value_kind="Q6_K")
    prompt = list(range(5, 40))
    with LLM(tmp_path / "m.gguf", max_num_batched_tokens=48) as llm:
        assert llm.ready.facts["quantization"] == "wna16"
        params = SamplingParams(max_tokens=100, logprobs=3, temperature=0.7, seed=3, ignore_eos=True)
        made = llm.generate([prompt], [params], use_tqdm=False)[0].outputs[0]
        rescore = SamplingParams(max_tokens=1, prompt_logprobs=3, prompt_logprobs_start=len(prompt))
        for _ in range(2):  # cold, then with a warm cache
            scored = llm.generate([prompt + list(made.token_ids)], [rescore], use_tqdm=False)[0]
            assert columns(scored.prompt_logprobs) == columns(made.logprobs)
        chat = llm.chat([{"role": "user", "content": "Hello <extra_1>"}], SamplingParams(max_tokens=3), use_tqdm=False)
        assert len(chat[0].outputs[0].token_ids) == 3
