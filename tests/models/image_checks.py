"""What holds of every model that reads images: transformers' logprobs, and the same bits however they are computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.pictures import Picture, oracle, oracle_logits, prompt_of
from tests.runner.drive import Driver, Job
from tests.runner.fake_device import FakeDevice
from tokserve import checkpoint
from tokserve.config import Config
from tokserve.features.images.vision import image_format
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DeviceFacts
from tokserve.runner import device
from tokserve.runner.runner import Runner
from tokserve.runner.startup import load_runner

Parts = list[list[int] | Picture]
TEXT = [[5, 9, 13, 200, 7], [31, 4], [77, 8, 19, 250, 44, 3]]


def kind_of(directory: Path) -> ImageFormat:
    kind = image_format(directory, checkpoint.hf_config(directory))
    assert kind is not None
    return kind


def loaded(
    directory: Path, dtype: str, threads: int, target: FakeDevice | None = None, **options: Any
) -> tuple[Runner, DeviceFacts]:
    """`target`: a device with memory of its own, in place of the host."""
    defaults: dict[str, Any] = {
        "model": str(directory),
        "dtype": dtype,
        "device": "cpu",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "block_size": 16,
        "cpu_threads": threads,
        "max_logprobs": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        if target is not None:
            patch.setattr(device, "use", lambda kind: target)
        return load_runner(Config.make(**(defaults | options)))


def check_logprobs(directory: Path, prompts: Iterable[Parts]) -> None:
    """Greedy tokens, their logprobs and those of the prompt are transformers'."""
    runner, facts = loaded(directory, "float32", 1)
    reference = oracle(directory)
    for parts in prompts:
        ids, features = prompt_of(parts)
        params = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=0, logprobs=0)
        [job] = Driver(runner, facts, 8).run([Job(ids, params, features=features)])
        sequence = ids + job.output
        pictures = [part for part in parts if isinstance(part, Picture)]
        expected = oracle_logits(reference, sequence, pictures).log_softmax(-1)
        assert job.output == expected[len(ids) - 1 : -1].argmax(-1).tolist()
        served = [job.prompt_rows[i][0] for i in range(1, len(ids))] + [row[0] for row in job.rows]
        exact = expected[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(served), exact, atol=2e-4, rtol=0)


def check_bits(directory: Path, dtype: str, prompts: Sequence[Parts], chunks: Iterable[int]) -> None:
    """Alone, in a batch, in chunks, after preemption and without prompt logprobs: the same tokens and logprobs."""
    runner, facts = loaded(directory, dtype, 2)

    def jobs() -> list[Job]:
        params = SamplingParams(max_tokens=5, temperature=0.8, prompt_logprobs=1, logprobs=2)
        requests = [prompt_of(parts) for parts in prompts]
        return [Job(ids, params, seed, features=features) for seed, (ids, features) in enumerate(requests)]

    alone = [Driver(runner, facts, 8).run([job])[0].outcome() for job in jobs()]
    assert [job.outcome() for job in Driver(runner, facts, 8, seed=1).run(jobs())] == alone
    for chunk in chunks:
        runs = Driver(runner, facts, 8, seed=chunk).run(jobs(), chunk=chunk, preempt_after={0: 2, 2: 3})
        assert [job.outcome() for job in runs] == alone, chunk
    plain = SamplingParams(max_tokens=5, temperature=0.8, logprobs=2)
    without = [Job(job.prompt, plain, job.seed, features=job.features) for job in jobs()]
    for job, expected in zip(Driver(runner, facts, 8).run(without), alone, strict=True):
        assert (job.output, job.rows) == (
            expected[0],
            expected[2],
        )  # of the last layer, only the last token was computed


def check_device(directory: Path, prompts: Sequence[Parts], *, graphs: bool = True) -> None:
    """A device with memory of its own gives the host's tokens and logprobs, beside rows without images that graphs
    take, if the model has any."""
    target, outcomes = FakeDevice(), []
    for other in (None, target):
        runner, facts = loaded(directory, "float32", 1, other)
        requests = [prompt_of(parts) for parts in prompts]
        params = SamplingParams(max_tokens=5, temperature=0.8, logprobs=2)
        jobs = [Job(ids, params, seed, features=features) for seed, (ids, features) in enumerate(requests)]
        runs = Driver(runner, facts, 8, seed=2).run(jobs, chunk=16, preempt_after={0: 2})
        runs += Driver(runner, facts, 8).run([Job([*TEXT[0]], params)])
        outcomes.append([(job.output, job.rows) for job in runs])
    assert outcomes[0] == outcomes[1]
    assert (target.replayed > 0) is graphs
