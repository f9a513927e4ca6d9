"""Released models as GGUF files and as safetensors: transformers' greedy text and logprobs, and `==` in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e.test_exact import columns
from tests.real.conftest import TEXTS, Model
from tokserve import LLM, SamplingParams

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=2, prompt_logprobs=1, ignore_eos=True)
# Of chosen tokens in bfloat16, against float32 (measured: docs/models.md)
BFLOAT16_MEAN = 0.05


def served(model: Model, form: str, dtype: str, **options: Any) -> LLM:
    return LLM(str(getattr(model, form)), dtype=dtype, max_model_len=1024, **options)


def results(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[Any]:
    """Tokens, their logprobs, and those of the prompt, of each."""
    return [
        (list(one.outputs[0].token_ids), columns(one.outputs[0].logprobs), columns(one.prompt_logprobs))
        for one in llm.generate(prompts, params, use_tqdm=False)
    ]


@pytest.mark.parametrize("form", ["gguf", "directory"])
def test_float32_has_transformers_text_and_logprobs(model: Model, form: str) -> None:
    with served(model, form, "float32") as llm:
        outputs = llm.generate(model.prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(model.prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        expected = model.expected_logprobs(prompt + tokens)[:-1]
        assert expected[len(prompt) - 1 :].argmax(-1).tolist() == tokens, model.tokenizer.decode(tokens)
        scored = expected.gather(1, torch.tensor(prompt[1:] + tokens)[:, None])[:, 0]
        logprobs = [*output.prompt_logprobs.token_logprobs, *output.outputs[0].logprobs.token_logprobs]
        torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float32), scored, atol=2e-4, rtol=0)


@pytest.mark.parametrize("form", ["gguf", "directory"])
def test_bfloat16_is_near_float32_and_has_the_same_bits_in_any_batch(model: Model, form: str) -> None:
    # a prefix that all share, longer than Gemma's window
    shared = model.tokenizer("A list of capitals. " * 120).input_ids
    prompts = [*model.prompts, *(shared + prompt for prompt in model.prompts[:2])]
    sampled = [
        SamplingParams(
            temperature=[0.0, 1.0][i % 2], seed=i, max_tokens=24, logprobs=2, prompt_logprobs=1, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    with served(model, form, "bfloat16", enable_prefix_caching=False, cpu_threads=1) as llm:
        alone = [results(llm, [prompt], [params])[0] for prompt, params in zip(prompts, sampled, strict=True)]
        outputs = llm.generate(model.prompts, GREEDY, use_tqdm=False)
    with served(model, form, "bfloat16", max_num_batched_tokens=61) as llm:
        assert results(llm, prompts, sampled) == alone, "chunked, in one batch"
        assert results(llm, prompts, sampled) == alone, "from the prefix cache"
        llm.call("check")
    differences = []
    for prompt, output in zip(model.prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        expected = model.expected_logprobs(prompt + tokens)[len(prompt) - 1 : -1]
        scored = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        differences.append((torch.tensor(output.outputs[0].logprobs.token_logprobs.tolist()) - scored).abs())
    every = torch.cat(differences)
    print(f"{model.name} {form} bfloat16: mean |dlogprob| {every.mean():.4f}, largest {every.max():.4f}")
    assert every.mean() < BFLOAT16_MEAN
    assert "Madrid" in model.tokenizer.decode(outputs[3].outputs[0].token_ids)


def test_a_gguf_header_is_the_tokenizer(model: Model) -> None:
    texts = [
        *TEXTS,
        "  naïve café 東京 🙂\n\n\tx = [1, 2]; 1234567.89",
        "<|im_start|>user\nhi<|im_end|>",
        "a" * 50,
        " ",
    ]
    with served(model, "gguf", "bfloat16") as llm:
        assert llm.tokenizer is not None
        for text in texts:
            ids = model.tokenizer(text).input_ids
            assert llm.tokenizer.encode(text) == ids, text
            assert llm.tokenizer.decode(ids, False) == model.tokenizer.decode(ids), text
