"""A float8 KV cache with scales, served: the same bits however a prompt is cut, and what an update of scales does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_load import rewrite, stored
from tests.runner.drive import Driver, Job, make_runner, update
from tests.runner.fake_device import FakeDevice
from tests.runner.test_runner import outcomes, prompt
from tests.runner.test_weight_sync import by_disk, by_shared_memory, by_stream
from tests.tiers import slow_after
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import RequestError
from tokserve.gpu.cuda import CudaBackend
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DeviceFacts
from tokserve.runner import device
from tokserve.runner.kvcache import rescale
from tokserve.runner.runner import Runner

HF = tiny_config("qwen3", num_hidden_layers=2, dtype="bfloat16")
SCALES = {
    "model.layers.0.self_attn.k_scale": 0.031,
    "model.layers.0.self_attn.v_scale": 0.017,
    "model.layers.1.self_attn.k_scale": 0.033,
    "model.layers.1.self_attn.v_scale": 0.019,
}

pytestmark = pytest.mark.usefixtures("references")


def scaled(directory: Path, factor: float = 1.0, seed: int = 0) -> Path:
    """A checkpoint with scales."""
    write_checkpoint(directory, HF, seed=seed)
    rewrite(directory, stored(directory) | {name: torch.tensor(factor * scale) for name, scale in SCALES.items()})
    return directory


def start(directory: Path, **options: Any) -> tuple[Runner, DeviceFacts, FakeDevice]:
    fake = FakeDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "use", lambda kind: fake)
        patch.setattr(CudaBackend, "warm_ups", CudaBackend.warm_ups[:1])
        runner, facts = make_runner(
            directory,
            HF,
            ops={"*": "torch"},
            load_format="auto",
            dtype="bfloat16",
            kv_cache_memory_bytes=1 << 20,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            **({"kv_cache_dtype": "fp8"} | options),
        )
    return runner, facts, fake


def jobs() -> list[Job]:
    requested: list[dict[str, Any]] = [{"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}, {"temperature": 0.7}]
    return [
        Job(prompt(40 - 9 * i, i), SamplingParams(max_tokens=5, **options), i) for i, options in enumerate(requested)
    ]


def come_of(runner: Runner, facts: DeviceFacts, **options: Any) -> list[Any]:
    return outcomes(Driver(runner, facts, 8, seed=1).run(jobs(), **options))


def pages(runner: Runner, layer: int) -> tuple[Tensor, Tensor]:
    """The dequantized values of a layer's cache, without the padding page."""
    keys, values = (cache[:-1] for cache in runner.backend.kv[layer])
    k_scale, v_scale = runner.model.kv_scales()[layer]
    return keys.float() * k_scale, values.float() * v_scale


@pytest.mark.slow
def test_batching_changes_no_bit_of_a_scaled_cache(tmp_path: Path) -> None:
    runner, facts, fake = start(scaled(tmp_path / "scaled"))
    alone = [outcomes([Driver(runner, facts, 8).run([job])[0]])[0] for job in jobs()]
    for chunk in (1 << 30, 7, 16):
        assert come_of(runner, facts, chunk=chunk, preempt_after={0: 2}) == alone
    assert fake.replayed > 0
    plain, layout, _ = start(tmp_path / "scaled", kv_cache_dtype="auto")
    for one in (runner, plain):
        Driver(one, layout, 8).run([jobs()[0]])  # its prompt begins in the first two pages
    assert runner.backend.kv[0][0].dtype == torch.float8_e4m3fn and runner.backend.kv[0][0].float().abs().max() > 100.0
    for actual, expected in zip(pages(runner, 0), pages(plain, 0), strict=True):
        assert 0.0 < (actual[:2] - expected[:2]).abs().max() <= 2**-4 * expected[:2].abs().max()


@pytest.mark.slow
def test_scales_keep_what_would_be_too_small(tmp_path: Path) -> None:
    """Keys and values a power of two smaller, with such scales and what undoes it beyond the cache: the same bits."""
    near, small = scaled(tmp_path / "near"), scaled(tmp_path / "small", 2**-12)
    tensors = stored(small)
    for name in tensors:
        if name.endswith(("k_norm.weight", "v_proj.weight")):
            tensors[name] *= 2**-12
        elif name.endswith(("q_norm.weight", "o_proj.weight")):
            tensors[name] *= 2**12
    rewrite(small, tensors)
    expected = come_of(*start(near)[:2])
    assert come_of(*start(small)[:2]) == expected
    rewrite(small, {name: tensor for name, tensor in tensors.items() if name not in SCALES})
    assert come_of(*start(small)[:2]) != expected  # all of it became zero


