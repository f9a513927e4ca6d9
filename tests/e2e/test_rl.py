"""A trainer with a real server: the frameworks' control sequences, and weights that really change.

After each update the replies must be, bit for bit, those of a server that was started with the new weights.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.e2e.server import Served, Server
from tests.ports import free_port
from tests.threads import ServerThread
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient, broadcast, checksums

PROMPT = [286, 84, 82, 68, 81, 198, 16, 10, 16, 287, 198, 286, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198]
FIXED = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
FLAGS = ("--weight-transfer-config", '{"backend": "gloo"}', "--weight-transfer-timeout", "120")
Tensors = dict[str, torch.Tensor]


def variant(directory: Path, seed: int) -> Path:
    """The demo model with weights changed a little; the tokenizer and all else as it is."""
    target = directory / f"weights-{seed}"
    shutil.copytree(DEMO_DIR, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(DEMO_DIR / "model.safetensors")
    changed = {
        name: (t.float() * (1 + 0.05 * torch.randn(t.shape, generator=generator))).to(t.dtype)
        for name, t in tensors.items()
    }
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


@dataclass
class Lab:
    """A server whose weights change, and what servers started with the first and second variant answer."""

    server: Server
    directories: list[Path]
    wants: list[Any]

    def tensors(self, number: int) -> Tensors:
        return load_file(self.directories[number] / "model.safetensors")

    def post(self, path: str, body: Any = None, **kwargs: Any) -> Any:
        answer = httpx.post(self.server.url + path, json=body, timeout=600, **kwargs)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()

    def serves(self, number: int) -> bool:
        return outcome(self.server) == self.wants[number]

    def state(self) -> dict[str, Any]:
        actual: dict[str, Any] = self.server.get("/inference/v1/state").json()
        return actual


def outcome(server: Served) -> Any:
    reply = server.generate(PROMPT, **FIXED)
    choice = reply["choices"][0]
    return choice["token_ids"], choice["logprobs"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("rl")
    directories = [variant(directory, seed) for seed in (1, 2)]
    wants = []
    with ServerThread(directories[1]) as other:
        wants.append(outcome(other))
    with Server(directories[0], *FLAGS, "--allowed-weight-dirs", str(directory)) as server:
        wants.insert(0, outcome(server))
        assert wants[0] != wants[1]
        yield Lab(server, directories, wants)


@pytest.fixture(autouse=True)
def first_weights(lab: Lab) -> None:
    """Each test begins with the first weights and goes on, whatever came before it."""
    lab.post("/resume")
    if not lab.serves(0):
        lab.post("/update_weights", {"weight_dir": str(lab.directories[0])})


@pytest.mark.slow
def test_prime_rl(lab: Lab) -> None:
    """Pause (keep), update_weights with a directory, resume; broadcaster and version as it asks for them."""
    lab.post("/update_weights", {"weight_dir": str(lab.directories[0])})
    epoch = lab.state()["epoch"]
    lab.post("/pause?mode=keep&clear_cache=false")
    assert lab.server.get("/is_paused").json() == {"is_paused": True} and lab.state()["state"] == "paused"
    assert lab.server.post("/init_broadcaster", {"host": "127.0.0.1", "port": 29501}).status_code == 400
    lab.post("/update_weights", {"weight_dir": str(lab.directories[1])})
    assert lab.post("/resume") == {"status": "resumed"}
    assert lab.state()["epoch"] == epoch + 1 and lab.serves(1)
    first = lab.server.generate(PROMPT, **FIXED)
    assert first["choices"][0]["weight_versions"] == [{"version": str(epoch + 1), "start": 0, "end": 24}]
    lab.post("/update_weights", {"weight_dir": str(lab.directories[0])})
    reply = lab.server.generate(PROMPT, **FIXED)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and lab.serves(0)
    refused = lab.server.post("/update_weights", {"weight_dir": "/tmp"})
    assert refused.status_code == 403 and lab.serves(0)


def announcement(tensors: Tensors) -> dict[str, Any]:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    return {"names": list(tensors), "dtype_names": dtypes, "shapes": [list(t.shape) for t in tensors.values()]}


def test_trl(lab: Lab) -> None:
    """init, start, update (packed broadcast beside it), finish, reset_prefix_cache; rollouts by completions."""
    world = lab.server.get("/get_world_size").json()["world_size"] + 1
    port, groups = free_port(), []
    joining = threading.Thread(
        target=lambda: groups.append(broadcast.TransferGroup("gloo", "127.0.0.1", port, 0, world, 120)), daemon=True
    )
    joining.start()
    options = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world}
    lab.post("/init_weight_transfer_engine", {"init_info": options})
    joining.join()
    tensors = lab.tensors(1)
    lab.post("/start_weight_update", {"is_checkpoint_format": True})
    sending = threading.Thread(target=lambda: broadcast.send(groups[0], tensors.values(), packed=True), daemon=True)
    sending.start()
    lab.post("/update_weights", {"update_info": announcement(tensors) | {"packed": True}})
    sending.join()
    done = lab.post("/finish_weight_update", {"weight_version": "trl-1"})
    assert done["weight_version"] == "trl-1"
    assert lab.post("/reset_prefix_cache") == {"success": True}
    assert lab.serves(1) and lab.server.get("/weight_info").json()["weight_version"] == "trl-1"
    rollout = {
        "prompt": [[1, 2, 3], [4, 5]],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "n": 2,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 4,
        "logprobs": 0,
    }
    assert len(lab.post("/v1/completions", rollout)["choices"]) == 4
    lab.post("/shutdown_weight_transfer_engine")


@pytest.mark.slow
def test_skyrl(lab: Lab) -> None:
    """Pause, sleep, wake the weights, push them, wake the cache, reset with a JSON body, resume."""
    lab.post("/pause?mode=keep")
    lab.post("/sleep", {"level": 2, "tags": ["weights", "kv_cache"]})
    assert lab.server.get("/is_sleeping").json() == {"is_sleeping": True} and lab.state()["state"] == "sleeping"
    assert lab.server.post("/wake_up", None).status_code == 409
    lab.post("/wake_up?tags=weights")
    lab.post("/start_weight_update")
    body = save(lab.tensors(0))
    answer = httpx.post(
        lab.server.url + "/update_weights",
        content=body,
        headers={"Content-Type": "application/octet-stream"},
        timeout=600,
    )
    assert answer.status_code == 200, answer.text
    lab.post("/finish_weight_update")
    lab.post("/wake_up?tags=kv_cache")
    assert lab.post("/reset_prefix_cache", {"reset_running_requests": False}) == {"success": True}
    assert lab.state()["state"] == "paused"
    lab.post("/resume")
    assert lab.serves(0)
    assert lab.server.post("/collective_rpc", {"method": "x"}).status_code == 403


@pytest.mark.slow
def test_areal(lab: Lab) -> None:
    """The pause aborts; the client resumes with the tokens it received, and that request waits until the resume."""
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, "seed": 3, "logprobs": 0}
    replies: list[Any] = []

    def ask(body: dict[str, Any]) -> threading.Thread:
        """Send it, and return when the engine has it."""
        asking = threading.Thread(target=lambda: replies.append(lab.post("/v1/completions", body)), daemon=True)
        asking.start()
        while lab.state()["waiting"] == 0:
            assert asking.is_alive()
        return asking

    lab.post("/pause?mode=keep")  # so that the request cannot end before it is aborted
    asking = ask(body)
    lab.post("/areal_pause_generation", {})
    asking.join()
    (choice,) = replies[0]["choices"]
    assert choice["finish_reason"] == "abort" and choice["stop_detail"]["kind"] == "abort_pause"
    again = body | {"prompt": PROMPT + choice["token_ids"], "max_tokens": 40 - len(choice["token_ids"])}
    asking = ask(again)
    assert lab.post("/areal_update_weights", {"model_path": str(lab.directories[1])})["success"] is True
    lab.post("/areal_continue_generation", {})
    asking.join()
    assert len(replies[1]["choices"][0]["token_ids"]) == again["max_tokens"]
    assert lab.serves(1)
    lab.post("/update_weights", {"weight_dir": str(lab.directories[0])})


def test_bad_updates_leave_the_server_as_it_was(lab: Lab) -> None:
    tensors = lab.tensors(1)
    name = "model.norm.weight"
    headers = {"Content-Type": "application/octet-stream"}
    cases: list[tuple[Tensors, int, int, str]] = [
        (tensors | {"x": torch.zeros(2)}, 0, 400, "unexpected: x"),
        (tensors | {name: torch.zeros(3)}, 0, 400, f"misshapen: {name}"),
        (tensors | {name: tensors[name].to(torch.int32)}, 0, 400, "unsupported dtype"),
        (tensors, 100, 400, "truncated"),
        ({k: v for k, v in tensors.items() if k != name}, 0, 400, f"missing: {name}"),
    ]
    for sent, cut, status, message in cases:
        lab.post("/start_weight_update")
        body = save(sent)
        answer = httpx.post(
            lab.server.url + "/update_weights", content=body[: len(body) - cut], headers=headers, timeout=600
        )
        if answer.status_code == 200:
            answer = lab.server.post("/finish_weight_update", {})
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
        assert message in lab.state()["reason"] and lab.serves(0)
        assert lab.server.post("/finish_weight_update", {}).status_code == 409
    lab.post("/start_weight_update")
    assert lab.server.post("/start_weight_update", {}).status_code == 409
    lab.post("/abort_weight_update")
    empty = lab.directories[0].parent / "empty"
    empty.mkdir(exist_ok=True)
    assert lab.server.post("/update_weights", {"weight_dir": str(empty)}).status_code == 400
    assert lab.serves(0)


@pytest.mark.slow
def test_after_recompute_kv_tokens_in_flight_have_the_logprobs_of_the_new_weights(lab: Lab) -> None:
    """They equal, bit for bit, a re-score of prompt and tokens with the new weights."""

    async def across_a_commit(number: int, *, recompute_kv: bool = False, mode: str = "keep") -> list[tuple[Any, Any]]:
        """The logprobs after the commit of a request in flight while weights are pushed, and those of a re-score."""
        async with TokserveClient(lab.server.url) as client:
            sampling = {"max_tokens": 700, "ignore_eos": True, "logprobs_mode": "raw"}
            making = asyncio.ensure_future(client.generate([PROMPT, PROMPT[:9]], seeds=[1, 2], **sampling))
            while True:
                live = (await client.get("/inference/v1/requests"))["requests"]
                if len(live) == 2 and all(request["output_tokens"] > 20 for request in live):
                    break
                assert not making.done()
            async with client.paused(mode):
                await client.update_weights(lab.tensors(number), recompute_kv=recompute_kv)
            pairs = []
            for rollout in await making:
                (_, start, end), (_, after, last) = rollout.weight_versions
                assert start == 0 < end == after < last == 700
                body = {
                    "token_ids": [*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()],
                    "logprobs_format": "arrays",
                    "sampling_params": {
                        "max_tokens": 1,
                        "prompt_logprobs": 0,
                        "logprobs_mode": "raw",
                        "prompt_logprobs_start": len(rollout.prompt_ids) + after,
                    },
                    "cache_salt": secrets.token_hex(8),
                }
                scored = lab.post("/inference/v1/generate", body)["prompt_logprobs"]["token_logprobs"]
                pairs.append((rollout.logprobs[after:].tolist(), np.array(scored, np.float32).tolist()))
            return pairs

    for received, expected in asyncio.run(across_a_commit(1, recompute_kv=True)):
        assert received == expected
    assert lab.serves(1)
    assert any(received != expected for received, expected in asyncio.run(across_a_commit(0)))
    assert lab.serves(0)
    for received, expected in asyncio.run(across_a_commit(1, mode="retract")):
        assert received == expected
    assert any(received != expected for received, expected in asyncio.run(across_a_commit(0)))
    assert lab.serves(0)


def test_a_refused_weight_body_gets_a_reply(lab: Lab) -> None:
    """urllib reads no reply before it has sent everything."""
    lab.state()
    request = urllib.request.Request(
        lab.server.url + "/update_weights", data=bytes(48 << 20), headers={"Content-Type": "application/octet-stream"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=600)
    with refused.value as reply:
        assert reply.code == 409 and "no weight update is open" in json.load(reply)["error"]["message"]
    lab.post("/start_weight_update")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=600)
    with refused.value as reply:
        assert reply.code == 400
    assert lab.state()["state"] == "running"


def test_nccl_without_a_card_is_refused_at_once(lab: Lab) -> None:
    info = {"backend": "nccl", "master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    answer = lab.server.post("/init_weight_transfer_engine", {"init_info": info})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "init_info.backend") and "CUDA" in error["message"]


def test_a_reset_makes_all_weights_random_until_the_next_push(lab: Lab) -> None:
    """vLLM's `reset`; trainers check with it that a push brings all tensors."""
    lab.post("/update_weights", {"weight_dir": str(lab.directories[0])})
    checkpoint, epoch = {"names": "checkpoint"}, lab.state()["epoch"]
    before = lab.post("/weight_checker", checkpoint | {"action": "checksum"})["checkpoint"]
    assert lab.post("/weight_checker", {"action": "reset"}) == {"status": "reset"}
    current = lab.post("/weight_checker", checkpoint | {"action": "checksum"})["checkpoint"]
    assert current.keys() == before.keys() and not any(current[name] == before[name] for name in before)
    assert lab.state()["epoch"] > epoch and lab.state()["state"] == "running"
    lab.post("/start_weight_update")
    answer = lab.server.post("/weight_checker", {"action": "reset"})
    assert answer.status_code == 409, answer.text
    lab.post("/abort_weight_update")
    lab.post("/update_weights", {"weight_dir": str(lab.directories[0])})
    assert lab.post("/weight_checker", checkpoint | {"action": "compare", "baseline": before})["match"] is True


