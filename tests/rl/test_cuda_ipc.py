"""The trainer's end of CUDA IPC in one process, with the simulated driver; tests/e2e/test_cuda_ipc.py has both ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_cuda import build
from tokserve.rl import TransferError, cuda_ipc
from tokserve.rl.cuda_driver import CudaDriver, CudaError, DeviceContext
from tokserve.rl.cuda_ipc import FAILED, GOES_ON, NO_MEMORY, ROW, PushingRanks, SharedBuffer, make_pusher


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


def test_a_missing_driver_or_gpu_is_named(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1")
    driver = CudaDriver(str(library))
    with pytest.raises(CudaError, match="there is no GPU 7: this process sees 1"):
        driver.uuid_of(7)
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "0")
    with pytest.raises(CudaError, match=r"cuInit: CUDA_ERROR_NO_DEVICE \(100\)"):
        CudaDriver(str(library))
    for path in (library.with_name("absent.so"), library.parent):
        with pytest.raises(CudaError, match="CUDA IPC needs NVIDIA's driver"):
            CudaDriver(str(path))


def test_a_buffer_grows_and_is_freed(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(str(library))
    monkeypatch.setattr(cuda_ipc, "load_driver", lambda: driver)
    buffer = SharedBuffer(1)
    assert buffer.fill([torch.arange(3), torch.empty(0), torch.ones(70)]) == [0, 256, 256]
    owner, first, size, _ = buffer.row
    assert size == 768 and owner == driver.uuid_of(1).bytes
    assert buffer.fill([torch.zeros(5)]) == [0] and buffer.row[1] == first
    buffer.fill([torch.zeros(2000)])
    assert buffer.row[1] != first and buffer.row[2] == 8192
    context = DeviceContext(driver, 1)
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE"):
        context.open(buffer.row[1])  # of this process
    buffer.close()
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2"):
        context.open(first)
    context.close()
    assert buffer.row == NO_MEMORY


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ROW.pack(FAILED, 0, *NO_MEMORY), "the push of rank 1 failed"),
        (ROW.pack(GOES_ON, 1, *NO_MEMORY), "the ranks push different tensors"),
    ],
)
def test_a_rank_that_fails_or_differs_ends_the_push(
    other: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = PushingRanks(None)
    ranks.size = 2
    calls: list[Any] = []

    def gather(row: bytes) -> list[tuple[Any, ...]]:
        calls.append(row)
        return [ROW.unpack(row), ROW.unpack(other)]

    monkeypatch.setattr(ranks, "_gather", gather)
    with pytest.raises(TransferError, match=message):
        asyncio.run(ranks.meet("start"))
    asyncio.run(ranks.fail())
    assert len(calls) == 1  # the others know
    ranks.begin()
    asyncio.run(ranks.fail())
    assert ROW.unpack(calls[1])[0] == FAILED


def test_other_transports_are_refused() -> None:
    with pytest.raises(ValueError, match="transport is \"cuda_ipc\" or a CudaIpc, got 'nccl'"):
        make_pusher(None, "nccl")  # type: ignore[arg-type]
