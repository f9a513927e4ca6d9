"""The calls that `device.Cuda` makes to torch, in order.  The GPU is a fake that records the calls."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tokserve.base.errors import StartError
from tokserve.runner import device


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self) -> None:
        self._cuda.calls.append(("record", id(self)))

    def synchronize(self) -> None:
        self._cuda.calls.append(("wait", id(self)))

    def query(self) -> bool:
        return self._cuda.is_idle


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def wait_stream(self, other: object) -> None:
        self._cuda.calls.append(("wait_stream", other))
        self._cuda.waits.append((self, other))


class FakeCuda:
    """The part of torch.cuda that is used.  `calls` lists the calls."""

    capability = (9, 0)

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.pools = 0
        self.is_idle = False
        self.main = FakeStream(self)
        self.waits: list[tuple[object, object]] = []

    def __getattr__(self, name: str) -> Any:
        plain = {
            "is_available": True,
            "get_device_capability": self.capability,
            "get_device_name": "fake",
            "current_device": 0,
            "current_stream": self.main,
        }
        return lambda *_: plain[name]

    def Stream(self) -> FakeStream:
        return FakeStream(self)

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def stream(self, stream: FakeStream) -> Any:
        self.calls.append(("on", stream))
        return nullcontext()

    def set_device(self, device: object) -> None:
        self.calls.append(("set_device", device))

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache", None))

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def CUDAGraph(self) -> Any:
        class Graph:
            replay = staticmethod(lambda: self.calls.append(("replay", None)))

        return Graph()

    def graph(self, graph: object, **options: object) -> Any:
        self.calls.append(("graph", options))
        return nullcontext()


class FakeTorch:
    """torch with ordinary memory as pinned memory and the CPU as GPU."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: object) -> torch.device:
        return torch.device("cpu")

    def empty(self, *shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return torch.empty(*shape, **options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    torch_with_gpu = FakeTorch()
    monkeypatch.setattr(device, "torch", torch_with_gpu)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: torch_with_gpu.cuda.calls.append(("keep", stream))
    )
    return torch_with_gpu


def test_a_staging_buffer_is_filled_again_only_when_its_copy_is_done(fake: FakeTorch) -> None:
    gpu, most = device.Cuda(), device.NUM_BUFFERS
    for _ in range(2 * most + 1):
        gpu.put([np.arange(3)])
    calls = fake.cuda.calls
    assert [what for what, _ in calls] == ["record"] * most + ["wait", "record"] * (most + 1)
    events = [event for what, event in calls if what == "record"]
    assert [event for what, event in calls if what == "wait"] == events[most:]  # its own event, each time
    assert events[:most] == events[most:-1] and len(set(events)) == most


def test_a_step_with_many_copies_waits_for_none_of_its_own(fake: FakeTorch) -> None:
    gpu = device.Cuda()
    for copy in range(50):
        fake.cuda.is_idle = copy >= 10  # the first ten are under way at once
        gpu.put([np.arange(3)])
    waits = [event for what, event in fake.cuda.calls if what == "wait"]
    assert len(set(waits)) == len(gpu._buffers) == 10  # only for copies that are done


def test_a_larger_step_gets_a_larger_buffer(fake: FakeTorch) -> None:
    gpu = device.Cuda()
    for size in (10, 1 << 17, 10, 1 << 18):
        assert gpu.put([np.arange(size)])[0].tolist() == list(range(size))


def test_a_device_copy_waits_for_earlier_work_and_keeps_its_tensors(fake: FakeTorch) -> None:
    gpu = device.Cuda()
    leaving = gpu.fetch([torch.arange(3), torch.zeros(0)])
    assert [what for what, _ in fake.cuda.calls] == ["wait_stream", "on", "keep", "keep", "record"]
    assert fake.cuda.calls[0][1] is fake.cuda.main
    assert [array.tolist() for array in leaving.arrays()] == [[0, 1, 2], []]
    assert fake.cuda.calls[-1] == ("wait", fake.cuda.calls[-2][1])


def test_a_step_runs_once_before_it_is_recorded_in_a_pool_of_its_time(fake: FakeTorch) -> None:
    gpu = device.Cuda()
    runs: list[int] = []

    def run() -> torch.Tensor:
        runs.append(len(fake.cuda.calls))
        return torch.tensor(len(runs))

    first, second = gpu.pool(), gpu.pool()
    assert first != second
    replay = gpu.capture(run, first)
    assert runs == [0, 1] and fake.cuda.calls == [("graph", {"pool": first, "capture_error_mode": "thread_local"})]
    assert replay().item() == 2 and fake.cuda.calls[-1] == ("replay", None) and len(runs) == 2


def test_memory_is_given_back_but_not_while_a_step_is_recorded(fake: FakeTorch) -> None:
    gpu = device.Cuda()
    gpu.give_back_memory()
    assert fake.cuda.calls == [("empty_cache", None)]
    threads: list[threading.Thread] = []

    def run() -> torch.Tensor:
        if fake.cuda.calls[-1][0] == "graph":
            threads.append(threading.Thread(target=gpu.give_back_memory))
            threads[0].start()
            assert not gpu._capturing.acquire(blocking=False)  # nor can the thread
            fake.cuda.calls.append(("recorded", None))
        return torch.tensor(0)

    gpu.capture(run, None)
    threads[0].join()
    assert [what for what, _ in fake.cuda.calls[1:]] == ["graph", "recorded", "empty_cache"]


def test_weights_come_on_a_stream_of_their_own_that_steps_join(fake: FakeTorch) -> None:
    gpu, main = device.Cuda(), fake.cuda.main
    with gpu.beside():
        assert [what for what, _ in fake.cuda.calls] == ["set_device", "wait_stream", "on"]
        side = fake.cuda.calls[-1][1]
    assert side is not main and fake.cuda.waits == [(side, main)]  # steps wait for nothing
    gpu.join()
    assert fake.cuda.waits[1:] == [(main, side), (side, main)]


def test_an_old_gpu_is_refused(fake: FakeTorch) -> None:
    fake.cuda.capability = (7, 5)
    with pytest.raises(StartError, match=r"fake is older than compute capability 8\.0"):
        device.Cuda()
