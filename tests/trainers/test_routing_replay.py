"""Router replay of miles over the turns of a sample, as its asynchronous rollouts send and read them.

Source: examples/infra_features/random_async/random_async_rollout.py of radixark/miles at 071b2bec8146.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.server import Served
from tests.replies import good
from tests.threads import ServerThread
from tests.tiny_models import tiny_config, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine_threads")]
HEADERS = {"x-smg-routing-key": "random-async-sample-0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model: Path = write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config("glm4_moe", dtype="float32"), seed=1)
    options = ("--sglang-api", "--enable-return-routed-experts", "--tokens-only", "--max-model-len", "256")
    with ServerThread(str(model), *options) as one:
        yield one


def turn(server: Served, ids: list[int], start: int) -> tuple[list[int], NDArray[Any]]:
    """The output's ids, and the experts [positions, layers, chosen] from position `start` on."""
    sampling = {"max_new_tokens": 6, "temperature": 0.8, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    body |= {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}
    body |= {"return_routed_experts": True, "routed_experts_start_len": start}
    meta = good(server.post("/generate", body, headers=HEADERS))["meta_info"]
    assert {"cached_tokens", "prompt_tokens", "weight_version", "finish_reason"} <= meta.keys()
    output = [token for _, token, *_ in meta["output_token_logprobs"]]
    experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    return output, experts.reshape(len(ids) + len(output) - 1 - start, 3, 3)


def test_the_experts_of_all_turns_are_those_of_the_sample_computed_once(server: Served) -> None:
    ids, chunks, start = list(range(20, 60)), [], 0
    for number in range(4):
        output, experts = turn(server, ids, start)
        chunks.append(experts)
        start += len(experts)
        filler = [] if number == 3 else [100 + number, 7]
        ids = ids + output + filler
    assert start == len(ids) - 1
    _, at_once = turn(server, ids[:-1], 0)
    assert np.array_equal(np.concatenate(chunks), at_once[:start])