def test_checksums_are_compared(lab: Lab) -> None:
    lab.post("/update_weights", {"weight_dir": str(lab.directories[0])})
    before = lab.post("/weight_checker", {"action": "checksum"})["checksums"]
    assert lab.post("/weight_checker", {"action": "compare", "baseline": before})["match"] is True
    baseline = checksums(lab.tensors(0))
    body = {"action": "compare", "names": "checkpoint"}
    assert lab.post("/weight_checker", body | {"baseline": baseline}) == {"match": True, "mismatches": []}
    assert lab.post("/weight_checker", body | {"baseline": checksums(lab.tensors(1))})["match"] is False


def test_a_sender_that_disconnects_fails_the_update(lab: Lab) -> None:
    lab.post("/start_weight_update")
    body = save(lab.tensors(1))
    address = httpx.URL(lab.server.url)
    with socket.create_connection((address.host, address.port)) as sock:
        head = ("POST /update_weights HTTP/1.1", f"Host: {address.host}", "Content-Type: application/octet-stream")
        sock.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body[: len(body) // 2])
    while lab.state()["state"] == "updating":
        pass
    assert "client closed the connection" in lab.state()["reason"] and lab.serves(0)


@pytest.mark.slow
def test_sleep_gives_memory_back(lab: Lab) -> None:
    process = lab.server.engine()
    fill = {"prompt": [[7 + i % 200] * 400 for i in range(60)], "max_tokens": 1}
    lab.post("/v1/completions", fill)  # touches the cache's pages
    full = resident(process)
    lab.post("/sleep?level=1")
    assert full - resident(process) > 4 << 20
    lab.post("/wake_up")
    assert lab.serves(0)


def resident(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def test_server_info_and_state_of_updates(lab: Lab) -> None:
    assert lab.server.get("/liveness").status_code == 200
    shown = lab.server.get("/server_info?config_format=json").json()
    assert shown["vllm_config"]["weight_transfer_config"] == {"backend": "gloo"}
    assert json.dumps(shown)
    text = lab.server.get("/metrics").text
    assert 'engine_state{engine="0",model_name="' in text and "tokserve:weight_epoch" in text
    assert lab.server.metric("tokserve:generation_tokens_by_age_total") > 0
