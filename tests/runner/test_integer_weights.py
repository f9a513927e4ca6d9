"""Servers whose weights are integers: updates and their checksums, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.adapters import merge, write_adapter
from tests.models import test_mxfp4 as mxfp4
from tests.models import test_packed as packed
from tests.models.test_load import stored
from tests.runner.drive import Driver, Job, make_runner, update
from tests.runner.fake_device import FakeDevice
from tests.runner.test_lora import load, scores
from tests.runner.test_runner import outcomes, prompt
from tests.runner.test_weight_sync import by_gloo, by_shared_memory, by_stream, outcome, start
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.families.quantization.quantized import quantize_int4
from tokserve.protocol.params import SamplingParams
from tokserve.rl import checksums
from tokserve.runner import device

FORMS = ["int4", "gptq", "mxfp4"]


def checkpoint(directory: Path, form: str, seed: int) -> Path:
    write_checkpoint(directory, {"int4": packed.HF, "gptq": packed.HF, "mxfp4": mxfp4.HF}[form], seed=seed)
    if form == "gptq":
        packed.write(directory, *packed.CASES["gptq4-g32-asym-act-v1"])
    elif form == "mxfp4":
        mxfp4.quantized(directory, seed)
    return directory


@pytest.mark.some(2)
@pytest.mark.parametrize("way", [by_stream, by_shared_memory, by_gloo], ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form == "mxfp4" else pytest.mark.slow) for form in FORMS]
)
def test_a_commit_equals_a_start_and_reports_what_it_received(tmp_path: Path, form: str, way: Any) -> None:
    old, new = (checkpoint(tmp_path / str(seed), form, seed) for seed in (1, 2))
    options: dict[str, Any] = {"quantization": "int4", "quantization_group_size": 32} if form == "int4" else {}
    runner, facts = start(old, **options)
    before = outcome(runner, facts)
    update(runner, way, stored(new))
    assert outcome(runner, facts) == before
    runner.call("commit_update", {})
    other, layout = start(new, **options)
    assert outcome(runner, facts) == outcome(other, layout) != before
    assert runner.background("checksums", {}) == other.background("checksums", {})
    reported = runner.background("checkpoint_checksums", {})
    assert reported == other.background("checkpoint_checksums", {})
    assert reported["checkpoint"].items() >= checksums(stored(new)).items()


@pytest.mark.some(2)
@pytest.mark.parametrize("form", ["int4", "int8", "gptq", "mxfp4"])
def test_a_device_with_memory_of_its_own_serves_them_as_a_cpu_does(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, form if form in FORMS else "int4", 1)
    hf = json.loads((directory / "config.json").read_text())
    options: dict[str, Any] = {"load_format": "auto", "quantization_group_size": 32}
    if form in ("int4", "int8"):
        options |= {"quantization": form, "quantize_lm_head": True}
    requests = [Job(prompt(9 + 11 * i, i), SamplingParams(max_tokens=4, temperature=0.5 * i), i) for i in range(3)]
    runner, facts = make_runner(directory, hf, **options)
    expected = outcomes(Driver(runner, facts).run([job.fresh() for job in requests]))
    monkeypatch.setattr(device, "use", lambda kind: FakeDevice())
    runner, facts = make_runner(directory, hf, **options)
    assert facts.facts["quantization"] == (form if form in ("int4", "int8") else "wna16")
    assert facts.facts["exact"] is True
    assert outcomes(Driver(runner, facts).run(requests, chunk=5)) == expected


@pytest.mark.slow
def test_adapters_over_int4_are_those_merged_into_the_rounded_weights(tmp_path: Path) -> None:
    hf = tiny_config("qwen3")
    base, rounded = (write_checkpoint(tmp_path / name, hf, seed=3) for name in ("base", "rounded"))
    tensors = {
        name: quantize_int4(tensor, 32).dense() if "_proj" in name else tensor
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(tmp_path / "a", base, rank=8, seed=1)
    runner, facts = make_runner(
        base, hf, load_format="auto", enable_lora=True, quantization="int4", quantization_group_size=32
    )
    load(runner, 0, adapter)
    ids = prompt(60, 1)
    model = AutoModelForCausalLM.from_pretrained(merge(tmp_path / "merged", rounded, adapter)).double()
    with torch.no_grad():
        exact = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
    assert (scores(runner, facts, ids, 0) - exact).abs().max() <= 2e-4
    assert (scores(runner, facts, ids, -1) - exact).abs().max() > 0.1
