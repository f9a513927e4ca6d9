"""Weights by CUDA IPC on a real GPU: a trainer's tensors are the server's, to the bit (scripts/gpu_check.sh)."""

from __future__ import annotations

import pytest

from tests import needs
from tests.e2e.server import Server
from tests.e2e.test_cuda_ipc import changed, refusal, results, serves, shared, trainer
from tests.replies import good

pytestmark = [
    pytest.mark.gpu,
    needs.GPU.skips(),
]


def test_weights_come_by_handles_and_wrong_ones_harm_nothing() -> None:
    with Server("demo", "--device", "cuda", "--gpu-memory-utilization", "0.3") as server:
        (result,) = results(trainer({}, server.url, 1.125))
        assert (result["version"], result["mode"]) == ("1.125", "full") and serves(server, 1.125)
        with shared({}, server) as (_, update):
            ((_, entry),) = update["ipc_handles"][0].items()
            for wrong, field in (
                ({"handle": "ab" * 64}, "handle"),
                ({"size": entry["size"] + (1 << 30)}, "size"),
            ):
                status, param, _ = refusal(server, changed(update, **wrong))
                assert status == 400 and param == f"update_info.ipc_handles.{field}"
            good(server.post("/start_weight_update", {}))
            good(server.post("/update_weights", {"update_info": update}))
            good(server.post("/finish_weight_update", {}))
            assert serves(server, 1.5)
        assert server.generate([5, 6, 7], max_tokens=4)["exact"] is True
