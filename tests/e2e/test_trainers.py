"""Weights over a group of torch.distributed, as AReaL's and SGLang's trainers send them: real processes, gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.server import Server
from tests.replies import good
from tests.rl.test_rendezvous import listening, torch_group
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import Client

pytestmark = pytest.mark.slow
PIECES = 3
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("demo", "--dtype", "float32", "--tokens-only", "--sglang-api") as server:
        yield server


class TorchTrainer:
    """Rank 0, which joins while the server does, and broadcasts while it receives."""

    def __init__(self, server: Server, path: str) -> None:
        self.server = server
        store = listening()
        self._name = f"update_weight_group_{store.port}"  # a process may have a name once
        self._joining = threading.Thread(target=self._join, args=(store,), daemon=True)
        self._joining.start()
        rendezvous = {"master_address": "127.0.0.1", "master_port": str(store.port), "rank_offset": 1, "world_size": 2}
        self.post(path, rendezvous | {"backend": "gloo", "group_name": self._name})
        self._joining.join(60)

    def _join(self, store: Any) -> None:
        self._group = torch_group(store, self._name)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, 0).wait()

    def post(self, path: str, body: Any) -> Any:
        return good(self.server.post(path, body))

    def piece(self, tensors: Tensors, announce: Callable[[dict[str, Any]], None]) -> None:
        """Send some tensors."""
        sending = threading.Thread(target=self._send, args=(list(tensors.values()),), daemon=True)
        sending.start()
        announce(
            {
                "names": list(tensors),
                "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
                "group_name": self._name,
            }
        )
        sending.join(60)


def pieces(weights: Tensors) -> list[Tensors]:
    names = sorted(weights)
    return [{name: weights[name] for name in names[first::PIECES]} for first in range(PIECES)]


def test_areal(server: Server) -> None:
    trainer = TorchTrainer(server, "/areal_init_weights_update_group")
    weights = {name: tensor.float() * 1.5 for name, tensor in load_file(DEMO_DIR / "model.safetensors").items()}
    trainer.post("/areal_pause_generation", {})

    def announce(body: dict[str, Any]) -> None:
        trainer.post("/areal_set_update_weight_meta", body)
        trainer.post("/areal_update_weights_xccl", {})

    with Client(server.url) as client:
        for tensors in pieces(weights):
            trainer.piece(tensors, announce)
        assert client.state()["epoch"] == 0
        trainer.post("/areal_continue_generation", {})
        assert (client.state()["epoch"], client.state()["state"]) == (1, "running")
        assert client.compare_weights(weights) == []


def test_sglang(server: Server) -> None:
    trainer = TorchTrainer(server, "/init_weights_update_group")
    weights = {name: tensor.float() * 0.5 for name, tensor in load_file(DEMO_DIR / "model.safetensors").items()}
    trainer.post("/pause_generation", {"mode": "abort"})
    for tensors in pieces(weights):
        trainer.piece(tensors, lambda body: trainer.post("/update_weights_from_distributed", body))
    trainer.post("/continue_generation", {})
    with Client(server.url) as client:
        assert client.compare_weights(weights) == []
