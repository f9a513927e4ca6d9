"""Quantized models through real engines keep the exactness contract.  Only `==`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_exact import alone, columns, together
from tests.models import gguf_models
from tests.models import test_mxfp4 as mxfp4
from tests.models import test_packed as packed
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("engine_threads")

INT4: dict[str, Any] = {"quantization": "int4", "quantization_group_size": 32}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # config.json, options
    "int8": (tiny_config("qwen3", dtype="bfloat16"), {"quantization": "int8"}),
    "int4": (tiny_config("qwen3", dtype="bfloat16"), INT4),
    "gptq": (packed.HF | {"dtype": "bfloat16"}, {}),
    "experts, int4": (tiny_config("qwen3_moe", dtype="bfloat16"), INT4),
    "experts, mxfp4": (mxfp4.HF, {}),
}


def checkpoint(directory: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of that kind, and the options that serve it."""
    hf, options = KINDS[kind]
    write_checkpoint(directory, hf, seed=1)
    if kind == "gptq":
        packed.write(directory, *packed.CASES["gptq4-g32-asym-act-v1"])
    elif kind.endswith("mxfp4"):
        mxfp4.quantized(directory)
    return directory, {"tokens_only": True, "max_model_len": 256} | options


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][1:])])
def test_same_bits_alone_among_others_chunked_preempted_and_cached(tmp_path: Path, kind: str) -> None:
    directory, options = checkpoint(tmp_path, kind)
    with LLM(directory, enable_prefix_caching=False, cpu_threads=1, **options) as llm:
        facts, per_token = llm.ready.facts, llm.ready.facts["kv_bytes"] // (llm.ready.num_blocks * llm.ready.block_size)
        assert facts["quantization"] == options.get("quantization", "wna16")
        expected = alone(llm)
    assert len({tuple(tokens) for tokens, _ in expected}) == len(expected)
    small: dict[str, Any] = {"kv_cache_memory_bytes": per_token * 264, "block_size": 8, "max_num_batched_tokens": 37}
    with LLM(directory, depth=2, cpu_threads=2, **small, **options) as llm:
        assert together(llm) == expected
        assert together(llm) == expected, "second time, from the prefix cache"
        assert llm.stats.preemptions > 0
        llm.call("check")
    if kind != "int8":
        with LLM(directory, enforce_eager=True, **options) as llm:
            assert together(llm) == expected, "op by op, without recorded steps"


def rescored(llm: LLM) -> None:
    """Logprobs of what was decoded are those of the same tokens as a prompt."""
    prompt = list(range(5, 40))
    params = SamplingParams(max_tokens=100, logprobs=3, temperature=0.7, seed=3, ignore_eos=True)
    decoded = llm.generate([prompt], [params], use_tqdm=False)[0].outputs[0]
    rescore = SamplingParams(max_tokens=1, prompt_logprobs=3, prompt_logprobs_start=len(prompt))
    for _ in range(2):  # cold, then with a warm cache
        scored = llm.generate([prompt + list(decoded.token_ids)], [rescore], use_tqdm=False)[0]
        assert columns(scored.prompt_logprobs) == columns(decoded.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_decode_logprobs_equal_rescored_prompt_logprobs(tmp_path: Path, kind: str) -> None:
    directory, options = checkpoint(tmp_path, kind)
    with LLM(directory, quantize_lm_head=True, max_num_batched_tokens=48, **options) as llm:
        rescored(llm)


def test_a_gguf_file_decodes_as_it_scores_prompts(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "m.gguf", "qwen3", "Q4_K", value_kind="Q6_K")
    with LLM(tmp_path / "m.gguf", max_num_batched_tokens=48) as llm:
        assert llm.ready.facts["quantization"] == "wna16"
        rescored(llm)
        chat = llm.chat([{"role": "user", "content": "Hello <extra_1>"}], SamplingParams(max_tokens=3), use_tqdm=False)
        assert len(chat[0].outputs[0].token_ids) == 3
