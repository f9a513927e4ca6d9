"""Adapters in the runner: against transformers on merged weights, and with == in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters import merge, write_adapter
from tests.runner.drive import Driver, Job, make_runner
from tests.runner.fake_device import FakeDevice
from tests.runner.test_runner import outcomes, prompt
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import Forbidden, RequestError
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DeviceFacts
from tokserve.runner import device as device_module
from tokserve.runner.runner import Runner

Loaded = tuple[Runner, DeviceFacts]


def make(base: Path, **options: Any) -> Loaded:
    hf = tiny_config("qwen3")
    return make_runner(base, hf, load_format="auto", **{"enable_lora": True, "max_loras": 3} | options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), tiny_config("qwen3"), seed=3)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of all layers, of some layers, and of another rank and dtype."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(root / "all", base, rank=4, seed=1),
        write_adapter(root / "some", base, rank=7, seed=2, targets=["q_proj", "v_proj", "up_proj"], use_rslora=True),
        write_adapter(
            root / "large",
            base,
            rank=16,
            seed=3,
            alpha=20,
            dtype=torch.bfloat16,
            rank_pattern={"o_proj": 3},
            alpha_pattern={"gate_proj": 9.0},
        ),
    ]


def load(runner: Runner, slot: int, directory: Path) -> None:
    runner.background("read_adapter", {"lora_path": str(directory)})
    runner.call("place_adapter", {"slot": slot})


def loaded(base: Path, adapters: list[Path], **options: Any) -> Loaded:
    runner, facts = make(base, **options)
    for slot, directory in enumerate(adapters):
        load(runner, slot, directory)
    return runner, facts


def jobs(adapters: bool = True) -> list[Job]:
    """Eight requests, two for each adapter and two for none."""
    requested: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"logprobs": 0, "prompt_logprobs": 1},
        {"temperature": 0.7, "top_k": 40, "logprobs": 1},
        {"prompt_logprobs": 0, "temperature": 0.0},
    ]
    return [
        Job(
            prompt([21, 1, 40, 17][i // 2], i // 4),
            SamplingParams(max_tokens=7 + i, **requested[i % 4]),
            i,
            adapter=i % 4 - 1 if adapters else -1,
        )
        for i in range(8)
    ]


def scores(runner: Runner, facts: DeviceFacts, ids: list[int], adapter: int) -> torch.Tensor:
    """Logprobs of all of the vocabulary after each token of a prompt but the last."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    rows = Driver(runner, facts).run([Job(ids, params, adapter=adapter)])[0].prompt_rows
    actual = torch.empty(len(ids) - 1, 320)
    for at in range(1, len(ids)):
        _, _, top_ids, top = rows[at]
        actual[at - 1, top_ids] = torch.tensor(top)
    return actual


@pytest.mark.some(3)
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "qwen2", "gemma3_text"])
def test_logprobs_are_those_of_transformers_with_merged_weights(family: str, tmp_path: Path) -> None:
    hf = tiny_config(family, **({"attention_bias": True, "mlp_bias": True} if family == "llama" else {}))
    base = write_checkpoint(tmp_path / "base", hf)
    finished = [
        write_adapter(tmp_path / "a", base, rank=8, seed=1, use_rslora=True),
        write_adapter(tmp_path / "b", base, rank=3, seed=2, targets=["k_proj", "gate_proj", "down_proj"]),
    ]
    runner, facts = make_runner(base, hf, load_format="auto", enable_lora=True)
    ids = prompt(60, 1)
    results = []
    for slot, adapter in enumerate(finished):
        load(runner, slot, adapter)
        model = AutoModelForCausalLM.from_pretrained(merge(tmp_path / f"merged{slot}", base, adapter))
        with torch.no_grad():
            exact = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
        results.append(scores(runner, facts, ids, slot))
        assert (results[-1] - exact).abs().max() <= 1e-4
    plain = scores(runner, facts, ids, -1)
    assert (
        min((a - b).abs().max() for a, b in ((results[0], results[1]), (results[0], plain), (results[1], plain))) > 0.1
    )


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("lfm2", ["in_proj", "out_proj", "q_proj", "k_proj", "w1"]),
        ("deepseek_v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]),
    ],
)
def test_layers_of_other_kinds_are_adapted_token_by_token(family: str, targets: list[str], tmp_path: Path) -> None:
    hf = tiny_config(family)
    base = write_checkpoint(tmp_path / "base", hf)
    adapter = write_adapter(tmp_path / "a", base, targets=targets)
    runner, facts = make_runner(base, hf, load_format="auto", enable_lora=True)
    load(runner, 1, adapter)
    merged, layout = make_runner(merge(tmp_path / "merged", base, adapter), hf, load_format="auto")
    ids = prompt(40, 1)
    result, plain = scores(runner, facts, ids, 1), scores(runner, facts, ids, -1)
    assert (result - scores(merged, layout, ids, -1)).abs().max() <= 1e-4 and (result - plain).abs().max() > 0.1
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
    finished = Driver(runner, facts, seed=1).run(
        [Job(prompt(20 + i, i), params, i, adapter=2 * (i % 2) - 1) for i in range(4)]
    )
    for job in finished:
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=len(job.prompt))
        prefilled = Driver(runner, facts).run([Job(job.prompt + job.output, scored, adapter=job.adapter)])[0]
        assert [row[0] for row in job.rows] == [row[0] for row in prefilled.prompt_rows.values()]


