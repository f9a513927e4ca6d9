"""A whole model through the Triton kernels in the interpreter, on the fake device: the launches are those of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from tests.adapters import write_adapter  # noqa: E402
from tests.models.image_checks import kind_of  # noqa: E402
from tests.models.pictures import Picture  # noqa: E402
from tests.models.test_load import rewrite, stored  # noqa: E402
from tests.runner.drive import Driver, Job, make_runner  # noqa: E402
from tests.runner.tape import TapeDevice, recording  # noqa: E402
from tests.runner.test_encoders import checkpoint, pooled, runner_of  # noqa: E402
from tests.runner.test_lora import load  # noqa: E402
from tests.runner.test_runner import outcomes, prompt  # noqa: E402
from tests.tiny_models import (  # noqa: E402
    tiny_config,
    tiny_gemma_vision_config,
    tiny_vision_config,
    write_checkpoint,
)
from tokserve import ops  # noqa: E402
from tokserve.checkpoint import hf_config as checkpoint_of  # noqa: E402
from tokserve.features.images.vision import decode_image  # noqa: E402
from tokserve.gpu import candidates, cuda  # noqa: E402
from tokserve.gpu.kernels import dense  # noqa: E402
from tokserve.models.load import load_decoder  # noqa: E402
from tokserve.ops.registry import OPS  # noqa: E402
from tokserve.protocol.params import PoolingParams, SamplingParams  # noqa: E402
from tokserve.runner import device, exactness  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="for the interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # by Triton 3.6
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runners made meanwhile run the kernels; the names stand for what they stood for afterwards."""
    bind, before = ops.bind, {name: getattr(ops, name) for name in [*OPS, "torch_device"]}

    def bind_kernels(kind: str, *rest: object, **options: object) -> dict[str, str]:
        bound = bind("cuda")
        ops.torch_device = torch.device("cpu")
        return bound

    monkeypatch.setattr(ops, "bind", bind_kernels)
    monkeypatch.setattr(device, "use", lambda kind: TapeDevice())
    monkeypatch.setattr(cuda.CudaBackend, "warm_ups", cuda.CudaBackend.warm_ups[:1])
    monkeypatch.setattr(exactness, "SIZES", (2,))  # tests/ops asks all
    monkeypatch.setattr(exactness, "MOST", 3)
    monkeypatch.setattr(exactness, "LONG", 301)
    monkeypatch.setattr(exactness, "ROWS", 3)
    yield
    for name, value in before.items():
        setattr(ops, name, value)


def jobs() -> list[Job]:
    requested = [
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    ]
    return [
        Job(prompt(6 + 9 * i, i), SamplingParams(max_tokens=2, **options), i)  # type: ignore[arg-type]
        for i, options in enumerate(requested)
    ]


