"""Adapters that are pushed as tensors, against the same adapters from directories.  Only `==`."""

from __future__ import annotations

import json
import pickle
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tests.adapters import write_adapter
from tests.e2e.server import Served
from tests.e2e.test_exact import columns
from tests.ports import free_port
from tests.runner.test_weight_sync import announcement, segment
from tests.threads import ServerThread
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, SamplingParams
from tokserve.base.errors import Conflict, RequestError
from tokserve.rl import Client, ServerError
from tokserve.rl.deltas import DeltaLabel, difference, file_pieces, tensors_of
from tokserve.rl.sums import set_checksum, tensor_sum

pytestmark = pytest.mark.usefixtures("engine_threads")

PROMPTS = [[*range(5, 40)], [7, 8, 9]]
PARAMS = SamplingParams(max_tokens=12, logprobs=1, prompt_logprobs=1, seed=4, ignore_eos=True)
OPTIONS: dict[str, Any] = {"tokens_only": True, "max_model_len": 256, "enable_lora": True, "max_loras": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config("qwen3", dtype="bfloat16"), seed=1)


@pytest.fixture(scope="module")
def paths(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(root / str(number), base, rank=4, seed=number, use_rslora=bool(number % 2)) for number in range(3)
    ]


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[LLM]:
    with LLM(str(base), **OPTIONS) as engine:
        yield engine


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((path / "adapter_config.json").read_text())
    return config, load_file(path / "adapter_model.safetensors")


def checksum_of(tensors: dict[str, Tensor]) -> str:
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return set_checksum({name: tensor_sum(tensor) for name, tensor in tensors.items()}, described)


def send(llm: LLM, body: bytes, size: int = 3000) -> None:
    """A safetensors file, in pieces."""
    llm.call("begin_weight_stream", stream="s")
    for first in range(0, len(body), size):
        llm.call("feed_weights", stream="s", chunk=body[first : first + size], last=first + size >= len(body))


def push(llm: LLM, path: Path, name: str | None = "p", version: str | None = None, **finish: Any) -> dict[str, Any]:
    config, tensors = contents(path)
    llm.start_weight_update(lora_name=name, lora_config=config)
    send(llm, save(tensors))
    return llm.finish_weight_update(version, **finish)


def outcome(llm: LLM, adapter: str | None) -> Any:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=adapter)
    return [(o.outputs[0].token_ids, columns(o.outputs[0].logprobs), columns(o.prompt_logprobs)) for o in outputs]


def served(llm: LLM, name: str = "p") -> dict[str, Any]:
    return next(one for one in llm.served_weights()["adapters"] if one["lora_name"] == name)


def test_a_pushed_adapter_equals_the_one_from_a_directory(llm: LLM, paths: list[Path]) -> None:
    llm.load_lora_adapter("d", str(paths[0]))
    tensors = contents(paths[0])[1]
    done = push(llm, paths[0], version="one", checksum=checksum_of(tensors))
    assert done["lora_name"] == "p" and done["lora_version"] == "one" and done["weight_version"] == "0"
    assert done["checksum"] == checksum_of(tensors) == served(llm)["checksum"]
    assert outcome(llm, "p") == outcome(llm, "d") != outcome(llm, None)
    version = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False, lora_request="p")[0].outputs[0].weight_versions
    assert version == [(f"0+p@{done['generation']}", 0, 12)]
    llm.load_lora_adapter("d", str(paths[1]))
    unnamed = push(llm, paths[1])
    assert unnamed["lora_version"] is None and unnamed["generation"] == done["generation"] + 2
    assert outcome(llm, "p") == outcome(llm, "d")
    llm.call("check")


def test_it_comes_back_after_it_has_lost_its_slot(llm: LLM, paths: list[Path]) -> None:
    push(llm, paths[0])
    before, generation = outcome(llm, "p"), served(llm)["generation"]
    for name, path in (("d", paths[1]), ("e", paths[2])):
        llm.load_lora_adapter(name, str(path))
        outcome(llm, name)
    assert outcome(llm, "p") == before and served(llm)["generation"] == generation
    llm.unload_lora_adapter("e")
    llm.call("check")