@pytest.mark.some(2)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_batching_changes_no_bit(base: Path, adapters: list[Path], options: dict[str, Any]) -> None:
    runner, facts = loaded(base, adapters, **options)
    alone = outcomes([Driver(runner, facts).run([job])[0] for job in jobs()])
    assert alone[1][0] != alone[5][0] and all(all(finite) for _, finite, *_ in alone)
    for chunk, seed in ((1 << 30, 0), (7, 1)):
        assert outcomes(Driver(runner, facts, seed=seed).run(jobs(), chunk=chunk)) == alone
    preempt = {i: 1 + i for i in range(0, 8, 2)}
    assert outcomes(Driver(runner, facts, seed=2).run(jobs(), chunk=16, preempt_after=preempt)) == alone
    plain, plain_facts = make(base, enable_lora=False, **options)
    without = outcomes([Driver(plain, plain_facts).run([job])[0] for job in jobs(adapters=False)])
    assert [without[i] for i in (0, 4)] == [alone[i] for i in (0, 4)]
    for slot, directory in enumerate(adapters):  # each as the only one, in another slot, with more room
        single, single_facts = loaded(base, [directory], **options | {"max_loras": 1, "max_lora_rank": 20})
        adapter_jobs = [job for job in jobs() if job.adapter == slot]
        for job in adapter_jobs:
            job.adapter = 0
        expected = [alone[i] for i in range(8) if i % 4 - 1 == slot]
        assert outcomes(Driver(single, single_facts, seed=3).run(adapter_jobs)) == expected


