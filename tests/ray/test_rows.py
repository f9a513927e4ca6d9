"""Rows of the Ray Data stage, without a cluster: a row that cannot be served is told so, and the others are served."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import psutil
import pytest

from tests import needs
from tokserve.features.offline.llm import LLM
from tokserve.protocol.params import SamplingParams

pytestmark = needs.RAY.skips()
OPTIONS: dict[str, Any] = {"cpu_threads": 1, "kv_cache_memory_bytes": 2 << 20}
PARAMS = {"max_tokens": 4, "temperature": 0.0}
NAN = float("nan")
ROWS: list[tuple[Any, Any, Any, str]] = [  # token_ids, prompt, sampling_params, and the error
    (np.array([5, 6, 7]), None, None, ""),
    (NAN, "hello", None, ""),
    (None, "hello", NAN, ""),
    (np.array([5.0, 6.0, 7.0]), "not this", None, ""),
    (None, "hello", {"max_tokens": 2.0, "temperature": NAN, "seed": None}, ""),
    ([5, 6, 7], NAN, {"max_tokens": np.int64(2)}, ""),
    (NAN, NAN, None, "neither token_ids nor prompt"),
    (np.array([5.5]), None, None, "list of integers"),
    (np.array(["a"]), None, None, "list of integers"),
    (np.array([5, None], object), None, None, "list of integers"),
    ([[5], [6, 7]], None, None, "list of integers"),
    (7, None, None, "list of integers"),
    (None, 7, None, "list of integers"),
    (np.array([]), None, None, "must not be empty"),
    (None, "", None, "must not be empty"),
    (np.array([5, 100_000]), None, None, "token_ids[1] is 100000"),
    (np.array([-1]), None, None, "token_ids[0] is -1"),
    (np.array([2**40]), None, None, "token_ids[0] is"),
    (np.array([NAN]), None, None, "list of integers"),
    (None, "hello", "rubbish", "sampling_params: must be an object"),
    (None, "hello", {"temperature": -5.0}, "temperature must be from 0"),
    (None, "hello", {"n": 2}, "n must be 1"),
    (None, "hello", {"rubbish": 2}, "rubbish"),
]


def column(index: int) -> Any:
    values = np.empty(len(ROWS), object)
    for number, row in enumerate(ROWS):
        values[number] = row[index]
    return values


def test_each_row_is_served_or_told_why_not(caplog: pytest.LogCaptureFixture) -> None:
    """newcomer-3 D11: a file with rows of ids and rows of text; and the end of a job is no crash."""
    from tokserve.ray.batch import Generate

    async def scene() -> tuple[dict[str, Any], int]:
        stage = Generate("demo", PARAMS, **OPTIONS)
        names = ("token_ids", "prompt", "sampling_params")
        done = await stage({name: column(index) for index, name in enumerate(names)})
        engine = stage._llm._engine.engine
        assert engine is not None
        await asyncio.to_thread(stage.__del__)  # from another thread than the loop's, as Ray Data does
        stage._loop = None
        return done, engine.pid

    with caplog.at_level(logging.INFO, "tokserve"):
        done, pid = asyncio.run(scene())
    assert not psutil.pid_exists(pid) and "died" not in caplog.text
    for expected, error in zip([row[3] for row in ROWS], done["error"], strict=True):
        assert (expected in error) if expected else error == "", error
    with LLM("demo", **OPTIONS) as llm:
        ids = llm.tokenizer.encode("hello")
        prompts = [[5, 6, 7], ids, ids, [5, 6, 7], ids, [5, 6, 7]]
        outputs = [
            list(llm.generate([{"prompt_token_ids": prompt}], SamplingParams(**PARAMS))[0].outputs[0].token_ids)
            for prompt in prompts
        ]
    served = [row.tolist() for row in done["output_token_ids"][: len(prompts)]]
    assert served == [*outputs[:4], outputs[4][:2], outputs[5][:2]]
