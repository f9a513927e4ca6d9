"""The engine over the real runner: drafts, depth, preemption and late masks change no bit of an output."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.engine.drafters import OneByOne
from tests.engine.harness import Clock, Engine
from tests.runner.fake_device import FakeDevice
from tests.runner.test_runner import prompt
from tests.tiers import slow_cases
from tests.tiny_models import tiny_config
from tokserve.config import Config
from tokserve.engine.core import EngineCore
from tokserve.engine.request import Request
from tokserve.executor.inline import InlineExecutor
from tokserve.features.speculation.drafter import Drafter
from tokserve.runner import device

VOCAB = 320
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"logprobs": 1},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"min_tokens": 12, "logprobs": 0},
    {"prompt_logprobs": 1, "temperature": 0.7},
    {"prompt_logprobs": 0, "prompt_logprobs_start": 5, "prompt_logprob_token_ids": [3, 5, 9], "logprobs": 0},
    {"top_k": 20, "logprobs": 2, "trace_decode_token_ids": list(range(60))},
    {"bad_token_sequences": [[3, 4], [7]], "logprobs": 1},
    {"frequency_penalty": 1.0, "max_tokens": 3},
]


class RealEngine(Engine):
    """An EngineCore over the runner, in this process."""

    def __init__(
        self,
        directory: Path,
        drafter: Drafter | None = None,
        *,
        family: str = "qwen3",
        hf: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`hf`: config.json, else that of a tiny model of the family."""
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(tiny_config(family) if hf is None else hf))
        defaults = {
            "model": str(directory),
            "load_format": "dummy",
            "max_model_len": 128,
            "max_num_seqs": 6,
            "device": "cpu",
            "block_size": 16,
            "cpu_threads": 1,
            "dtype": "bfloat16",
            "max_num_batched_tokens": 48,
            "eos_token_ids": [],
            "spec_method": "none",
        }
        self.config = Config.make(**(defaults | options))
        self.real = InlineExecutor(self.config)
        self.clock = Clock()
        self.core = EngineCore(self.config, self.real, self.real.start(), self._emit, self.clock, lambda: None)
        if drafter is not None:
            self.draft_with(drafter)
        self.received, self.requests, self.owners = {}, {}, {}
        self.messages, self.submit_replies, self.loads = [], [], {}

    def run_all(self) -> dict[str, Any]:
        """Tokens and logprobs of requests of all kinds."""
        for i, options in enumerate(KINDS + KINDS):
            self.add(
                f"r{i}", prompt([40, 9, 33, 17][i % 4], i), seed=i, ignore_eos=True, **{"max_tokens": 18 + i} | options
            )
        self.run(5000)
        self.core.close()
        self.real.close()
        return {
            rid: (
                received.tokens,
                received.logprobs,
                received.prompt_logprobs,
                received.finish,
            )
            for rid, received in self.received.items()
        }


class SomeRight(OneByOne):
    """Drafts from outputs that are known to come, some of them wrong."""

    def __init__(self, known: dict[str, Any], wrong: float) -> None:
        self._known = known
        self._wrong = wrong
        self._rng = random.Random(0)
        self.proposed = 0

    def propose_one(self, request: Request, limit: int) -> list[int]:
        at = request.num_output
        rest = self._known[request.request_id][0][at : at + self._rng.randrange(5)]
        drafts = [self._rng.randrange(VOCAB) if self._rng.random() < self._wrong else token for token in rest][:limit]
        self.proposed += len(drafts)
        return drafts


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes of the requests without drafts at depth 1."""
    return RealEngine(tmp_path_factory.mktemp("model") / "known", depth=1).run_all()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("backend", "depth", "blocks"),
    slow_cases(product(["host", "cuda"], [1, 2], [40, 18]), ("host", 1, 40), ("host", 2, 18), ("cuda", 2, 40)),
)
def test_drafts_change_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: dict[str, Any], backend: str, depth: int, blocks: int
) -> None:
    if backend == "cuda":
        monkeypatch.setattr(device, "use", lambda kind: FakeDevice())
    drafter = SomeRight(known, 0.3)
    engine = RealEngine(
        tmp_path / "model",
        drafter,
        depth=depth,
        kv_cache_memory_bytes=blocks * 16 * 3 * 2 * 2 * 16 * 2,
    )
    assert engine.run_all() == known
    assert drafter.proposed > (100 if (depth, blocks) == (1, 40) else 0)
    assert (engine.stats.preemptions > 0) == ((depth, blocks) == (2, 18))
