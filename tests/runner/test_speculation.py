"""An engine with speculation has the outputs of one without, for any drafts.  Only `==`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.runner.test_runner import prompt
from tests.runner.test_with_engine import VOCAB, RealEngine
from tests.tiers import slow_after
from tokserve.protocol.messages import Submit
from tokserve.protocol.params import RepetitionDetection, ThinkingMarkers
from tokserve.protocol.prompt import pack_ids

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 0.5, "top_p": 0.8, "logprobs": 1, "logprobs_mode": "processed"},
    {"min_p": 0.1, "temperature": 0.6},
    {"temperature": 0.4, "repetition_penalty": 1.3},
    {"temperature": 0.2, "frequency_penalty": 0.6, "logprobs": 0},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -3.0}},
    {"temperature": 0.3, "allowed_token_ids": [3, 4, 5, 6]},
    {"temperature": 0.0, "bad_token_ids": [5, 6]},
    {"temperature": 0.0, "bad_token_sequences": [[3, 4], [9, 9, 9]], "logprobs": 1},
    {"temperature": 0.0, "no_repeat_ngram_size": 3},
    {"temperature": 0.5, "thinking_token_budget": 3, "thinking_markers": ThinkingMarkers(closes=[3, 4], inside=True)},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": [4, 5]},
    {"temperature": 0.2, "stop_token_sequences": [[4], [8, 9]]},
    {"temperature": 0.0, "logprob_token_ids": [3, 8]},
    {"temperature": 0.0, "repetition_detection": RepetitionDetection(max_pattern_size=4, min_count=3)},
    {"temperature": 0.7, "prompt_logprobs": 1, "logprobs": 2, "logprobs_mode": "temperature"},
    {"temperature": 1.0, "allowed_token_ids": [3, 4]},
    {"temperature": 2.0},
]


class Case(msgspec.Struct):
    """A request, and what it is expected to say: drawn once, for all engines."""

    prompt: list[int]
    params: dict[str, Any]
    seed: int
    group: str | None
    salt: str | None


def cases(rng: random.Random, count: int) -> list[Case]:
    """Requests of all kinds; some have the same prompt, or the same group."""
    results: list[Case] = []
    for _ in range(count):
        if results and rng.random() < 0.4:
            again = rng.choice(results)
            prompt_ids, seed = again.prompt, rng.choice([again.seed, rng.randrange(99)])
        else:
            period = rng.choice([2, 3, 50])
            prompt_ids, seed = (prompt(period, rng.randrange(99)) * 20)[: rng.randrange(1, 50)], rng.randrange(99)
        params = {"max_tokens": rng.randrange(1, 40), "ignore_eos": rng.random() < 0.5} | rng.choice(OPTIONS)
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        group = rng.choice([None, None, "a", "b"])
        results.append(Case(prompt_ids, params, seed, group, rng.choice([None, None, "s"])))
    return results


def drafts_for(output: Sequence[int], rng: random.Random) -> list[int]:
    """Right, wrong, half right, shifted, garbage, too long or none."""
    out, cut = list(output), rng.randrange(len(output) + 1)
    garbage = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
    return rng.choice(
        [
            out,
            out[:cut],
            [(token + 1) % VOCAB for token in out],
            out[:cut] + garbage,
            out[cut:],
            [*garbage, *out],
            out[:cut] + out[cut + 1 :],
            out[:cut] + garbage[:1] + out[cut + 1 :],
            garbage,
            out * 9,
            [],
        ]
    )


def outcomes(engine: RealEngine) -> dict[str, Any]:
    return {
        rid: (
            output.tokens,
            output.logprobs,
            output.prompt_logprobs,
            output.finish and (output.finish.reason, output.finish.detail, output.finish.stop, output.finish.message),
        )
        for rid, output in engine.received.items()
    }


def serve(engine: RealEngine, requests: Sequence[Case], drafts: Sequence[Sequence[int]], rng: random.Random) -> Any:
    """Run all, a few at a time; returns what they say."""
    for index, (case, ids) in enumerate(zip(requests, drafts, strict=True)):
        request = engine.make(
            f"r{index}",
            case.prompt,
            seed=case.seed,
            draft_group=case.group,
            cache_salt=case.salt,
            stream=rng.random() < 0.5,
            **case.params,
        )
        request = msgspec.structs.replace(request, drafts=pack_ids(ids))
        engine.core.receive(b"A", Submit(7, request.request_id, [request]))
        engine.steps(rng.randrange(12))
    engine.run(5000)
    outputs, stats = outcomes(engine), engine.stats
    engine.core.close()
    engine.real.close()
    return outputs, stats


def crossed(directory: Path, seed: int, count: int, model: dict[str, Any] | None = None, **options: Any) -> None:
    """An engine without speculation against one with it.  `model`: options that change results."""
    rng = random.Random(seed)
    requests = cases(rng, count)
    none: list[list[int]] = [[]] * count
    eos = {"eos_token_ids": [2, 11], **(model or {})}
    expected, _ = serve(RealEngine(directory, **eos), requests, none, random.Random(1))
    drafts = [drafts_for(expected[f"r{i}"][0], rng) for i in range(count)]
    plain, stats = serve(RealEngine(directory, **eos, **options), requests, none, random.Random(2))
    assert plain == expected and "draft_steps" not in stats.rooms
    method = rng.choice(["suffix", "suffix", "ngram", "prediction"])
    outputs, stats = serve(
        RealEngine(directory, spec_method=method, spec_tokens=rng.choice([None, 1, 5]), **eos, **options),
        requests,
        drafts,
        random.Random(3),
    )
    assert outputs == expected
    assert stats.rooms["draft_tokens"] > count // 5 and sum(stats.rooms["accepted_by_position"]) > count // 20
    assert sum(stats.rooms["accepted_by_position"]) <= stats.rooms["draft_tokens"]


CROSSINGS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    {"depth": 2, "kv_cache_memory_bytes": 18 * 16 * 3 * 2 * 2 * 16 * 2, "enable_prefix_caching": False},
    {"kv_cache_memory_bytes": 18 * 16 * 3 * 2 * 2 * 16 * 2},
    {},
    {"depth": 2},
    {"enforce_eager": True, "block_size": 8},
]


@pytest.mark.some(1)
@pytest.mark.parametrize("options", slow_after(CROSSINGS, 3), ids=str)
def test_speculation_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    crossed(tmp_path / "model", 3 + len(str(options)), 40, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_speculation_changes_nothing_for_many_requests(tmp_path: Path, seed: int) -> None:
    options = dict(random.Random(seed).choice(CROSSINGS))
    arithmetic = random.Random(seed + 1).choice([{}, {"dtype": "float32"}, {"quantization": "int8"}])
    crossed(tmp_path / "model", 100 + seed, 200, arithmetic, **options)
