"""A program, not a test: which variants of which kernels a start asks for, and which serving asks for beyond these.

Kernels are neither compiled nor run: a launch is noted by what Triton compiles anew for (constants, dtypes, alignment,
numbers that are 1 or that 16 divides), so what tensors hold means nothing: those of the device are on torch's "meta",
which holds nothing and mixes with no tensor of the host.  Takes options of the configuration, "family" and numbers of
the "gpu" as JSON; prints {"ahead": launches that the start compiles side by side, "start": all of it, "serving":
launches}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction, KernelParam

from tests.runner.drive import Driver, Job, make_runner
from tests.runner.test_runner import prompt
from tests.tiny_models import tiny_config
from tokserve import ops
from tokserve.gpu.compile.meta_device import META, MetaDevice, ReadsZeros
from tokserve.gpu.compile.targets import TARGETS, use
from tokserve.protocol.params import SamplingParams

noted: Counter[str] = Counter()
ahead: set[str] = set()


def note(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    parts = [kind(parameter, value) for parameter, value in zip(self.params, arguments, strict=True)]
    noted[f"{self.__name__} {', '.join(filter(None, parts))} {options}"] += 1


def kind(parameter: KernelParam, value: Any) -> str:
    if parameter.is_constexpr:
        return f"{parameter.name}={value}"
    if isinstance(value, torch.Tensor):
        assert value.device == META, f"{parameter.name} of a kernel is a tensor of the host"
        past = value.storage_offset() * value.element_size()
        aligned = past % 16 == 0 or parameter.do_not_specialize_on_alignment
        return f"{parameter.name} {value.dtype}{'' if aligned else ' unaligned'}"
    if isinstance(value, int) and not parameter.do_not_specialize:
        return f"{parameter.name}{' is 1' if value == 1 else ' by 16' if value % 16 == 0 else ''}"
    return ""


@contextmanager
def compile_ahead(jobs: int) -> Iterator[None]:
    yield
    ahead.update(noted)


def jobs(adapters: int) -> list[Job]:
    requested: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"logprobs": 0},
        {"logprobs": 7, "temperature": 0.3},
        {"top_p": 0.9, "logprobs": 12},
        {"top_k": 3, "prompt_logprobs": 2},
        {"repetition_penalty": 1.2, "min_p": 0.1},
        {"frequency_penalty": 1.0},
        {"logprobs": 3, "logprobs_mode": "temperature"},
        {"logprobs": 2, "logprobs_mode": "processed", "top_k": 4},
        {"logprobs": 1, "logprob_token_ids": [5, 6, 7]},
        {"prompt_logprobs": 0, "logit_bias": {3: 1.0}},
        {"return_sampling_mask": True, "top_p": 0.8, "logprobs": 1},
    ]
    return [
        Job(
            prompt(1 + 23 * i % 190, i),
            SamplingParams(max_tokens=3 + i % 4, **options),
            i,
            adapter=i % (adapters + 1) - 1,
        )
        for i, options in enumerate(requested + requested)
    ]


def main() -> None:
    JITFunction.run = note
    options = json.loads(sys.argv[1])
    gpu = TARGETS["sm_90"]._replace(**options.pop("gpu", {}))
    use(gpu)
    ops.compile_ahead = compile_ahead
    with ReadsZeros():
        start, serving = served(options, MetaDevice(gpu))
    json.dump({"ahead": sorted(ahead), "start": sorted(start), "serving": sorted(serving)}, sys.stdout)


def served(options: dict[str, Any], target: MetaDevice) -> tuple[set[str], set[str]]:
    """What a start asks for, and what serving asks for beyond it."""
    family, budget = options.pop("family", "qwen3"), options.pop("max_num_batched_tokens", 256)
    kinds = ["linear_attention", "full_attention"] if family == "qwen3_5_text" else ["full_attention"]
    with tempfile.TemporaryDirectory() as path:
        hf = tiny_config(family, num_hidden_layers=len(kinds), vocab_size=5008, max_position_embeddings=4096)
        hf |= {"layer_types": kinds} if "layer_types" in hf else {}
        runner, facts = make_runner(
            Path(path),
            hf,
            target,
            device="cuda",
            max_num_seqs=40,
            max_model_len=300,
            block_size=64,
            dtype="bfloat16",
            max_num_batched_tokens=budget,
            **options,
        )
    start, adapters = set(noted), 2 if "enable_lora" in options else 0
    for job in jobs(adapters):
        Driver(runner, facts).run([job.fresh()])
    while runner.call("capture_next", {}):
        pass
    for chunk in (1 << 30, 100, 16, 7):
        Driver(runner, facts).run(jobs(adapters), chunk=chunk)
    return start, set(noted) - start


if __name__ == "__main__":
    main()
