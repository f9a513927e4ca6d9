"""Servers of one arithmetic on different instruction sets answer with equal bits and call themselves alike."""

from __future__ import annotations

from typing import Any

import pytest

from tests import needs
from tests.e2e.server import Server

if not needs.EXTENSION.is_there():
    pytest.skip(needs.EXTENSION.reason, allow_module_level=True)
from tokserve import _C

FMA = [name for name in _C.instruction_sets() if _C.arithmetic(name) == "fma"]
PROMPT = [286, 84, 82, 68, 81, 198, 19, 22, 10, 18, 23, 287, 198, 286, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198]


def replies(server: Server) -> list[Any]:
    """The replies to a seeded request and to a re-score of what it generated."""
    params = {"temperature": 1.5, "seed": 7, "logprobs": 2, "max_tokens": 40, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params, "logprobs_format": "arrays"}
    reply = server.post("/inference/v1/generate", body).json()
    tokens = reply["choices"][0]["token_ids"]
    rescore = {"max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    body = {"token_ids": PROMPT + tokens, "sampling_params": rescore, "logprobs_format": "arrays"}
    scored = server.post("/inference/v1/generate", body).json()
    return [reply["choices"], reply["seed"], scored["choices"], scored["prompt_logprobs"]]


@pytest.mark.slow
def test_servers_with_one_arithmetic_give_equal_replies() -> None:
    answers, fingerprints = [], set()
    for kernels in (FMA[0], FMA[-1]):
        with Server("demo", "--cpu-arithmetic", "fma", "--cpu-kernels", kernels) as server:
            answers.append(replies(server))
            assert server.get("/inference/v1/state").json()["arithmetic"] == "fma"
            facts = server.get("/server_info").json()["facts"]
            assert (facts["kernels"], facts["arithmetic"]) == (kernels, "fma")
            assert any(f"cpu kernels: {kernels}, arithmetic fma" in line for line in server.log)
            chat = {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}
            reply = server.post("/v1/chat/completions", chat).json()
            fingerprints.add((reply["system_fingerprint"], reply["choices"][0]["message"]["content"]))
    assert answers[0] == answers[1]
    assert len(fingerprints) == 1