def test_a_push_that_fails_leaves_the_adapter(llm: LLM, paths: list[Path]) -> None:
    push(llm, paths[0], version="good")
    before, state = outcome(llm, "p"), served(llm)
    config, tensors = contents(paths[1])
    name = next(iter(tensors))

    def refused(body: bytes, match: str, config: dict[str, Any] = config, **finish: Any) -> RequestError:
        with pytest.raises(RequestError, match=match) as error:
            llm.start_weight_update(lora_name="p", lora_config=config)
            send(llm, body)
            llm.finish_weight_update(**finish)
        with pytest.raises(Conflict):  # it is over
            llm.abort_weight_update()
        return error.value

    refused(save({name: tensors[name]}), "1 missing")
    refused(save(tensors | {"other": tensors[name].clone()}), "no weight of a linear layer's adapter: other")
    refused(save(tensors | {name: tensors[name][:, :1].contiguous()}), "misshapen")
    refused(save(tensors)[:-4], "truncated|ends before")
    refused(save(tensors | {name: torch.full_like(tensors[name], float("nan"))}), "not finite")
    wrong = refused(save(tensors), "has the checksum", checksum="0" * 64)
    assert (wrong.status, wrong.field, wrong.code) == (409, "checksum", "checksum_mismatch")
    assert refused(save(tensors), "peft_type must be LORA", config | {"peft_type": "IA3"}).field == "lora_config"
    same = refused(save(tensors), "other weights of version good", weight_version="good")
    assert (same.status, same.code) == (409, "version_in_use")
    with pytest.raises(RequestError, match="lora_config is missing"):
        llm.start_weight_update(lora_name="p")
    llm.start_weight_update(lora_name="p", lora_config=config)
    send(llm, save(tensors))
    llm.abort_weight_update()
    assert (outcome(llm, "p"), served(llm)) == (before, state)
    assert push(llm, paths[0], version="good")["lora_version"] == "good"  # the same weights may come twice
    llm.call("check")


def test_a_delta_changes_what_was_pushed_last(llm: LLM, paths: list[Path]) -> None:
    config, tensors = contents(paths[0])
    push(llm, paths[0], version="1")
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        tensor.view(-1)[::7] += 0.25
    deltas = {name: difference(tensors[name], changed[name]) for name in tensors}
    label = DeltaLabel("1", checksum_of(tensors), "2", checksum_of(changed))
    body = b"".join(
        file_pieces(tensors_of({name: one[0] for name, one in deltas.items() if one is not None}), label.metadata())
    )
    assert len(body) < len(save(changed)) / 2
    bases: dict[str, Any] = {"base_version": "1", "base_checksum": checksum_of(tensors)}
    llm.start_weight_update(lora_name="p", lora_config=config, **bases)
    send(llm, body)
    done = llm.finish_weight_update()
    assert (done["lora_version"], done["checksum"]) == ("2", checksum_of(changed))
    after = outcome(llm, "p")
    with pytest.raises(Conflict, match="but version '2'") as stale:
        llm.start_weight_update(lora_name="p", lora_config=config, **bases)
    assert stale.value.code == "base_mismatch"
    with pytest.raises(Conflict, match="no tensors of the adapter were pushed"):
        llm.start_weight_update(lora_name="unknown", lora_config=config, **bases)
    llm.start_weight_update(lora_name="p", lora_config=config)
    send(llm, save(changed))
    llm.finish_weight_update("3", checksum_of(changed))
    assert outcome(llm, "p") == after
    llm.call("check")


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Served]:
    with ServerThread(str(base), "--tokens-only", "--enable-lora", "--max-model-len", "256", "--sglang-api") as running:
        yield running


def rollouts(client: Client, name: str | None) -> list[Any]:
    results = client.generate(PROMPTS, model=name, seeds=[1, 2], max_tokens=8, ignore_eos=True)
    return [(rollout.token_ids.tolist(), rollout.logprobs.tolist()) for rollout in results]


def test_the_client_pushes_over_http_and_over_a_group(server: Served, paths: list[Path]) -> None:
    config, tensors = contents(paths[0])
    with Client(server.url) as client:
        client.load_lora_adapter("d", paths[0])
        first = client.push_adapter((config, tensors), "p", "1", delta=True)
        assert (first.mode, first.reason) == ("full", "nothing was pushed before with delta=True")
        assert (first.lora_name, first.lora_version, first.weight_version) == ("p", "1", "0")
        assert rollouts(client, "p") == rollouts(client, "d") != rollouts(client, None)
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        next(iter(changed.values())).view(-1)[:3] += 1.0
        second = client.push_adapter((config, changed), "p", "2", delta=True)
        assert second.mode == "delta" and second.num_bytes < first.num_bytes / 4
        after = rollouts(client, "p")
        client.join("gloo", "127.0.0.1", free_port())
        client.push_adapter((config, tensors), "p")
        assert rollouts(client, "p") == rollouts(client, "d")
        over_group = client.push_adapter((config, changed), "p", "4", delta=True)
        assert over_group.mode == "full" and rollouts(client, "p") == after
        client.leave()
        with pytest.raises(ServerError, match="misshapen"):
            client.push_adapter((config, {name: tensor[:1] for name, tensor in tensors.items()}), "p")
        assert rollouts(client, "p") == after
        listed = client.served_weights()["adapters"]
        assert [(one["lora_name"], one["lora_path"], one["lora_version"]) for one in listed] == [
            ("d", str(paths[0]), None),
            ("p", None, "4"),
        ]


