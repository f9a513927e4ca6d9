"""Models that ranks divide among them, through real engines: exact within a size, close to one process and to
transformers; control of all ranks, and ranks that die."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.adapters import write_adapter
from tests.e2e import test_quantized
from tests.e2e.server import Server
from tests.e2e.test_exact import alone, together
from tests.models import gguf_models
from tests.models.classifiers import classifier
from tests.ports import free_port
from tests.replies import good
from tests.tiny_models import tiny_config, write_checkpoint
from tests.waiting import until
from tokserve import LLM, LoRARequest, SamplingParams, rl
from tokserve.base.errors import StartError
from tokserve.rl.broadcast import TransferGroup, send

PROMPT = [*range(3, 200)]
GENERATE = "/inference/v1/generate"
OPTIONS: dict[str, Any] = {
    "tokens_only": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 37,
    "log_level": "warning",
}
TOLERANCE = 2e-4  # of float32 logprobs


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), tiny_config("qwen3"), seed=1)


def scores(llm: LLM, prompt: list[int], **request: Any) -> np.ndarray[Any, Any]:
    """Logprobs of a prompt's tokens but the first."""
    (output,) = llm.generate([prompt], [SamplingParams(max_tokens=1, prompt_logprobs=0)], use_tqdm=False, **request)
    return np.array(output.prompt_logprobs.token_logprobs.tolist())


