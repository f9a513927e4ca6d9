"""State-space models through real engines: the same bits however a request is computed, adapters, quantized files,
weight updates and sleep.  What they cannot be combined with is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import merge, write_adapter
from tests.e2e.test_deltas import Weights, in_client, memory, stepped
from tests.e2e.test_disaggregated import flags
from tests.e2e.test_exact import alone, result, together
from tests.e2e.test_latent import OPTIONS, PROMPT, exact, prompt_logprobs
from tests.models import test_packed as packed
from tests.threads import ServerThread
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, SamplingParams
from tokserve.base.errors import StartError
from tokserve.rl import TokserveClient

pytestmark = [pytest.mark.usefixtures("engine_threads"), pytest.mark.slow]

FAMILIES = ("bamba", "falcon_h1", "nemotron_h", "mamba2")
TOLERANCE = 3e-4  # of logprobs, beside transformers: what a head reads is divided by its norm


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("narrow"), tiny_config(family, dtype="bfloat16"), seed=1)


@pytest.fixture(scope="module")
def full(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("full"), tiny_config(family))


def test_same_bits_alone_among_others_chunked_preempted_cached_and_with_drafts(checkpoint: Path) -> None:
    with LLM(checkpoint, enable_prefix_caching=False, spec_method="none", **OPTIONS) as llm:
        per_token = llm.ready.facts["kv_bytes"] // (llm.ready.num_blocks * llm.ready.block_size)
        bits = alone(llm)
    small: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 37, "state_snapshot_interval": 16}
    small |= {"kv_cache_memory_bytes": per_token * 264} if per_token else {}
    with LLM(checkpoint, depth=2, **small, **OPTIONS | {"cpu_threads": 2}) as llm:
        assert together(llm) == bits
        assert together(llm) == bits, "second time, from the prefix cache"
        assert llm.stats.prefix_hits > 0 and (llm.stats.preemptions > 0 or not per_token)
    with LLM(checkpoint, enforce_eager=True, spec_method="ngram", **OPTIONS) as llm:
        assert together(llm) == bits


def test_logprobs_are_transformers_and_a_rescore_is_equal(full: Path) -> None:
    with LLM(full, **OPTIONS) as llm:
        scored = prompt_logprobs(llm, PROMPT)
        assert (scored - exact(full, PROMPT)).abs().max() < TOLERANCE
        params = SamplingParams(max_tokens=20, temperature=0.9, seed=1, logprobs=0, ignore_eos=True)
        tokens, (logprobs, *_) = result(llm.generate([PROMPT], [params], use_tqdm=False)[0])
        assert prompt_logprobs(llm, PROMPT + tokens)[-20:].tolist() == torch.tensor(logprobs).tolist()


def test_an_adapter_on_the_projections(full: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", full, rank=5, targets=["in_proj", "out_proj", "q_proj", "down_proj"])
    with LLM(full, enable_lora=True, lora_modules=[f"a={adapter}"], **OPTIONS) as llm:
        scored = prompt_logprobs(llm, PROMPT, lora_request="a")
        assert (scored - exact(merge(tmp_path / "merged", full, adapter), PROMPT)).abs().max() < TOLERANCE
        assert (prompt_logprobs(llm, PROMPT) - scored).abs().max() > 0.1


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_projections_can_be_quantized_as_they_load(quantization: str, checkpoint: Path) -> None:
    with LLM(checkpoint, **OPTIONS) as llm:
        plain = prompt_logprobs(llm, PROMPT)
    options: dict[str, Any] = {"quantization": quantization, "quantization_group_size": 32} | OPTIONS
    with LLM(checkpoint, enable_prefix_caching=False, **options) as llm:
        bits = alone(llm, 6)
        quantized = prompt_logprobs(llm, PROMPT)
    assert 0 < (plain - quantized).abs().mean() < (0.3 if quantization == "int8" else 1.0)
    with LLM(checkpoint, max_num_batched_tokens=37, **options) as llm:
        assert together(llm, 6) == bits


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_file(bits: int, family: str, tmp_path: Path) -> None:
    """Every projection in 4 or 8 bits by groups, as llm-compressor stores it, is what its numbers mean."""
    write_checkpoint(tmp_path, tiny_config(family), seed=1)
    dequantized = packed.write(
        tmp_path,
        packed.scheme("compressed-tensors", bits, 32),
        lambda weight: packed.compressed(weight, bits, 32, sym=True),
    )
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.ready.facts["quantization"] == "wna16"
        scored, bits_alone = prompt_logprobs(llm, PROMPT), alone(llm, 6)
        assert together(llm, 6) == bits_alone
    packed.rewrite(tmp_path, dequantized)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in hf.items() if k != "quantization_config"}))
    assert (scored - exact(tmp_path, PROMPT)).abs().max() < TOLERANCE


def test_weights_are_pushed_whole_and_as_deltas(checkpoint: Path) -> None:
    torch.manual_seed(1)
    tensors = load_file(checkpoint / "model.safetensors")
    weights: Weights = {name: t.float() * (1 + 0.1 * torch.rand(())) for name, t in tensors.items()}
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "temperature": 0.0, "logprobs": 0}}
    with ServerThread(str(checkpoint), "--dtype", "bfloat16", "--tokens-only") as server:

        def answer() -> Any:
            (choice,) = server.post("/inference/v1/generate", body).json()["choices"]
            return choice["token_ids"], choice["logprobs"]

        before = answer()

        async def scene(client: TokserveClient) -> None:
            assert (await client.push(weights, "a", delta=True)).mode == "full"
            current = stepped(weights)
            pushed = await client.push(current, "b", delta=True)
            assert pushed.mode == "delta" and pushed.num_changed
            by_deltas = await memory(client)
            changed = answer()
            assert changed != before
            await client.update_weights(current.items(), "whole")
            assert await memory(client) == by_deltas and answer() == changed
            await client.push({name: tensor.float() for name, tensor in tensors.items()}, "back")

        in_client(server, scene)
        assert answer() == before


def test_sleep_drops_snapshots_and_nothing_else(checkpoint: Path) -> None:
    with LLM(checkpoint, state_snapshot_interval=16, **OPTIONS) as llm:
        before = together(llm, 6)
        llm.sleep(level=1)
        llm.wake_up()
        assert together(llm, 6) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: models with recurrent states have one stage"),
        ({"kv_offloading_size": 0.01}, "kv_offloading_size: a model with recurrent states is not supported"),
        ({"speculative_config": {"method": "self"}}, "draft model is not supported with recurrent states"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_by_name(options: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(StartError, match=message):
        LLM(checkpoint, **OPTIONS, **options)


@pytest.mark.parametrize("connector", ["tcp", "shared-storage"])
def test_prefill_elsewhere_is_refused(connector: str, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads(flags(connector, "kv_producer", tmp_path)[-1])
    with pytest.raises(StartError, match="recurrent states"):
        LLM(checkpoint, kv_transfer_config=config, **OPTIONS)
