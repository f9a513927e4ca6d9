"""Exchanges of ranks as one of them sees them, in Triton's interpreter: what the other has written is there already.

`tests/executor/test_peers.py` has ranks that are processes.
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from tokserve.gpu.kernels.ranks.exchange import BLOCK, Inboxes, header_bytes, inbox_bytes  # noqa: E402
from tokserve.gpu.peers import PeerGroup, PeerMemory, PeersUnavailable  # noqa: E402
from tokserve.rl.cuda_driver import CudaError  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs two GPUs"),
]
PROGRAMS, SIZE = 2, 2


class Memory:
    """The memory of one of two ranks, and its parts."""

    def __init__(self) -> None:
        size, header = inbox_bytes(SIZE, PROGRAMS, BLOCK), header_bytes(SIZE, PROGRAMS)
        self._bytes = torch.zeros(size // 16 + 1, 2, dtype=torch.int64)  # torch aligns it
        flat = self._bytes.view(-1).view(torch.uint8)
        self.address = self._bytes.data_ptr()
        self.counters = flat[: 8 * PROGRAMS].view(torch.int64)
        self.flags = flat[8 * PROGRAMS : header].view(torch.int64).view(PROGRAMS, SIZE)
        self.slots = flat[header:size].view(torch.float32).view(2, SIZE, PROGRAMS, BLOCK)


def group(local: Memory, other: Memory, rank: int) -> PeerGroup:
    addresses = [local.address, other.address] if rank == 0 else [other.address, local.address]
    return PeerGroup(Inboxes(rank, SIZE, torch.tensor(addresses), PROGRAMS, BLOCK))


def test_a_rank_writes_to_the_other_and_adds_in_rank_order() -> None:
    generator = torch.Generator().manual_seed(0)
    for rank in range(SIZE):
        local, other = Memory(), Memory()
        joined = group(local, other, rank)
        for epoch, columns in enumerate((1500, 7, 2000), start=1):
            parts = [torch.randn(1, columns, generator=generator) * 10.0 ** (3 * turn) for turn in range(SIZE)]
            programs = 1 if columns <= BLOCK else 2
            remote = torch.zeros(programs * BLOCK)
            remote[:columns] = parts[1 - rank]
            sets = (local.counters[:programs] + 1) % 2
            for program, odd in enumerate(sets.tolist()):
                local.slots[odd, 1 - rank, program] = remote[program * BLOCK : (program + 1) * BLOCK]
            local.flags[:programs, 1 - rank] = local.counters[:programs] + 1
            assert torch.equal(joined.add(parts[rank]), parts[0] + parts[1])
            written = [other.slots[odd, rank, program] for program, odd in enumerate(sets.tolist())]
            assert torch.equal(torch.cat(written)[:columns], parts[rank][0])
            assert local.counters[0] == epoch and other.flags[0, rank] == epoch
        assert local.counters[1] == 2 and other.flags[1, rank] == 2  # the second program had nothing to do once
        assert not other.counters.any()


def test_logits_reach_rank_0_alone_and_copies_all_others() -> None:
    parts = [torch.arange(6.0).view(2, 3), 10 + torch.arange(6.0).view(2, 3)]
    for rank in range(SIZE):
        local, other = Memory(), Memory()
        joined = group(local, other, rank)
        local.slots[1, 1 - rank, 0, :6] = parts[1 - rank].view(-1)
        local.flags[0, 1 - rank] = 2  # of this exchange, and of the next
        beside = joined.gather(parts[rank])
        assert torch.equal(beside, torch.cat(parts, 1) if rank == 0 else torch.empty(2, 0))
        assert torch.equal(other.slots[1, 1, 0, :6], parts[1].view(-1)) is (rank == 1)
        local.slots[0, 0, 0, :3] = torch.tensor([5.0, 6.0, 7.0])
        tensor = torch.tensor([5.0, 6.0, 7.0]) if rank == 0 else torch.zeros(3)
        assert joined.copy(tensor, 0).tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("remote", "reason"),
    [
        ('{"machine": "elsewhere", "handle": "00"}', "rank 1 is on another machine"),
        ('{"machine": "here", "handle": "", "reason": "no driver"}', "rank 0: no driver"),
        ('{"machine": "here", "handle": "00"}', "the memory of rank 1 cannot be mapped: peer access"),
    ],
)
def test_memory_that_cannot_be_mapped_is_refused(remote: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        def __init__(self, driver: object, number: int) -> None: ...
        def allocate(self, num_bytes: int) -> int:
            return 4096

        def copy(self, target: int, source: int, num_bytes: int) -> None: ...
        def export(self, address: int) -> bytes:
            return bytes(64)

        def open(self, handle: bytes) -> int:
            raise CudaError("peer access")

        def free(self, address: int) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr("tokserve.gpu.peers.DeviceContext", Context)
    monkeypatch.setattr("tokserve.gpu.peers.load_driver", lambda: None)
    monkeypatch.setattr("tokserve.gpu.peers.machine_id", lambda: "here")
    values = {"pair/memory/1": remote.encode(), "pair/memory/failure/1": b""}
    memory = PeerMemory(torch.device("cpu"), 0, values.__setitem__, values.__getitem__)
    with pytest.raises(PeersUnavailable, match=reason):
        memory.join("pair", [0, 1], programs=PROGRAMS, capacity=BLOCK)
    memory.close()
