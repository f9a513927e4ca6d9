"""Images and models that read both ways on a real GPU: the same bits in any batch, and close to a CPU's.

scripts/gpu_check.sh runs these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import needs
from tests.models.image_checks import TEXT, Parts, kind_of, loaded
from tests.models.pictures import Picture, prompt_of
from tests.runner.drive import Driver, Job
from tests.runner.test_encoders import checkpoint, pooled, runner_of
from tests.tiny_models import tiny_gemma_vision_config, tiny_vision_config, write_checkpoint
from tokserve.protocol.params import PoolingParams, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    needs.GPU.skips(),
]
ON_GPU: dict[str, Any] = {"device": "cuda", "block_size": 64, "kv_cache_memory_bytes": 1 << 28}


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_images(tmp_path: Path, family: str) -> None:
    config = tiny_gemma_vision_config() if family == "gemma3" else tiny_vision_config(family)
    directory = write_checkpoint(tmp_path, config)
    kind = kind_of(directory)
    sides = ((8, 8), (8, 8)) if family == "gemma3" else ((4, 4), (2, 10))
    one, two = (Picture(kind, *side, seed) for seed, side in enumerate(sides))
    prompts: list[Parts] = [[TEXT[0], one, TEXT[2]], [*TEXT], [two, TEXT[1], one]]

    def jobs() -> list[Job]:
        params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=1)
        requests = [prompt_of(parts) for parts in prompts]
        return [Job(ids, params, seed, features=features) for seed, (ids, features) in enumerate(requests)]

    runner, facts = loaded(directory, "float32", 1)
    expected = Driver(runner, facts, 8).run(jobs())
    runner, facts = loaded(directory, "float32", 1, **ON_GPU)
    assert facts.facts["exact"] is True
    alone = [Driver(runner, facts, 8).run([job])[0].outcome() for job in jobs()]
    for chunk in (1 << 30, 16, 7):
        actual = Driver(runner, facts, 8, seed=chunk % 5).run(jobs(), chunk=chunk, preempt_after={0: 2})
        assert [job.outcome() for job in actual] == alone
    for job, other in zip(actual, expected, strict=True):
        assert job.output == other.output
        assert [row[0] for row in job.rows] == pytest.approx([row[0] for row in other.rows], abs=1e-3)


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_models_that_read_both_ways(tmp_path: Path, family: str) -> None:
    checkpoint(tmp_path, family, "Model")
    params = PoolingParams("all", normalize=False)
    expected = pooled(runner_of(tmp_path), [3, 0, 4, 1], params)
    runner = runner_of(tmp_path, **ON_GPU)
    together = pooled(runner, [3, 0, 4, 1], params)
    for number, vectors in together.items():
        assert pooled(runner, [number], params)[number].tobytes() == vectors.tobytes()
        assert np.allclose(vectors, expected[number], atol=1e-3)
