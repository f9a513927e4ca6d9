"""Drafts do not change what tokens are distributed like: chi-square over 100,000 seeds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2

from tests.runner.drive import Driver, Job, make_runner
from tests.runner.test_runner import prompt
from tests.tiny_models import tiny_config
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DRAWN

SEEDS, ROWS, LENGTH = 100_000, 250, 3
PROMPT = prompt(9, 4)
PARAMS: dict[str, Any] = {"max_tokens": LENGTH, "top_k": 3, "temperature": 0.8}
SIZES: dict[str, Any] = {"max_num_seqs": ROWS, "max_model_len": 32}


def outputs(driver: Driver, first: int) -> dict[int, list[int]]:
    """The output for each of `ROWS` seeds."""
    seeds = range(first, first + ROWS)
    done = driver.run([Job(PROMPT, SamplingParams(**PARAMS), seed) for seed in seeds])
    return {job.seed: job.output for job in done}


def probabilities(driver: Driver) -> dict[tuple[int, ...], float]:
    """The probability of each output of LENGTH tokens, from the model's probabilities after each prefix."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    fields = PARAMS | {"max_tokens": 1, "logprobs": 3, "logprobs_mode": "processed"}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for start, probability in known.items():
            (job,) = driver.run([Job([*PROMPT, *start], SamplingParams(**fields))])
            _, _, ids, logprobs = job.rows[0]
            for token, logprob in zip(ids, logprobs, strict=True):
                longer[(*start, token)] = probability * 2.718281828459045**logprob
        known = longer
    return known


@pytest.mark.slow
@pytest.mark.parametrize("source", ["self-int4", "draft model", "sticky seeds"])
def test_outputs_are_distributed_as_the_model_says(tmp_path: Path, source: str) -> None:
    options: dict[str, Any] = {"spec_method": "none"}
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    if source == "self-int4":
        options = {"spec_method": "self-int4"}
    elif source == "draft model":
        options = {"speculative_config": {"model": str(tmp_path / "draft"), "quantization": "int4"}}
    runner, facts = make_runner(tmp_path / "model", tiny_config("qwen3"), **SIZES, **options)
    # the last epoch's weights: close to those of now
    before, before_facts = make_runner(tmp_path / "model", tiny_config("qwen3"), quantization="int4", **SIZES)
    old: dict[int, list[int]] = {}

    def drafts(job: Job) -> list[int]:
        if source == "sticky seeds":
            return old[job.seed][len(job.output) :]
        return [DRAWN] * 2 if job.output else []

    driver = Driver(runner, facts, ROWS, drafter=drafts)
    expected = probabilities(Driver(runner, facts, ROWS))
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-4)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, SEEDS, ROWS):
        if source == "sticky seeds":
            old = outputs(Driver(before, before_facts, ROWS), first)
        counts.update(map(tuple, outputs(driver, first).values()))
    assert driver.accepted > SEEDS // 50 and driver.rejected > SEEDS // 50
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[cell] - SEEDS * p) ** 2 / (SEEDS * p) for cell, p in expected.items())
    assert statistic < chi2.ppf(0.9999, len(expected) - 1)
