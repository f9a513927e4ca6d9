"""The runner on a real GPU: exactness with ==, and the distance to transformers.  scripts/gpu_check.sh runs these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.adapters import write_adapter
from tests.models.test_float8 import QWEN, compressed, quantize
from tests.models.test_load import stored
from tests.runner.drive import Driver, Job, make_runner
from tests.runner.test_cuda import LateDriver
from tests.runner.test_kv_scales import HF, scaled, update
from tests.runner.test_lora import jobs as adapter_jobs
from tests.runner.test_lora import load
from tests.runner.test_runner import jobs, outcomes, prompt
from tests.runner.test_weight_sync import by_stream
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DeviceFacts
from tokserve.runner.runner import Runner

pytestmark = [
    pytest.mark.gpu,
    needs.GPU.skips(),
]
BIG = {  # the shapes of Qwen3-0.6B, four layers of it
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 4,
}
Loaded = tuple[Runner, DeviceFacts]


def gpu(path: Path, hf: dict[str, Any], **options: Any) -> Loaded:
    return make_runner(path, hf, device="cuda", block_size=64, kv_cache_memory_bytes=1 << 28, **options)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    ("dtype", "big"),
    [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", False), ("float16", True)],
)
def test_batching_chunks_slots_and_preemption_change_no_bit(tmp_path: Path, dtype: str, big: bool, eager: bool) -> None:
    runner, facts = gpu(tmp_path, tiny_config("qwen3") | (BIG if big else {}), dtype=dtype, enforce_eager=eager)
    assert facts.facts["exact"] is True
    alone = outcomes([Driver(runner, facts).run([job])[0] for job in jobs()])
    assert all(all(finite) for _, finite, *_ in alone)
    for chunk, seed in ((1 << 30, 0), (16, None), (7, 1)):
        assert outcomes(Driver(runner, facts, seed=seed).run(jobs(), chunk=chunk)) == alone
    preempt = {i: 1 + i % 7 for i in range(0, 17, 2)}
    assert outcomes(Driver(runner, facts, seed=2).run(jobs(), chunk=7, preempt_after=preempt)) == alone


def test_graphs_change_no_bit(tmp_path: Path) -> None:
    results = []
    for eager in (False, True):
        runner, facts = gpu(tmp_path, tiny_config("qwen3") | BIG, dtype="bfloat16", enforce_eager=eager)
        results.append(outcomes(Driver(runner, facts, seed=1).run(jobs(), chunk=16)))
    assert results[0] == results[1]


def test_graphs_of_long_prompts_change_no_bit(tmp_path: Path) -> None:
    results = []
    for eager in (False, True):
        runner, facts = gpu(
            tmp_path,
            tiny_config("qwen3") | BIG | {"max_position_embeddings": 4096},
            dtype="bfloat16",
            enforce_eager=eager,
            max_model_len=2200,
            max_num_batched_tokens=2200,
        )
        params = SamplingParams(max_tokens=4, prompt_logprobs=0)
        requests = [Job(prompt(length, length), params) for length in (600, 1024, 1025, 2048)]
        results.append(outcomes([Driver(runner, facts).run([job])[0] for job in requests]))
    assert results[0] == results[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_batching_changes_no_bit_of_latent_attention_and_states(tmp_path: Path, family: str) -> None:
    runner, facts = gpu(tmp_path, tiny_config(family), dtype="bfloat16")
    assert facts.facts["exact"] is True
    alone = outcomes([Driver(runner, facts).run([job])[0] for job in jobs()])
    assert outcomes(Driver(runner, facts, seed=1).run(jobs(), chunk=7)) == alone


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "fp8"}, *({"quantization": name} for name in ("fp8", "int8", "int4"))], ids=str
)
def test_batching_changes_no_bit_of_quantized_models(tmp_path: Path, options: dict[str, str]) -> None:
    runner, facts = gpu(tmp_path, tiny_config("qwen3") | BIG, dtype="bfloat16", **options)
    assert facts.facts["exact"] is True
    alone = outcomes([Driver(runner, facts).run([job])[0] for job in jobs()])
    assert all(all(finite) for _, finite, *_ in alone)
    assert outcomes(Driver(runner, facts, seed=1).run(jobs(), chunk=7)) == alone


@pytest.mark.parametrize(
    ("config", "kind"), [(QWEN, "block"), (compressed("channel"), "channel")], ids=["block", "row"]
)
def test_a_float8_checkpoint_stays_float8(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3") | BIG)
    quantize(tmp_path, config, kind, "_scale", torch.float32)
    hf = json.loads((tmp_path / "config.json").read_text())
    runner, facts = gpu(tmp_path, hf, dtype="bfloat16", load_format="auto")
    assert facts.facts["quantization"] == "fp8" and facts.facts["exact"] is True
    alone = outcomes([Driver(runner, facts).run([job])[0] for job in jobs()])
    assert all(all(finite) for _, finite, *_ in alone)
    assert outcomes(Driver(runner, facts, seed=1).run(jobs(), chunk=7)) == alone


def test_batching_changes_no_bit_of_a_scaled_float8_cache_and_scales_follow_updates(tmp_path: Path) -> None:
    old, new = scaled(tmp_path / "old"), scaled(tmp_path / "new", 3.0, seed=1)
    options = {"dtype": "bfloat16", "load_format": "auto", "kv_cache_dtype": "fp8"}
    runner, facts = gpu(old, HF, **options)
    assert facts.facts["exact"] is True
    alone = outcomes([Driver(runner, facts).run([job])[0] for job in jobs()])
    assert outcomes(Driver(runner, facts, seed=1).run(jobs(), chunk=7)) == alone
    update(runner, by_stream, stored(new))
    runner.call("commit_update", {})
    other, layout = gpu(new, HF, **options)
    assert outcomes(Driver(runner, facts).run(jobs())) == outcomes(Driver(other, layout).run(jobs())) != alone


def test_two_steps_in_flight_change_no_bit(tmp_path: Path) -> None:
    runner, facts = gpu(tmp_path, tiny_config("qwen3"), dtype="bfloat16", depth=2)
    requests = [
        Job(prompt(9 + 5 * i, i), SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), **options), i)
        for i, options in enumerate([{"logprobs": 2}, {}, {"repetition_penalty": 1.4}, {"top_k": 7}, {"logprobs": 0}])
    ]
    expected = outcomes(Driver(runner, facts).run([job.fresh() for job in requests]))
    assert outcomes(LateDriver(runner, facts).run(requests)) == expected


def test_scoring_gives_the_logprobs_of_decoding(tmp_path: Path) -> None:
    runner, facts = gpu(tmp_path, tiny_config("qwen3") | BIG, dtype="bfloat16")
    requests = Driver(runner, facts).run([Job(prompt(21, 5), SamplingParams(max_tokens=90, logprobs=3), 3)])[0]
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=3, prompt_logprobs_start=21)
    scored = (
        Driver(runner, facts, seed=1).run([Job(requests.prompt + requests.output, scoring)], chunk=17)[0].prompt_rows
    )
    assert [scored[21 + i] for i in range(90)] == requests.rows


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_in_one_batch_change_no_bit(tmp_path: Path, dtype: str, eager: bool) -> None:
    hf = tiny_config("qwen3") | BIG
    base = write_checkpoint(tmp_path / "base", hf)
    runner, facts = gpu(base, hf, dtype=dtype, enforce_eager=eager, load_format="auto", enable_lora=True, max_loras=3)
    for slot, rank in enumerate((4, 7, 16)):
        load(runner, slot, write_adapter(tmp_path / str(slot), base, rank=rank, seed=slot))
    alone = outcomes([Driver(runner, facts).run([job])[0] for job in adapter_jobs()])
    for chunk, seed in ((1 << 30, 0), (7, 1)):
        assert outcomes(Driver(runner, facts, seed=seed).run(adapter_jobs(), chunk=chunk)) == alone
    plain, plain_facts = gpu(base, hf, dtype=dtype, enforce_eager=eager, load_format="auto")
    without = outcomes([Driver(plain, plain_facts).run([job])[0] for job in adapter_jobs(adapters=False)])
    assert [without[i] for i in (0, 4)] == [alone[i] for i in (0, 4)]


def distances(path: Path, hf: dict[str, Any], dtype: str) -> list[list[float]]:
    """|difference| of a prompt's logprobs to transformers' float32: mean and maximum, of both."""
    from transformers import AutoModelForCausalLM

    write_checkpoint(path, hf | {"dtype": dtype})
    ids = prompt(120, 1)
    forward = [
        AutoModelForCausalLM.from_pretrained(path, dtype=kind).cuda()(torch.tensor([ids]).cuda()).logits[0].float()
        for kind in (torch.float32, getattr(torch, dtype))
    ]
    exact, reference = (torch.log_softmax(logits[:-1].double(), -1).cpu() for logits in forward)
    runner, facts = gpu(path, hf, dtype=dtype, load_format="safetensors")
    rows = Driver(runner, facts).run([Job(ids, SamplingParams(max_tokens=1, prompt_logprobs=-1))])[0].prompt_rows
    actual = torch.empty_like(exact)
    for at in range(1, len(ids)):
        _, _, top_ids, top = rows[at]
        actual[at - 1, top_ids] = torch.tensor(top, dtype=torch.float64)
    return [
        [(logprobs - exact).abs().mean().item(), (logprobs - exact).abs().max().item()]
        for logprobs in (actual, reference)
    ]


@pytest.mark.parametrize("big", [False, True], ids=["tiny", "real"])
def test_logprobs_are_those_of_transformers(tmp_path: Path, big: bool) -> None:
    hf = tiny_config("qwen3") | (BIG if big else {})
    with torch.inference_mode():
        actual, _ = distances(tmp_path / "float32", hf, "float32")
        assert actual[1] <= 1e-4
        actual, reference = distances(tmp_path / "bfloat16", hf, "bfloat16")
    assert actual[0] <= 1.2 * reference[0] and actual[1] <= 1.2 * reference[1]
