"""Groups that other libraries' trainers make: torch.distributed's own, and the id that vLLM sends."""

from __future__ import annotations

import base64
import pickle
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore, distributed_c10d

from tokserve.rl import TransferError, broadcast
from tokserve.rl.broadcast import TransferGroup
from tokserve.rl.rendezvous import Meeting, Rendezvous, nccl_id

# pickle.dumps(ncclUniqueId()) of vLLM 0.32.0, with byte i of the id being 7 i mod 127
RECORDED = base64.b64decode(
    "gASV7AAAAAAAAACMB19jdHlwZXOUjAlfdW5waWNrbGWUk5SMNHZsbG0uZGlzdHJpYnV0ZWQuZGV2aWNlX2NvbW11bmljYXRvcnMucHluY2NsX3dy"
    "YXBwZXKUjAxuY2NsVW5pcXVlSWSUk5R9lEOAAAcOFRwjKjE4P0ZNVFtiaXB3fgYNFBsiKTA3PkVMU1phaG92fQUMExohKC82PURLUllgZ251fAQL"
    "EhkgJy41PENKUVhfZm10ewMKERgfJi00O0JJUFdeZWxzegIJEBceJSwzOkFIT1ZdZGtyeQEIDxYdJCsyOUBHTlVcY2pxeACUhpSGlFKULg=="
)


def listening() -> TCPStore:
    """Rank 0's end of a rendezvous of two, on a free port."""
    return TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=60), wait_for_workers=False)


def torch_group(store: TCPStore, name: str) -> Any:
    """Rank 0 of a second group of torch.distributed, as AReaL, SGLang and OpenRLHF make theirs."""
    group, _ = distributed_c10d._new_process_group_helper(
        2, 0, [], "gloo", distributed.PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=60)
    )
    return group


def test_a_group_of_torch() -> None:
    store, tensors = listening(), [torch.randn(5, 3), torch.randn(7).bfloat16()]

    def send() -> None:
        group = torch_group(store, "weights")
        for tensor in tensors:
            group.broadcast(tensor, 0).wait()

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    group = TransferGroup("gloo", "127.0.0.1", store.port, 1, 2, 60, rendezvous=Rendezvous("torch", "weights"))
    declared = [("a", torch.float32, (5, 3)), ("b", torch.bfloat16, (7,))]
    received = [tensor.clone() for _, tensor in broadcast.receive_tensors(group, declared, packed=False)]
    sending.join(60)
    assert all(torch.equal(one, other) for one, other in zip(tensors, received, strict=True))
    group.close()


def test_the_id_of_vllm_is_read_and_not_unpickled() -> None:
    assert nccl_id(RECORDED) == bytes(i * 7 % 127 for i in range(128))


class Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"no pickle",
        RECORDED[:100],
        b"\x80\x04" + b"0" * (1 << 17),
        pickle.dumps(b"x" * 127),
        pickle.dumps([b"x" * 128] * 2 + [b"y" * 128]),
        pickle.dumps(Evil()),
        pickle.dumps("x" * 128),
        pickle.dumps([b"x" * 128, *range(1 << 16)]),
    ],
    ids=range(9),
)
def test_what_is_no_id_is_refused(pickled: bytes) -> None:
    with pytest.raises(TransferError, match="no NCCL id"):
        nccl_id(pickled)


def test_the_store_of_vllm_has_the_id_where_torch_looks_for_it() -> None:
    first = listening()
    first.set("broadcast_from/0/0", RECORDED)
    meeting = Meeting("127.0.0.1", first.port, 1, 2, timedelta(seconds=60))
    store = Rendezvous("vllm").store(meeting, "cuda", threading.Event())
    assert store.get("0") == nccl_id(RECORDED)