def test_an_adapter_under_the_models_own_name(server: Served, paths: list[Path]) -> None:
    with Client(server.url) as client:
        plain = rollouts(client, None)
        result = client.push_adapter(contents(paths[0]), version="v1")
        assert (result.weight_version, result.lora_version) == ("v1", "v1") and result.epoch > 0
        assert rollouts(client, None) != plain
        client.unload_lora_adapter(result.lora_name)
        assert rollouts(client, None) == plain


def test_an_adapter_in_shared_memory(server: Served, paths: list[Path]) -> None:
    config, tensors = contents(paths[1])
    with Client(server.url) as client:
        client.load_lora_adapter("d", paths[1])
        opened = client.control("/start_weight_update", {"lora_name": "s", "lora_config": config})
        with segment(tensors) as (name, offsets):
            announced = announcement(tensors, segment=name, offsets=offsets)
            client.control("/update_weights", {"update_info": announced, "update_id": opened["update_id"]})
        done = client.control("/finish_weight_update", {"update_id": opened["update_id"], "weight_version": "x"})
        assert done["lora_version"] == "x" and rollouts(client, "s") == rollouts(client, "d")
        client.unload_lora_adapter("s")


def test_sglangs_adapters_from_tensors(server: Served, paths: list[Path]) -> None:
    config, tensors = contents(paths[2])
    route = "/load_lora_adapter_from_tensors"
    with Client(server.url) as client:
        client.load_lora_adapter("d", paths[2])
        body = {"lora_name": "g", "config_dict": config}
        reply = client.control(route, body | {"serialized_tensors": b64encode(save(tensors)).decode()})
        assert reply["success"] is True and reply["loaded_adapters"]["g"] == "__tensor__"
        expected = rollouts(client, "d")
        assert rollouts(client, "g") == expected
        client.unload_lora_adapter("g")
        content, metadata = b"", []
        for name, tensor in tensors.items():
            raw = tensor.numpy().tobytes()
            entry = {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype), "start_idx": len(content)}
            metadata.append(entry | {"end_idx": len(content) + len(raw), "numel": tensor.numel()})
            content += raw
        bucket = {"flattened_tensor": b64encode(content).decode(), "metadata": metadata}
        client.control(route, body | {"serialized_named_tensors": bucket, "load_format": "flattened_bucket"})
        assert rollouts(client, "g") == expected
        client.unload_lora_adapter("g")
        for serialized, match in (
            (b64encode(pickle.dumps([1])).decode(), "is a pickle"),
            ("%", "not base64"),
            (b64encode(save(tensors)[:-1]).decode(), "truncated|ends before"),
        ):
            with pytest.raises(ServerError, match=match):
                client.control(route, body | {"serialized_tensors": serialized})
        assert "g" not in client.models()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("-dp", "2"), ("-tp", "2"), ("-pp", "2")], ids=" ".join)
def test_engines_and_ranks_take_the_same_adapter(layout: tuple[str, str], base: Path, paths: list[Path]) -> None:
    with (
        ServerThread(str(base), "--tokens-only", "--enable-lora", "--max-model-len", "256", *layout) as running,
        Client(running.url) as client,
    ):
        config, tensors = contents(paths[0])
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        next(iter(changed.values())).view(-1)[:3] += 1.0
        client.load_lora_adapter("d", paths[0])
        client.push_adapter((config, tensors), "p", "1", delta=True)
        assert rollouts(client, "p") == rollouts(client, "d")
        assert client.push_adapter((config, changed), "p", "2", delta=True).mode == "delta"
        after = rollouts(client, "p")
        broken = changed | {next(iter(changed)): torch.full_like(next(iter(changed.values())), float("inf"))}
        with pytest.raises(ServerError, match="not finite"):
            client.push_adapter((config, broken), "p")
        assert rollouts(client, "p") == after != rollouts(client, "d")
        client.push_adapter((config, tensors), "p", "3")
        assert rollouts(client, "p") == rollouts(client, "d")