@pytest.mark.slow
def test_a_model_runs_on_kernels_alone(tmp_path: Path, kernels: None) -> None:
    hf = tiny_config("qwen3") | {"num_hidden_layers": 1}
    runner, facts = make_runner(tmp_path, hf, max_num_seqs=2, max_num_batched_tokens=16)
    others = {name for name, one in facts.facts["ops"].items() if one != "triton"}
    assert others == {"packed_positions"}, "what only a delta of weights needs"
    assert facts.facts["exact"] is True
    together = outcomes(Driver(runner, facts, max_num_seqs=2).run(jobs(), chunk=8))
    assert together[0] == outcomes(Driver(runner, facts, max_num_seqs=2).run(jobs()[:1]))[0]
    (tmp_path / "cpu").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "use", lambda kind: device.Host())
        patch.setattr(ops, "bind", bind_references)
        runner, facts = make_runner(tmp_path / "cpu", hf, max_num_seqs=2)
        expected = outcomes(Driver(runner, facts, max_num_seqs=2).run(jobs()))
    for actual, other in zip(together, expected, strict=True):
        assert actual[0] == other[0]
        for a, b in zip([*actual[2], *actual[3].values()], [*other[2], *other[3].values()], strict=True):
            assert a[1:3] == b[1:3] and a[0] == pytest.approx(b[0], abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_a_model_that_reads_both_ways_runs_on_kernels_alone(
    tmp_path: Path, kernels: None, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The vectors of a step are close to the reference's, and do not depend on the batch; two layers: with a window and
    without."""
    checkpoint(tmp_path, family, "Model", num_hidden_layers=2)
    options = {"max_num_seqs": 2, "max_model_len": 40, "max_num_batched_tokens": 80}
    runner, params = runner_of(tmp_path, None, **options), PoolingParams("all", normalize=False)
    actual = pooled(runner, [1, 3], params)
    assert actual[1].tobytes() == pooled(runner, [1], params)[1].tobytes()
    monkeypatch.setattr(device, "use", lambda kind: device.Host())
    monkeypatch.setattr(ops, "bind", bind_references)
    expected = pooled(runner_of(tmp_path, None, **options), [1, 3], params)
    for number, vectors in expected.items():
        assert np.allclose(actual[number], vectors, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_towers_run_on_kernels_alone(
    tmp_path: Path, kernels: None, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    config = tiny_gemma_vision_config() if family == "gemma3" else tiny_vision_config(family)
    directory = write_checkpoint(tmp_path, config)
    picture = Picture(kind_of(directory), *((8, 8) if family == "gemma3" else (4, 6)))
    patches, grid = decode_image(picture.feature(0).data, picture.kind)

    def embeddings() -> torch.Tensor:
        ops.bind("cuda")
        model = load_decoder(
            directory, checkpoint_of(directory), dtype="float32", head_dtype="auto", load_format="auto", seed=0
        )
        assert model.tower is not None
        with torch.inference_mode():
            return model.tower(torch.from_numpy(patches), grid)

    actual = embeddings()
    monkeypatch.setattr(ops, "bind", bind_references)
    torch.testing.assert_close(actual, embeddings(), atol=1e-4, rtol=1e-4)


def test_what_is_recorded_is_launches_and_not_lines() -> None:
    x, lines = torch.zeros(3), []

    def run() -> torch.Tensor:
        lines.append(1)
        output = torch.empty(2, 3)
        output[0].copy_(x + len(lines))
        output[1] = output[0] * 2
        return output.sum(0)

    with recording() as tape:
        actual = run()
    for value in (5.0, 7.0):
        x.fill_(value)
        tape.repeat()
        assert actual.tolist() == [3 * (value + 1)] * 3 and len(lines) == 1
    with recording(), pytest.raises(AssertionError, match="on the host"):
        x.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8", "quantization": "fp8"},
        {"enable_lora": True, "max_loras": 2},
        {"quantization": "int4", "quantization_group_size": 32},
        {"quantization": "int8", "quantize_lm_head": True},
    ],
    ids=str,
)
def test_a_recorded_step_has_the_bits_of_one_that_is_launched(
    tmp_path: Path, kernels: None, options: dict[str, object]
) -> None:
    hf = tiny_config("qwen3") | {"num_hidden_layers": 1}
    base = write_checkpoint(tmp_path / "base", hf)
    attention = "model.layers.0.self_attn."
    rewrite(base, stored(base) | {attention + "k_scale": torch.tensor(0.03), attention + "v_scale": torch.tensor(0.02)})
    adapters = [write_adapter(tmp_path / str(seed), base, rank=4 + seed, seed=seed) for seed in (0, 1)]
    results = []
    for eager in (False, True):
        runner, facts = make_runner(
            base, hf, load_format="auto", max_num_seqs=3, max_num_batched_tokens=16, enforce_eager=eager, **options
        )
        requests = [*jobs(), Job(prompt(9, 7), SamplingParams(max_tokens=3))]
        for slot, directory in enumerate(adapters if "enable_lora" in options else []):
            load(runner, slot, directory)
            requests[slot].adapter = slot
        results.append(outcomes(Driver(runner, facts, max_num_seqs=3).run(requests, chunk=5)))
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("candidate", "sizes"),
    [("float8_rows", {}), ("chains_next", {"intermediate_size": 128})],
)
def test_rows_that_the_next_kernel_takes_in_another_form_have_the_same_outcomes(
    tmp_path: Path, kernels: None, monkeypatch: pytest.MonkeyPatch, candidate: str, sizes: dict[str, int]
) -> None:
    hf = tiny_config("qwen3") | {"num_hidden_layers": 1} | sizes
    options: dict[str, Any] = {"load_format": "auto", "max_num_seqs": 3, "max_num_batched_tokens": 16}
    if candidate == "float8_rows":
        options["quantization"] = "fp8"
    base, results, uses = write_checkpoint(tmp_path / "base", hf), [], Counter[str]()
    is_on = candidates.is_on
    monkeypatch.setattr(candidates, "is_on", lambda name: is_on(name) and not uses.update([name]))
    monkeypatch.setattr(dense, "CHAINS", ((2048, 2),))
    monkeypatch.setattr(dense, "LEAST_CHAIN", 64)
    for names in ("none", candidate):
        runner, facts = make_runner(base, hf, gpu_candidates=names, **options)
        assert candidates.in_use() == ([] if names == "none" else [candidate]), "bits differ at the start"
        results.append(outcomes(Driver(runner, facts, max_num_seqs=3).run(jobs(), chunk=5)))
    assert results[0] == results[1] and uses[candidate] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True, "kv_cache_dtype": "fp8", "quantization": "fp8"},
        {"enable_lora": True, "max_loras": 2},
        {"family": "qwen3_5_text"},
        {"family": "qwen3_moe", "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 1 << 24},
        {"quantization": "fp8", "gpu_candidates": "all"},
        {"quantization": "int4", "quantize_lm_head": True},
        {"quantization": "int8", "quantize_lm_head": True},
    ],
)
def test_the_start_compiles_all_that_serving_needs(options: dict[str, object]) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.runner.served_variants", json.dumps(options)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    actual = json.loads(done.stdout)
    assert actual["serving"] == []
    start, ahead = set(actual["start"]), set(actual["ahead"])
    most = 95 if options.keys() & {"family", "gpu_candidates"} else 80  # one by one they would take a minute
    assert 30 < len(start) <= most and ahead <= start
    if "gpu_candidates" in options:
        return  # their bits are compared with those of what they replace, which is not compiled side by side
    assert len(start - ahead) <= 10
    assert not {line.split("_kernel")[0] for line in start - ahead} & {"linear", "gated_linear", "decode", "prefill"}


def bind_references(*_: object, **__: object) -> dict[str, str]:
    """Bind every op to its torch reference, as `bind` does where only torch is installed."""
    for name, op in OPS.items():
        setattr(ops, name, op.reference)
    return dict.fromkeys(OPS, "torch")