def check_exact(llm: LLM, count: int = 9) -> None:
    """Batches, chunks and prefix hits change no bit, and scores are those of decoding."""
    assert together(llm, count) == alone(llm, count)
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([PROMPT[:60]], [params], use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert scores(llm, PROMPT[:60] + list(choice.token_ids))[-20:].tolist() == choice.logprobs.token_logprobs.tolist()


def reference(directory: Path) -> np.ndarray[Any, Any]:
    """The scores of transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].float(), -1)
    actual: np.ndarray[Any, Any] = logprobs[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
    return actual


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "phi3", "gemma2", "mixtral", "deepseek_v3", "lfm2", "bamba", "gpt_oss", "gpt_neox"]
)
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}], ids=["tp2", "tp4"])
def test_exact_within_a_size_and_close_to_transformers(family: str, ranks: dict[str, int], tmp_path: Path) -> None:
    if family == "llama":
        hf = tiny_config("qwen3", architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=321)
    else:
        hf = tiny_config(family)
    write_checkpoint(tmp_path, hf, seed=1)
    with LLM(tmp_path, **ranks, **OPTIONS) as llm:
        check_exact(llm)
        actual = scores(llm, PROMPT)
    assert np.abs(actual - reference(tmp_path)).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gemma2", "gemma4_text", "llama4_text"])
def test_stages_have_the_bits_of_one(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(family), seed=1)
    results = []
    for tensor, stages in ((1, 1), (1, 2), (2, 1), (2, 2)):
        ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        with LLM(tmp_path, **ranks, **OPTIONS) as llm:
            results.append((together(llm, 9), scores(llm, PROMPT).tolist()))
    assert results[0] == results[1] and results[2] == results[3]


@pytest.mark.slow
@pytest.mark.parametrize("labels", [{"0": "reward"}, {"0": "no", "1": "perhaps", "2": "yes"}], ids=len)
def test_stages_of_a_classifier_have_the_bits_of_one(labels: dict[str, str], tmp_path: Path) -> None:
    classifier(tmp_path, "qwen3", labels)
    results = []
    for tensor, stages in ((1, 1), (1, 2), (2, 1), (2, 2)):
        ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        with LLM(tmp_path, **ranks, **OPTIONS) as llm:
            results.append([one.outputs.probs for one in llm.classify([PROMPT, PROMPT[:9]], use_tqdm=False)])
    assert results[0] == results[1] and results[2] == results[3]
    assert np.allclose(results[0], results[2], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [*test_quantized.KINDS, "Q8_0", "Q4_K"])
def test_quantized_weights_are_divided(kind: str, size: int, tmp_path: Path) -> None:
    """Weights are quantized as they load, or in the checkpoint: dense models, mixtures, a GGUF file."""
    if kind in test_quantized.KINDS:
        model, options = test_quantized.checkpoint(tmp_path, kind)
    else:
        model, options = tmp_path / "m.gguf", {"tokens_only": True, "max_model_len": 256}
        gguf_models.write(model, "llama", kind)
    options |= {"max_num_batched_tokens": 37, "log_level": "warning"}
    with LLM(model, tensor_parallel_size=size, **options) as llm:
        assert llm.ready.facts["quantization"] is not None
        check_exact(llm)
    if size == 2:  # stages have the bits of one
        results = []
        for stages in (1, 2):
            with LLM(model, pipeline_parallel_size=stages, **options) as llm:
                results.append((together(llm, 5), scores(llm, PROMPT).tolist()))
        assert results[0] == results[1]


@pytest.mark.slow
def test_preemption_and_speculation_change_no_bit(qwen3: Path) -> None:
    with LLM(qwen3, tensor_parallel_size=2, kv_cache_memory_bytes=200_000, depth=2, **OPTIONS) as llm:
        assert together(llm) == alone(llm)
        params = SamplingParams(max_tokens=40, temperature=0.3, seed=3, logprobs=1, ignore_eos=True)
        (plain,) = llm.generate([PROMPT[:40]], [params], use_tqdm=False)
    choice = plain.outputs[0]
    with LLM(
        qwen3, tensor_parallel_size=2, speculative_config={"method": "ngram", "num_speculative_tokens": 4}, **OPTIONS
    ) as llm:
        for _ in range(2):  # the second time from what was generated before
            (drafted,) = llm.generate([PROMPT[:40]], [params], use_tqdm=False)
            assert drafted.outputs[0].token_ids == choice.token_ids
            assert drafted.outputs[0].logprobs.token_logprobs.tolist() == choice.logprobs.token_logprobs.tolist()


@pytest.mark.slow
def test_adapters_on_all_ranks(qwen3: Path, tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a", qwen3, rank=4, seed=1))
    results = []
    for ranks in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with LLM(qwen3, enable_lora=True, **ranks, **OPTIONS) as llm:
            plain = scores(llm, PROMPT)
            adapted = scores(llm, PROMPT, lora_request=LoRARequest("a", 1, path))
            assert scores(llm, PROMPT).tolist() == plain.tolist() != adapted.tolist()
            results.append(adapted)
    assert np.abs(results[0] - results[1]).max() <= TOLERANCE
    assert results[2].tolist() == results[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, "option tensor_parallel_size: heads 4 cannot be divided among 3 ranks"),
        ({"tensor_parallel_size": 2, "speculative_config": {"method": "self"}}, "speculative_config"),
        ({"tensor_parallel_size": 2, "node_rank": 1, "nnodes": 2}, "headless"),
        ({"tensor_parallel_size": 2, "nnodes": 3}, "nnodes"),
        ({"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "10.0.0.1"}, "master_key_file"),
        ({"tensor_parallel_size": 2, "model_impl": "transformers"}, "is not divided"),
        ({"distributed_executor_backend": "ray", "cpu_threads": 1}, "distributed_executor_backend"),
        ({"distributed_executor_backend": "ray", "tensor_parallel_size": 2}, "needs cpu_threads"),
        (
            {"distributed_executor_backend": "ray", "tensor_parallel_size": 2, "nnodes": 2, "cpu_threads": 2},
            "option nnodes",
        ),
    ],
)
def test_what_ranks_cannot_divide_is_refused_by_name(qwen3: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError, match=words):
        LLM(qwen3, **OPTIONS, **options)


# --- a server ---


def rank_processes(server: Server) -> list[psutil.Process]:
    return [p for p in server.engine().children() if "tokserve.features.ranks.worker" in " ".join(p.cmdline())]


def reply(server: Server, seed: int = 1) -> Any:
    params = {"max_tokens": 20, "temperature": 1.0, "seed": seed, "logprobs": 2, "ignore_eos": True}
    body = {"token_ids": [5, 6, 7], "sampling_params": params, "logprobs_format": "arrays"}
    return good(server.post(GENERATE, body))["choices"][0]["logprobs"]


@pytest.fixture(scope="module")
def server(qwen3: Path) -> Iterator[Server]:
    with Server(qwen3, "-tp", "2", "--tokens-only", "--max-model-len", "256") as running:
        yield running
        processes = rank_processes(running)
        assert len(processes) == 2
        assert running.stop() == 0
        assert not psutil.wait_procs(processes, timeout=600)[1]


@pytest.mark.slow
def test_the_world_size_is_reported(server: Server) -> None:
    info, state = server.get("/server_info").json(), server.get("/inference/v1/state").json()
    assert info["facts"]["tensor_parallel_size"] == state["tensor_parallel_size"] == 2
    assert server.get("/get_world_size").json() == {"world_size": 2}


def test_control_acts_on_all_ranks(server: Server, qwen3: Path, tmp_path: Path) -> None:
    before = reply(server)
    other = write_checkpoint(tmp_path / "other", tiny_config("qwen3"), seed=2)
    checksums = server.post("/weight_checker", {"action": "checksum", "names": "checkpoint"}).json()["checkpoint"]
    assert checksums.items() >= rl.checksums(load_file(qwen3 / "model.safetensors")).items()
    changed = server.post("/update_weights", {"weight_dir": str(other)})
    assert changed.status_code == 200, changed.text
    after = reply(server)
    assert after != before
    assert server.post("/sleep?level=1", {}).status_code == 200
    assert server.post("/wake_up", {}).status_code == 200
    assert reply(server) == after
    assert server.post("/pause", {"mode": "keep"}).status_code == 200
    assert server.post("/resume", {}).status_code == 200
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    torn = tmp_path / "torn"
    write_checkpoint(torn, tiny_config("qwen3"), seed=3)
    tensors = load_file(torn / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, torn / "model.safetensors")
    refused = server.post("/update_weights", {"weight_dir": str(torn)})
    assert refused.status_code == 400 and "model.norm.weight" in refused.text
    assert reply(server) == after
    back = server.post("/update_weights", {"weight_dir": str(qwen3)})
    assert back.status_code == 200, back.text
    assert reply(server) == before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [("-tp", "2"), ("-pp", "2"), ("-tp", "2", "-dp", "2")], ids=["tp", "pp", "dp"])
def test_weights_come_to_each_rank_over_gloo_and_http(qwen3: Path, tmp_path: Path, ranks: tuple[str, ...]) -> None:
    flags = ("--tokens-only", "--max-model-len", "256", "--weight-transfer-config", '{"backend": "gloo"}')
    tensors = load_file(write_checkpoint(tmp_path, tiny_config("qwen3"), seed=2) / "model.safetensors")
    with Server(qwen3, *ranks, *flags) as server:
        before = reply(server)
        world, port = server.get("/get_world_size").json()["world_size"] + 1, free_port()
        with ThreadPoolExecutor() as pool:
            group = pool.submit(TransferGroup, "gloo", "127.0.0.1", port, 0, world, 60)
            info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world}
            assert server.post("/init_weight_transfer_engine", {"init_info": info}).status_code == 200
            assert server.post("/start_weight_update", {"is_checkpoint_format": True}).status_code == 200
            sending = pool.submit(send, group.result(), tensors.values(), packed=True)
            announced = {
                "names": list(tensors),
                "dtype_names": ["float32"] * len(tensors),
                "packed": True,
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
            }
            taken = server.post("/update_weights", {"update_info": announced})
            assert taken.status_code == 200, taken.text
            sending.result()
        assert server.post("/finish_weight_update", {"weight_version": "gloo"}).status_code == 200
        by_gloo = reply(server)
        assert by_gloo != before
        checksums = server.post("/weight_checker", {"action": "checksum", "names": "checkpoint"}).json()["checkpoint"]
        assert checksums.items() >= rl.checksums(tensors).items()
        assert server.post("/start_weight_update", {}).status_code == 200
        headers = {"Content-Type": "application/octet-stream"}
        body = (qwen3 / "model.safetensors").read_bytes()
        pushed = httpx.post(server.url + "/update_weights", content=body, headers=headers, timeout=600)
        assert pushed.status_code == 200, pushed.text
        assert server.post("/finish_weight_update", {"weight_version": "http"}).status_code == 200
        assert reply(server) == before


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_server(qwen3: Path, rank: int) -> None:
    with Server(qwen3, "-tp", "2", "--tokens-only", "--max-model-len", "256") as server:
        processes = rank_processes(server)
        processes[rank].kill()
        assert server.process.wait(120) == 1
        assert not psutil.wait_procs(processes, timeout=600)[1]
        assert f"rank {rank} was killed by SIGKILL" in "\n".join(server.log)


@pytest.mark.slow
def test_an_engine_whose_rank_dies_is_replaced(qwen3: Path) -> None:
    with Server(qwen3, "-tp", "2", "--tokens-only", "--max-model-len", "256", "--restart-engine", "1") as server:
        before = reply(server)
        rank_processes(server)[1].kill()
        until(lambda: any("another engine serves" in line for line in server.log), server.log)
        until(lambda: server.get("/health").status_code == 200)
        assert len(psutil.Process(server.process.pid).children()) == 1
        assert reply(server) == before


@pytest.mark.slow
def test_ranks_go_with_their_engine_even_if_they_are_stopped(qwen3: Path) -> None:
    with Server(qwen3, "-tp", "2", "--tokens-only", "--max-model-len", "256") as server:
        processes = rank_processes(server)
        processes[0].send_signal(signal.SIGSTOP)
        server.engine().kill()
        assert not psutil.wait_procs(processes, timeout=600)[1]
        assert server.process.wait(120) == 1


# --- several machines ---


def flags_of_node(rank: int, port: int, key: Path) -> list[str]:
    flags = ["-tp", "2", "--tokens-only", "--max-model-len", "256", "--nnodes", "2", "--node-rank", str(rank)]
    flags += ["--master-port", str(port), "--master-key-file", str(key)]
    return flags + (["--headless"] if rank else [])


@pytest.mark.slow
def test_two_nodes_serve_as_one_and_end_together(qwen3: Path, server: Server, tmp_path: Path) -> None:
    key, port = tmp_path / "key", free_port()
    key.write_text("a secret of thirty-two characters")
    command = [sys.executable, "-m", "tokserve", "serve", str(qwen3)]
    for ending in ("stopped", "node killed"):
        with (
            subprocess.Popen([*command, *flags_of_node(1, port, key)], stderr=subprocess.PIPE, text=True) as node,
            Server(qwen3, *flags_of_node(0, port, key)) as several,
        ):
            assert reply(several) == reply(server)
            ranks = [*rank_processes(several), *psutil.Process(node.pid).children()]
            assert len(ranks) == 2
            if ending == "stopped":
                assert several.stop() == 0
                assert node.wait(120) == 0
            else:
                node.kill()
                assert several.process.wait(120) == 1
                assert "rank 1 has closed its connection" in "\n".join(several.log)
            assert not psutil.wait_procs(ranks, timeout=600)[1]
