"""`LLM.beam_search`, in vLLM's words."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokserve.base.errors import RequestError
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.inputs import GenerateRequest, token_prompt
from tokserve.client.results import TokenLogprobs
from tokserve.features.beams.beam_search import BeamRun, BeamSearchParams
from tokserve.features.chat.prompts import ParsedPrompt
from tokserve.protocol.params import RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, unpack_ids
from tokserve.text.tokenizer import Tokenizer


@dataclass(slots=True)
class BeamSearchSequence:
    """An output.  `tokens`: with the prompt's, and with the EOS that ended it only if `include_stop_str_in_output`;
    `text`: of all of them.  `cum_logprob`: the sum of the logprobs of the output, the EOS's included."""

    tokens: list[int]
    logprobs: TokenLogprobs | None
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | None = None
    lora_request: Any = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The outputs of a prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


async def search(
    llm: AsyncLLM,
    prompts: Sequence[ParsedPrompt],
    params: BeamSearchParams,
    adapters: Sequence[str],
    tokenizer: Tokenizer | None,
    concurrency: int,
    progress: Any,
    priority: int = 0,
) -> list[BeamSearchOutput]:
    """One output per prompt; `concurrency` prompts at a time.  Raises RequestError, EngineDead."""
    if len(set(adapters)) > 1:
        raise RequestError("beam search takes one lora_request for all prompts", field="lora_request")
    salts = {prompt.cache_salt for prompt in prompts}
    if len(salts) > 1:
        raise RequestError("beam search takes one cache_salt for all prompts", field="prompts")
    options = RequestOptions(
        adapter=next(iter(adapters), ""), cache_salt=next(iter(salts), "") or None, priority=priority
    )
    outputs: list[BeamSearchOutput] = []
    for first in range(0, len(prompts), concurrency):
        batch = [token_prompt(prompt.ids, llm.ready.vocab_size) for prompt in prompts[first : first + concurrency]]
        for prompt in batch:  # checked once, as it is
            llm.prepare(GenerateRequest(request_id="prompt", prompt=prompt, task=SamplingParams(max_tokens=1)))
        request = GenerateRequest(
            request_id=secrets.token_hex(16), prompt=batch[0], task=SamplingParams(), options=options
        )
        run = BeamRun(llm, request, batch, params)
        await run.run(lambda: None, progress)
        outputs += [_output(run, index, batch[index], tokenizer) for index in range(len(batch))]
    return outputs


def _output(run: BeamRun, index: int, prompt: TokenPrompt, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    ids, params = unpack_ids(prompt.ids), run.params
    sequences, texts = [], None if tokenizer is None else tokenizer.token_texts
    for beam, choice in zip(run.searches[index].done, run.outputs(index, None), strict=True):
        if choice.finish_reason not in ("stop", "length"):
            raise RequestError(choice.message or f"beam search was ended ({choice.stop_detail})")
        has_eos = choice.stop_detail == "eos"
        output = choice.token_ids[:-1] if has_eos and not params.include_stop_str_in_output else choice.token_ids
        sequences.append(
            BeamSearchSequence(
                ids + output,
                None if choice.logprobs is None else TokenLogprobs(choice.token_ids, choice.logprobs, texts=texts),
                beam.total,
                None if tokenizer is None else tokenizer.decode(ids + output, params.skip_special_tokens),
                choice.finish_reason,
                choice.token_ids[-1] if has_eos else None,
            )
        )
    return BeamSearchOutput(sequences)
