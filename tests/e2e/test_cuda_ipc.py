"""Weights through a GPU's memory, between processes: a trainer's buffer, which a server maps and copies.

The driver is simulated (tests/fake_libcuda.c), and everything else is what runs on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import needs
from tests.e2e.ipc_trainer import scaled
from tests.e2e.server import Served, Server
from tests.fake_cuda import build, uuid_of
from tests.ports import free_port
from tests.replies import good
from tokserve.rl import Client

SCRIPT = Path(__file__).with_name("ipc_trainer.py")
HANDLES = "update_info.ipc_handles"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(build(tmp_path_factory.mktemp("driver")).parent)}


@pytest.fixture(scope="module")
def server(driver: dict[str, str]) -> Iterator[Server]:
    with Server("demo", "--device", "cpu", "--tokens-only", env=driver) as server:
        yield server


def trainer(driver: dict[str, str], *args: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    root = {"PYTHONPATH": str(SCRIPT.parents[2])}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | root | driver
    )


def results(*trainers: subprocess.Popen[str]) -> list[dict[str, Any]]:
    outputs = [process.communicate(timeout=600)[0] for process in trainers]
    return [json.loads(output) for output in outputs]


def mapped(server: Server) -> list[str]:
    """Memory of trainers that the server's processes have mapped."""
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    return [line.path for process in processes for line in process.memory_maps() if "fake-cuda" in line.path]


def serves(server: Server, factor: float) -> bool:
    with Client(server.url) as client:
        return client.compare_weights(scaled(factor)) == []


@pytest.mark.slow
def test_a_push_leads_to_the_weights_of_the_trainer_to_the_bit(driver: dict[str, str], server: Server) -> None:
    (result,) = results(trainer(driver, server.url, 1.125))
    num_bytes = sum(tensor.nbytes for tensor in scaled(1.0).values())
    assert result == {"version": "1.125", "mode": "full", "bytes": num_bytes, "segments": []}
    assert serves(server, 1.125) and mapped(server) == []


@pytest.mark.slow
def test_several_ranks_push_together_and_fail_together(driver: dict[str, str], server: Server) -> None:
    for what in ("ranks", "fails"):
        port = free_port()
        pair = results(*(trainer(driver, server.url, what, rank, 2, port) for rank in range(2)))
        if what == "ranks":
            assert [result["version"] for result in pair] == ["1.25", "1.25"], pair
            assert [result["segments"] for result in pair] == [[], []]
        else:
            assert [result["failed"] for result in pair] == ["TransferError", "KeyError"], pair
            assert pair[0]["message"] == "the push of rank 1 failed"
        assert serves(server, 1.25) and mapped(server) == []
    assert server.get("/inference/v1/state").json()["state"] == "running"


@contextmanager
def shared(driver: dict[str, str], server: Server) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A trainer that has exported tensors, and the announcement of them."""
    with trainer(driver, server.url, "share") as process:
        assert process.stdout is not None
        shown = json.loads(process.stdout.readline())
        tensors = scaled(1.5)
        entry = {name: shown[name] for name in ("handle", "size", "pid")}
        yield (
            process,
            {
                "names": list(tensors),
                "dtype_names": [str(tensor.dtype) for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
                "offsets": shown["offsets"],
                "ipc_handles": [{f"GPU-{shown['uuid']}": entry}],
            },
        )
        process.communicate("\n\n", timeout=600)


def changed(announced: dict[str, Any], **allocation: Any) -> dict[str, Any]:
    """The announcement with other values in its handle's entry."""
    ((owner, entry),) = announced["ipc_handles"][0].items()
    return announced | {"ipc_handles": [{owner: entry | allocation}]}


def refusal(server: Served, update: dict[str, Any]) -> tuple[int, str, str]:
    """Status, field and message of an announcement that is refused."""
    good(server.post("/start_weight_update", {}))
    answer = server.post("/update_weights", {"update_info": update})
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


@pytest.mark.slow
def test_what_is_not_as_announced_is_refused_by_its_field(driver: dict[str, str], server: Server) -> None:
    children = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
    with shared(driver, server) as (process, update):
        ((owner, entry),) = update["ipc_handles"][0].items()
        size = entry["size"]
        assert owner == f"GPU-{uuid_of(1)}"
        cases = [
            (changed(update, handle="ab"), f"{HANDLES}.handle", "128 hexadecimal digits"),
            (changed(update, handle="z" * 128), f"{HANDLES}.handle", "128 hexadecimal digits"),
            (changed(update, handle="ab" * 64), f"{HANDLES}.handle", "CUDA_ERROR_INVALID_HANDLE"),
            (changed(update, size=size + 1), f"{HANDLES}.size", f"the memory has {size} bytes"),
            (changed(update, size=0), f"{HANDLES}.size", "number of bytes"),
            (changed(update, size=100), "update_info.offsets", "do not lie in the 100"),
            (changed(update, pid=1 << 30), f"{HANDLES}.pid", "has exited"),
            (changed(update, pid="1"), HANDLES, "int"),
            (update | {"offsets": None}, "update_info.offsets", "an offset for every name"),
            (update | {"offsets": [-1] * len(update["names"])}, "update_info.offsets", "bytes -1 to"),
            (update | {"ipc_handles": []}, HANDLES, "one entry for all names"),
            (update | {"ipc_handles": [{}]}, HANDLES, "no GPU"),
            (update | {"ipc_handles": [{"GPU-0": entry}]}, HANDLES, "not the UUID"),
            (update | {"ipc_handles": [{uuid_of(9): entry}]}, HANDLES, uuid_of(0)),
            (update | {"segment": "s"}, HANDLES, "not both"),
            (update | {"ipc_handles_pickled": "gASV"}, "update_info.ipc_handles_pickled", "unpickled"),
        ]
        if os.geteuid():
            cases.append((changed(update, pid=1), f"{HANDLES}.pid", "another user's"))
        for case, field, message in cases:
            status, param, text = refusal(server, case)
            assert status == 400 and param.startswith(field) and message in text, (param, text)
        of_children = [refusal(server, changed(update, pid=pid, handle="ab" * 64)) for pid in children]
        assert any("own process" in text for _, _, text in of_children)  # the engine is one of them
        assert mapped(server) == []
        assert process.stdin is not None and process.stdout is not None
        good(server.post("/start_weight_update", {}))
        one_each = update | {"ipc_handles": update["ipc_handles"] * len(update["names"])}
        good(server.post("/update_weights", {"update_info": one_each}))
        good(server.post("/finish_weight_update", {"weight_version": "own loop"}))
        assert serves(server, 1.5) and mapped(server) == []
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "freed\n"
        status, param, text = refusal(server, update)
        assert status == 400 and param == f"{HANDLES}.handle" and "has expired" in text
    assert serves(server, 1.5)


def test_a_server_without_a_driver_says_so(tokens_only: Served) -> None:
    entry = {"handle": "ab" * 64, "size": 1 << 30, "pid": 1}
    tensors = scaled(1.0)
    update = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "offsets": [0] * len(tensors),
        "ipc_handles": [{uuid_of(0): entry}],
    }
    status, param, text = refusal(tokens_only, update)
    assert status == 400 and param.startswith(HANDLES)
    assert needs.has_driver() or "segment and offsets" in text


@pytest.mark.slow
def test_server_and_trainer_in_turns(driver: dict[str, str], server: Server) -> None:
    example = SCRIPT.parents[2] / "examples" / "colocated.py"
    command = [sys.executable, str(example), server.url, "cuda_ipc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | driver)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as version step-") == 3 and "rollouts of version step-2;" in done.stdout
    assert mapped(server) == []