def test_recorded_steps_with_adapters_have_the_bits_of_steps_run_op_by_op(base: Path, adapters: list[Path]) -> None:
    expected = outcomes(Driver(*loaded(base, adapters, enforce_eager=True)).run(jobs()))
    runner, facts = loaded(base, adapters, cpu_threads=2)
    for seed in (1, 2):
        assert outcomes(Driver(runner, facts, seed=seed).run(jobs())) == expected
    load(runner, 0, adapters[2])  # another adapter in a slot whose steps are recorded
    again = outcomes(Driver(runner, facts).run(jobs()))
    load(runner, 0, adapters[0])
    assert again != expected and outcomes(Driver(runner, facts).run(jobs())) == expected


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_a_device_of_its_own_has_the_bits_of_the_cpu(
    base: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    expected = outcomes([Driver(*loaded(base, adapters)).run([job])[0] for job in jobs()])
    fake = FakeDevice()
    monkeypatch.setattr(device_module, "use", lambda kind: fake)
    runner, facts = loaded(base, adapters, kv_cache_memory_bytes=1 << 22, enforce_eager=eager)
    assert outcomes(Driver(runner, facts, seed=1).run(jobs(), chunk=16)) == expected
    assert outcomes(Driver(runner, facts).run(jobs())) == expected
    assert (fake.replayed > 0) is not eager


def test_new_weights_and_sleep_keep_the_adapters(base: Path, adapters: list[Path], tmp_path: Path) -> None:
    new = write_checkpoint(tmp_path / "new", tiny_config("qwen3"), seed=8)
    expected = outcomes(Driver(*loaded(new, adapters)).run(jobs()))
    runner, facts = loaded(base, adapters)
    assert outcomes(Driver(runner, facts).run(jobs())) != expected
    runner.call("release", {"tags": ["weights", "kv_cache"]})
    runner.background("begin_update", {"have_weights": False})
    runner.background("receive_update", {"source": {"weight_dir": str(new)}})
    runner.background("finish_update", {})
    runner.call("commit_update", {})
    runner.call("restore", {"tags": ["kv_cache"]})
    assert outcomes(Driver(runner, facts).run(jobs())) == expected


def test_an_adapter_in_place_of_another_leaves_nothing_of_it(base: Path, adapters: list[Path]) -> None:
    expected = outcomes(Driver(*loaded(base, [adapters[1]])).run([job for job in jobs() if job.adapter == 0]))
    runner, facts = loaded(base, [adapters[2]])
    load(runner, 0, adapters[1])
    assert outcomes(Driver(runner, facts).run([job for job in jobs() if job.adapter == 0])) == expected


def test_a_failed_read_changes_nothing(base: Path, adapters: list[Path], tmp_path: Path) -> None:
    runner, facts = loaded(base, adapters)
    expected = outcomes(Driver(runner, facts).run(jobs()))
    broken = write_adapter(tmp_path / "broken", base, rank=17)
    runner.background("read_adapter", {"lora_path": str(adapters[1])})  # and not placed
    with pytest.raises(RequestError, match="max-lora-rank"):
        runner.background("read_adapter", {"lora_path": str(broken)})
    with pytest.raises(RuntimeError):
        runner.call("place_adapter", {"slot": 0})
    assert outcomes(Driver(runner, facts).run(jobs())) == expected


def test_directories_are_bounded_and_links_followed(base: Path, adapters: list[Path], tmp_path: Path) -> None:
    inside = write_adapter(tmp_path / "allowed" / "one", base)
    outside = write_adapter(tmp_path / "outside", base)
    (tmp_path / "allowed" / "link").symlink_to(outside)
    sly = write_adapter(tmp_path / "allowed" / "sly", base)
    (sly / "adapter_model.safetensors").unlink()
    (sly / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    runner, _ = make(base, allowed_weight_dirs=[str(tmp_path / "allowed")])
    load(runner, 0, inside)
    for path in (outside, tmp_path / "allowed" / "link", tmp_path / "allowed" / ".." / "outside", sly, adapters[0]):
        with pytest.raises(Forbidden) as refused:
            runner.background("read_adapter", {"lora_path": str(path)})
        assert refused.value.field == "lora_path"
    runner.background("read_adapter", {"lora_path": str(outside), "anywhere": True})  # the operator's word
    for name, status in ((str(tmp_path / "allowed" / "none"), 404), ("a\0b", 400)):
        with pytest.raises(RequestError) as wrong:
            runner.background("read_adapter", {"lora_path": name})
        assert wrong.value.field == "lora_path" and wrong.value.status == status


def test_without_the_option_there_are_no_slots(base: Path) -> None:
    runner, facts = make(base, enable_lora=False)
    assert "lora_bytes" not in facts.facts
    with pytest.raises(RequestError):
        runner.background("read_adapter", {"lora_path": "x"})


def test_a_nonfinite_adapter_is_refused_if_checks_are_on(base: Path, tmp_path: Path) -> None:
    key = "base_model.model.model.layers.1.mlp.gate_proj.lora_B.weight"
    for name, value in (("nan", float("nan")), ("large", 1e300)):
        tensors = {key: torch.full((160, 4), value, dtype=torch.float64)}
        directory = write_adapter(tmp_path / name, base, rank=4, tensors=tensors)
        with pytest.raises(RequestError, match=r"layers\.1\.mlp\.gate_proj\.lora_B is not finite") as caught:
            load(make(base)[0], 0, directory)
        assert (caught.value.field, caught.value.code) == ("lora_path", "weights_not_finite")
        load(make(base, check_weights="off")[0], 0, directory)


@pytest.mark.parametrize("alpha", [1e38, -1e38, 3e20])
def test_an_adapter_whose_scale_overflows_is_refused_if_checks_are_on(base: Path, tmp_path: Path, alpha: float) -> None:
    directory = write_adapter(tmp_path, base, rank=4, alpha=alpha, targets=["k_proj"])
    with pytest.raises(RequestError, match=r"lora_alpha is too large: 3 .*layers\.0\.self_attn\.k_proj") as caught:
        load(make(base)[0], 0, directory)
    assert (caught.value.field, caught.value.code) == ("lora_path", "weights_not_finite")
    load(make(base, check_weights="off")[0], 0, directory)