@pytest.mark.slow
def test_scales_are_of_no_use_to_another_cache(tmp_path: Path) -> None:
    scaled(tmp_path / "scaled"), write_checkpoint(tmp_path / "plain", HF)
    first, second = (start(tmp_path / name, kv_cache_dtype="auto") for name in ("scaled", "plain"))
    assert come_of(*first[:2]) == come_of(*second[:2])
    assert first[0].background("checksums", {}) == second[0].background("checksums", {})


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_after([by_stream, by_disk, by_shared_memory], 1), ids=lambda way: way.__name__)
def test_an_update_brings_its_scales(tmp_path: Path, way: Callable[[Runner, dict[str, Tensor]], None]) -> None:
    old, new = scaled(tmp_path / "old"), scaled(tmp_path / "new", 3.0, seed=1)
    runner, facts, fake = start(old)
    before, captured = come_of(runner, facts), fake.captured
    update(runner, way, stored(new))
    assert come_of(runner, facts) == before
    runner.call("commit_update", {})
    assert fake.captured == 2 * captured  # a number that a graph was recorded with stays in it
    other, layout, _ = start(new)
    assert come_of(runner, facts) == come_of(other, layout) != before
    assert runner.background("checksums", {}) == other.background("checksums", {})
    rest = {name: tensor for name, tensor in stored(new).items() if name not in SCALES}
    update(runner, way, rest)
    runner.call("commit_update", {})  # what does not come along is 1
    unscaled, layout, _ = start(write_checkpoint(tmp_path / "unscaled", HF, seed=1))
    assert come_of(runner, facts) == come_of(unscaled, layout)


@pytest.mark.slow
def test_an_update_whose_scales_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    runner, facts, _ = start(scaled(tmp_path))
    before, tensors = come_of(runner, facts), stored(tmp_path)
    name = next(iter(SCALES))
    for way in (by_disk, by_stream):
        for bad, words in ((torch.ones(2), "is of shape"), (torch.tensor(-1.0), "not a positive number")):
            with pytest.raises(RequestError, match=f"{name} .*{words}"):
                update(runner, way, tensors | {name: bad})
    assert come_of(runner, facts) == before
    update(runner, by_stream, tensors)
    runner.call("commit_update", {})
    assert come_of(runner, facts) == before


@pytest.mark.some(1)
@pytest.mark.parametrize("in_place", [False, True])
def test_pages_in_flight_are_rescaled_to_the_new_scales(tmp_path: Path, in_place: bool) -> None:
    old, new = scaled(tmp_path / "old"), scaled(tmp_path / "new", 4.0)  # the same weights
    runner, facts, _ = start(old)
    job = jobs()[0]
    driver = Driver(runner, facts, 8)
    driver._step([job], 1 << 30)
    expected = [pages(runner, layer) for layer in range(2)]
    if in_place:
        runner.call("release", {"tags": ["weights"]})
    update(runner, by_stream, stored(new))
    runner.call("commit_update", {})
    assert runner.model.kv_scales()[0][0] == pytest.approx(0.124)
    for layer, before in enumerate(expected):
        for one, other in zip(pages(runner, layer), before, strict=True):
            assert other.abs().max() > 0.1
            assert torch.allclose(one, other, rtol=2**-4, atol=0.05 * other.abs().max().item())
    assert len(driver.run([job])[0].output) == 5 and all(job.finite)


def test_pages_are_rescaled_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokserve.runner.kvcache.RESCALE_CHUNK", 100)
    numbers = torch.randn(2, 7, 2, 4, 8, generator=torch.Generator().manual_seed(0)) * 20
    keys, values = numbers.to(torch.float8_e4m3fn).unbind()
    before = keys.clone().float(), values.clone().float()
    rescale([(keys, values)], [(0.5, 2.0)], [(0.125, 2.0)])
    assert torch.equal(keys.float(), (before[0] * 4).clamp(-448, 448)) and torch.equal(values.float(), before[1])
    rescale([], [(1.0, 1.0)], [(2.0, 2.0)])
