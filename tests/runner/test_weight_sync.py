"""Weights that come while the runner serves: from disk, shared memory, a byte stream and a process group.

What a commit serves afterwards is compared bit for bit with a runner that was started with the new weights.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from tests.ports import free_port
from tests.runner.drive import Driver, Job, feature
from tests.tiers import slow_except
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import Conflict, Forbidden, RequestError, TransferFailed
from tokserve.config import Config
from tokserve.features.weights.runner_feature import RunnerUpdates
from tokserve.models import weights
from tokserve.models.formats import is_finite
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DeviceFacts
from tokserve.rl import broadcast, checksums
from tokserve.rl.errors import TransferError
from tokserve.runner.runner import Runner
from tokserve.runner.startup import load_runner

Tensors = dict[str, Tensor]


def start(directory: Path, **options: Any) -> tuple[Runner, DeviceFacts]:
    config = Config.make(
        model=str(directory), max_model_len=64, max_num_seqs=4, device="cpu", block_size=16, cpu_threads=1,
        **{"dtype": "float32", "weight_transfer_timeout": 120, **options},
    )  # fmt: skip
    return load_runner(config)


def outcome(runner: Runner, facts: DeviceFacts) -> Any:
    """Tokens and logprobs of one request."""
    params = SamplingParams(max_tokens=8, logprobs=3, prompt_logprobs=1)
    return Driver(runner, facts, 4).run([Job([3, 1, 4, 1, 5, 9, 2, 6], params)])[0].outcome()


class Bench:
    """Checkpoints of two sets of weights, and what runners started with each give."""

    def __init__(self, directory: Path, family: str) -> None:
        hf = tiny_config(family)
        self.old = write_checkpoint(directory / "old", hf, seed=1)
        self.new = write_checkpoint(directory / "new", hf, seed=2, shards=2)
        self.tensors: Tensors = {}
        for file in sorted(self.new.glob("*.safetensors")):
            self.tensors |= load_file(file)
        self.want_old = outcome(*start(self.old))
        self.want_new = outcome(*start(self.new))
        assert self.want_old != self.want_new


@pytest.fixture(scope="module", params=slow_except(["qwen3", "llama", "gemma3_text"], "gemma3_text"))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """qwen3 is tied and has norms of queries and keys, llama neither; gemma3_text stores norms without their offset."""
    return Bench(tmp_path_factory.mktemp("weights"), request.param)


def by_disk(runner: Runner, tensors: Tensors, key: str = "weight_dir") -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_file(tensors, Path(directory) / "model.safetensors")
        runner.background("receive_update", {"source": {key: directory}})


def by_path(runner: Runner, tensors: Tensors) -> None:
    """Load the weights from a directory that is named as vLLM's disk engine names it."""
    by_disk(runner, tensors, "path")


def by_stream(runner: Runner, tensors: Tensors) -> None:
    packed = save(tensors)
    for size in (1, 7, 100, 5000):  # pieces end anywhere
        feed(runner, packed[:size])
        packed = packed[size:]
    feed(runner, packed, last=True)


def feed(runner: Runner, chunk: bytes, **changes: Any) -> None:
    args = {"stream": "s", "chunk": chunk, "last": False, "broken": False} | changes
    runner.background("feed_update", args)


def announcement(tensors: Tensors, **more: Any) -> dict[str, Any]:
    dtypes = [str(tensor.dtype) for tensor in tensors.values()]  # with the prefix that trainers may send
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    return {"names": list(tensors), "dtype_names": dtypes, "shapes": shapes} | more


def by_shared_memory(runner: Runner, tensors: Tensors) -> None:
    with segment(tensors) as (name, offsets):
        source = announcement(tensors, segment=name, offsets=offsets)
        runner.background("receive_update", {"source": source})


class segment:
    """A shared memory segment with these tensors, for as long as the block lasts."""

    def __init__(self, tensors: Tensors) -> None:
        self._path = Path("/dev/shm") / f"tokserve-test-{secrets.token_hex(8)}"
        self._offsets: list[int] = []
        packed = bytearray()
        for tensor in tensors.values():
            packed += bytes(-len(packed) % 8)
            self._offsets.append(len(packed))
            packed += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        self._path.write_bytes(packed)

    def __enter__(self) -> tuple[str, list[int]]:
        return self._path.name, self._offsets

    def __exit__(self, *_: object) -> None:
        os.unlink(self._path)


class Trainer:
    """Rank 0 of a group, in a thread; `send` tensors when told."""

    def __init__(self, runner: Runner, backend: str = "gloo", **more: Any) -> None:
        port = free_port()
        self.group: broadcast.TransferGroup | None = None
        self._thread = threading.Thread(target=self._join, args=(backend, port), daemon=True)
        self._thread.start()
        options = {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": backend,
            **more,
        }  # fmt: skip
        assert runner.background("init_weight_transfer", {"options": options})["backend"] == backend
        self._thread.join()

    def _join(self, backend: str, port: int) -> None:
        self.group = broadcast.TransferGroup(backend, "127.0.0.1", port, 0, 2, 120)

    def send(self, tensors: Iterator[Tensor] | list[Tensor], **options: Any) -> threading.Thread:
        assert self.group is not None
        thread = threading.Thread(target=self._send, args=(self.group, tensors, options), daemon=True)
        thread.start()
        return thread

    def _send(self, group: broadcast.TransferGroup, tensors: Any, options: dict[str, Any]) -> None:
        try:
            broadcast.send(group, tensors, **options)
        except TransferError:
            return

    def die(self) -> None:
        assert self.group is not None
        self.group.close()


def by_gloo(runner: Runner, tensors: Tensors, packed: bool = False, limit: int = 1 << 30) -> None:
    trainer = Trainer(runner)
    sending = trainer.send(list(tensors.values()), packed=packed, buffer_bytes=limit)
    source = announcement(tensors, packed=packed, packed_buffer_size_bytes=limit)
    runner.background("receive_update", {"source": source})
    sending.join()
    trainer.die()
    group = feature(runner, RunnerUpdates).sync._group
    assert runner.background("shutdown_weight_transfer", {}) == {"message": "Weight transfer shut down"}
    assert group is not None
    with pytest.raises(TransferError, match="is broken"):
        broadcast.send(group, list(tensors.values()), packed=False)


def by_packed_gloo(runner: Runner, tensors: Tensors) -> None:
    by_gloo(runner, tensors, packed=True, limit=20_000)


WAYS = [by_disk, by_path, by_stream, by_shared_memory, by_gloo, by_packed_gloo]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_commit_serves_what_a_start_with_the_new_weights_serves(
    bench: Bench, way: Callable[[Runner, Tensors], None]
) -> None:
    runner, facts = start(bench.old)
    before = runner.background("checksums", {})
    assert runner.background("begin_update", {"have_weights": True}) is True
    way(runner, bench.tensors)
    runner.background("finish_update", {})
    assert outcome(runner, facts) == bench.want_old  # until the commit
    assert runner.background("checksums", {}) == before
    runner.call("commit_update", {})
    assert outcome(runner, facts) == bench.want_new
    assert feature(runner, RunnerUpdates).sync._old is not None
    runner.background("forget_weights", {})
    assert feature(runner, RunnerUpdates).sync._old is None
    after, (other, _) = runner.background("checksums", {}), start(bench.new)
    assert after != before and after == other.background("checksums", {})


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("way", [by_stream, by_shared_memory, by_packed_gloo], ids=lambda way: way.__name__)
def test_pushed_weights_have_the_checksums_that_the_trainer_has(
    bench: Bench, way: Callable[[Runner, Tensors], None], options: dict[str, Any]
) -> None:
    runner, _ = start(bench.old, **options)
    at_start = runner.background("checkpoint_checksums", {})
    sent = {
        name: tensor.to(torch.float64 if "norm" in name else torch.float16) for name, tensor in bench.tensors.items()
    }
    runner.background("begin_update", {"have_weights": True})
    way(runner, sent)
    runner.background("finish_update", {})
    assert runner.background("checkpoint_checksums", {}) == at_start  # until the commit
    runner.call("commit_update", {})
    actual = runner.background("checkpoint_checksums", {})
    expected = checksums(sent)
    assert {name: actual["checkpoint"][name] for name in expected} == expected
    assert actual["checkpoint"].keys() - expected.keys() <= actual["tied"].keys()


def test_checksums_of_a_directory_and_without_any(bench: Bench) -> None:
    runner, _ = start(bench.old, weight_checksums=False)
    expected = checksums(bench.tensors)
    for way in (lambda: runner.background("receive_update", {"source": {"weight_dir": str(bench.new)}}),
                lambda: by_stream(runner, bench.tensors)):  # fmt: skip
        runner.background("begin_update", {"have_weights": True})
        way()
        runner.background("finish_update", {})
        runner.call("commit_update", {})
        if expected:
            actual = runner.background("checkpoint_checksums", {})["checkpoint"]
            assert {name: actual[name] for name in expected} == expected
            expected = {}
            continue
        with pytest.raises(Conflict, match="--no-weight-checksums"):
            runner.background("checkpoint_checksums", {})


def faulty(bench: Bench, name: str, change: Callable[[Tensor], Tensor] | None) -> Tensors:
    tensors = dict(bench.tensors)
    old = tensors.pop(name)
    return tensors if change is None else tensors | {name: change(old)}


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
FAULTS: dict[str, tuple[Callable[[Bench], Tensors], str]] = {
    "unknown": (lambda b: b.tensors | {"model.extra": torch.zeros(3)}, "1 unexpected: model.extra"),
    "shape": (lambda b: faulty(b, DOWN, lambda t: t[:, :-1].contiguous()), f"1 misshapen: {DOWN} .expected"),
    "dtype": (lambda b: faulty(b, NORM, lambda t: t.to(torch.int8)), f"{NORM}|int8"),
    "missing": (lambda b: faulty(b, DOWN, None), f"not complete: 1 missing: {DOWN}"),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("way", [by_stream, by_shared_memory], ids=lambda way: way.__name__)
def test_tensors_that_do_not_fit_are_named_and_nothing_changes(bench: Bench, way: Any, kind: str) -> None:
    make, message = FAULTS[kind]
    runner, facts = start(bench.old)
    runner.background("begin_update", {"have_weights": True})
    with pytest.raises(RequestError, match=message):
        way(runner, make(bench))
        runner.background("finish_update", {})
    assert outcome(runner, facts) == bench.want_old
    with pytest.raises(Conflict):
        runner.background("finish_update", {})
    assert runner.background("begin_update", {"have_weights": True})
    by_stream(runner, bench.tensors)
    runner.background("finish_update", {})
    runner.call("commit_update", {})
    assert outcome(runner, facts) == bench.want_new


@pytest.mark.parametrize(
    ("way", "value"), [*((way, float("nan")) for way in WAYS), (by_stream, float("inf")), (by_stream, -float("inf"))]
)
def test_weights_that_are_not_finite_are_named_and_nothing_changes(bench: Bench, way: Any, value: float) -> None:
    runner, facts = start(bench.old)
    tensors = faulty(bench, DOWN, lambda t: t.clone().index_fill_(1, torch.tensor([3]), value))
    runner.background("begin_update", {"have_weights": True})
    way(runner, tensors)
    with pytest.raises(RequestError, match=f"{DOWN} is not finite in float32") as caught:
        runner.background("finish_update", {})
    assert caught.value.code == "weights_not_finite"
    assert outcome(runner, facts) == bench.want_old


def test_all_weights_that_are_not_finite_are_named_up_to_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_NAMED", 3)
    runner, _ = start(bench.old)
    names = sorted(bench.tensors)
    tensors = {name: bench.tensors[name] * (float("nan") if name in names[:5] else 1) for name in names}
    runner.background("begin_update", {"have_weights": True})
    by_stream(runner, tensors)
    with pytest.raises(RequestError, match="are not finite") as caught:
        runner.background("finish_update", {})
    assert all(name in caught.value.message for name in names[:3]) and "and 2 more" in caught.value.message


def test_nonfinite_weights_are_accepted_if_checks_are_off(bench: Bench) -> None:
    runner, _ = start(bench.old, check_weights="off")
    runner.background("begin_update", {"have_weights": True})
    by_stream(runner, faulty(bench, DOWN, lambda t: t * float("nan")))
    runner.background("finish_update", {})


def test_weights_that_leave_the_range_of_the_servers_dtype_are_not_finite() -> None:
    big = torch.tensor([1.0, 7e4])
    assert is_finite(big, torch.float32) and not is_finite(big, torch.float16)
    assert is_finite(torch.tensor([]), torch.float32)
    eighths = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    assert is_finite(eighths, torch.bfloat16)
    assert not is_finite(torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn), torch.bfloat16)


def test_the_same_weights_are_recognised(bench: Bench) -> None:
    runner, facts = start(bench.old)
    assert outcome(runner, facts) == bench.want_old
    for directory, same in ((bench.old, True), (bench.new, False)):
        runner.background("begin_update", {"have_weights": True})
        by_stream(runner, {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()})
        runner.background("finish_update", {})
        assert runner.background("is_same_update", {}) is same
        runner.background("abort_update", {})


def test_a_truncated_or_overlong_body_is_refused(bench: Bench) -> None:
    packed = save(bench.tensors)
    runner, _ = start(bench.old)
    for body, changes, message in (
        (packed[:-10], {"last": True}, "truncated"),
        (packed[:5], {"last": True}, "truncated"),
        (packed[:-10], {"broken": True}, "client closed the connection"),
        (packed + b"x", {"last": True}, "bytes after its last tensor"),
        (b"\0" * 100, {}, "not a safetensors file"),
        (b"\x08" + b"\0" * 7 + b"not json", {}, "cannot be read"),
    ):
        runner.background("begin_update", {"have_weights": True})
        with pytest.raises(RequestError, match=message):
            feed(runner, body, **changes)
        with pytest.raises(Conflict, match="no weight update is open"):
            runner.background("finish_update", {})


def test_a_header_that_contradicts_itself_is_refused(bench: Bench) -> None:
    runner, _ = start(bench.old)
    good = {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}
    for entry in (
        good | {"data_offsets": [4, 260]},
        good | {"data_offsets": [0, 255]},
        good | {"shape": [-64]},
        good | {"dtype": "F8_E4M3"},
        good | {"shape": 64},
        {},
        [],
    ):
        header = json.dumps({NORM: entry}).encode()
        runner.background("begin_update", {"have_weights": True})
        with pytest.raises(RequestError):
            feed(runner, len(header).to_bytes(8, "little") + header + bytes(256), last=True)


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b'{"\\ud800": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}',
     b'{"x": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 256]}}',
     b'{"x": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 256]}}',
     b'{"x": {"dtype": "F32", "shape": [' + b"9" * 4000 + b'], "data_offsets": [0, 256]}}', b"null", b"{}x"],
    ids=["deep", "surrogate", "infinite", "nan", "huge", "null", "more"],
)  # fmt: skip
def test_a_hostile_header_is_refused_with_valid_utf8(bench: Bench, header: bytes) -> None:
    runner, _ = start(bench.old)
    runner.background("begin_update", {"have_weights": True})
    with pytest.raises(RequestError) as caught:
        feed(runner, len(header).to_bytes(8, "little") + header, last=True)
    assert caught.value.message.encode()


DYING = """
import os, sys
from safetensors.torch import load_file
from tokserve.rl import broadcast
group = broadcast.TransferGroup("gloo", "127.0.0.1", int(sys.argv[1]), 0, 2, 120)
broadcast.send(group, list(load_file(sys.argv[2]).values())[:5], packed=False)
os._exit(1)
"""


def test_a_dead_trainer_loses_only_its_update(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "llama")
    runner, facts = start(bench.old)
    port, file = free_port(), tmp_path / "all.safetensors"
    save_file(bench.tensors, file)
    with subprocess.Popen([sys.executable, "-c", DYING, str(port), str(file)]):
        options = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        runner.background("init_weight_transfer", {"options": options | {"backend": "gloo"}})
        runner.background("begin_update", {"have_weights": True})
        with pytest.raises(TransferFailed, match="has gone"):
            runner.background("receive_update", {"source": announcement(load_file(file))})
    assert outcome(runner, facts) == bench.want_old
    runner.background("begin_update", {"have_weights": True})
    with pytest.raises(TransferFailed, match="initialise"):
        runner.background("receive_update", {"source": announcement(bench.tensors)})
    runner.background("begin_update", {"have_weights": True})
    by_gloo(runner, bench.tensors)  # with a new group
    runner.background("finish_update", {})
    runner.call("commit_update", {})
    assert outcome(runner, facts) == bench.want_new


def test_an_interrupt_ends_a_transfer_whose_sender_is_silent(bench: Bench) -> None:
    runner, _ = start(bench.old)
    trainer = Trainer(runner)
    runner.background("begin_update", {"have_weights": True})
    failures: list[RequestError] = []

    def receive() -> None:
        try:
            runner.background("receive_update", {"source": announcement(bench.tensors)})
        except RequestError as error:
            failures.append(error)

    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    runner.interrupt()
    receiving.join(120)
    assert [str(error) for error in failures] == ["the transfer was interrupted"]
    trainer.die()


def test_an_interrupt_ends_the_wait_for_a_trainer_that_does_not_come(bench: Bench) -> None:
    runner, facts = start(bench.old)
    options = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    failures: list[RequestError] = []

    def meet() -> None:
        try:
            runner.background("init_weight_transfer", {"options": options | {"backend": "gloo"}})
        except TransferFailed as error:
            failures.append(error)

    meeting = threading.Thread(target=meet, daemon=True)
    meeting.start()
    for _ in range(2000):
        runner.interrupt()  # it may not have begun to wait
        meeting.join(0.01)
    assert [str(error) for error in failures] == ["the transfer was interrupted"]
    runner.background("begin_update", {"have_weights": True})
    by_gloo(runner, bench.tensors)  # another trainer is met
    runner.background("abort_update", {})
    assert outcome(runner, facts) == bench.want_old


def test_an_interrupt_counts_while_the_trainer_is_looked_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = start(bench.old, weight_transfer_timeout=20)

    def look_up(name: str) -> str:
        runner.interrupt()
        return "127.0.0.1"

    monkeypatch.setattr("tokserve.features.weights.weight_sync.socket.gethostbyname", look_up)
    options = {"master_address": "trainer", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    with pytest.raises(TransferFailed, match=r"^the transfer was interrupted$"):
        runner.background("init_weight_transfer", {"options": options | {"backend": "gloo"}})


def test_a_directory_that_is_written_again_has_another_stamp(bench: Bench, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "latest", tiny_config("llama"), seed=3)
    file = directory / "model.safetensors"
    runner, _ = start(bench.old)
    stamps = []
    for nanoseconds in (10**18, 10**18, 10**18 + 1):
        os.utime(file, ns=(nanoseconds, nanoseconds))
        runner.background("begin_update", {"have_weights": True})
        stamps.append(runner.background("receive_update", {"source": {"weight_dir": str(directory)}}))
        runner.background("abort_update", {})
    assert isinstance(stamps[0], str) and stamps[0] == stamps[1] != stamps[2]


def test_directories_are_checked(bench: Bench, tmp_path: Path) -> None:
    runner, facts = start(bench.old, allowed_weight_dirs=[str(bench.new.parent)])
    broken = write_checkpoint(bench.new.parent / "broken", tiny_config("llama"), seed=3)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (bench.new.parent / "link").unlink(missing_ok=True)
    (bench.new.parent / "link").symlink_to(tmp_path)
    linked = bench.new.parent / "linked"
    linked.mkdir(exist_ok=True)
    outside = write_checkpoint(tmp_path / "outside", tiny_config("llama"), seed=4)
    (linked / "model.safetensors").unlink(missing_ok=True)
    (linked / "model.safetensors").symlink_to(outside / "model.safetensors")
    parts = bench.new.parent / "parts"
    parts.mkdir(exist_ok=True)
    (parts / "a.safetensors").unlink(missing_ok=True)
    (parts / "a.safetensors").symlink_to(outside / "model.safetensors")
    (parts / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "a.safetensors"}}')
    for directory, kind, message in (
        (linked, Forbidden, "model.safetensors of .* is a link out of --allowed-weight-dirs"),
        (parts, Forbidden, "a.safetensors of .* is a link out of --allowed-weight-dirs"),
        (bench.new.parent / "absent", RequestError, "no directory"),
        ("", RequestError, "must not be empty"),
        (broken, RequestError, "not a complete safetensors file"),
        (tmp_path, Forbidden, "allowed-weight-dirs"),
        (bench.new.parent / "link", Forbidden, "allowed-weight-dirs"),
        (bench.new / ".." / ".." / "..", Forbidden, "allowed-weight-dirs"),
        (bench.new.parent / "a\0b", RequestError, "not a path"),
        (bench.new.parent / "\ud800", RequestError, "not a path"),
    ):
        for field in ("weight_dir", "path"):
            runner.background("begin_update", {"have_weights": True})
            with pytest.raises(kind, match=message) as refusal:
                runner.background("receive_update", {"source": {field: str(directory)}})
            assert refusal.value.field == field
    assert outcome(runner, facts) == bench.want_old


@pytest.mark.parametrize(
    "change",
    [{"segment": "absent-segment"}, {"segment": "../etc"}, {"segment": "a\0b"}, {"segment": "\ud800"},
     {"segment": ".."}, {"segment": ""},
     {"offsets": [0, 0]}, {"offsets": [1]}, {"offsets": None}, {"shapes": []}, {"shapes": [[-64]]},
     {"dtype_names": ["int4"]}, {"surprise": 1}, {"names": [1]}, {"ipc_handles": []}],
    ids=str,
)  # fmt: skip
def test_announcements_are_checked(bench: Bench, change: dict[str, Any]) -> None:
    runner, _ = start(bench.old)
    one = {NORM: bench.tensors[NORM]}
    runner.background("begin_update", {"have_weights": True})
    with segment(one) as (name, offsets), pytest.raises(RequestError) as caught:
        source = announcement(one, segment=name, offsets=offsets) | change
        runner.background("receive_update", {"source": source})
    assert (caught.value.field or "").startswith("update_info")


@pytest.mark.parametrize(
    ("options", "field"),
    [({"backend": "carrier-pigeon"}, "backend"), ({"master_address": "127.0.0.1", "master_port": 1}, "master_address"),
     ({"backend": "gloo", "master_address": "127.0.0.1"}, "master_port"),
     ({"backend": "gloo", "master_address": "127.0.0.1", "master_port": "1"}, "master_port"),
     ({"backend": "gloo", "master_address": "127.0.0.1", "master_port": 0, "rank_offset": 1, "world_size": 2},
      "master_port"),
     ({"backend": "gloo", "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 2, "world_size": 2},
      "rank_offset"),
     ({"backend": "gloo", "master_address": "a" * 64, "master_port": 1, "rank_offset": 1, "world_size": 2},
      "master_address"),
     ({"backend": "gloo", "master_address": "a\0", "master_port": 1, "rank_offset": 1, "world_size": 2},
      "master_address")],
    ids=str,
)  # fmt: skip
def test_a_meeting_that_cannot_come_about_is_refused(bench: Bench, options: dict[str, Any], field: str) -> None:
    runner, _ = start(bench.old)
    with pytest.raises(RequestError) as caught:
        runner.background("init_weight_transfer", {"options": options})
    assert caught.value.field == f"init_info.{field}"


def test_a_trainer_that_has_no_address_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fail)
    runner, _ = start(bench.old)
    options = {"backend": "gloo", "master_address": "trainer.invalid", "master_port": 1, "rank_offset": 1}
    with pytest.raises(RequestError, match="service not known") as caught:
        runner.background("init_weight_transfer", {"options": options | {"world_size": 2}})
    assert caught.value.field == "init_info.master_address"


def test_without_a_group_the_transfer_is_ready_at_once(bench: Bench) -> None:
    runner, _ = start(bench.old)
    assert runner.background("init_weight_transfer", {"options": {}})["backend"] == "disk"
    runner.background("begin_update", {"have_weights": True})
    with pytest.raises(Conflict, match="call init_weight_transfer_engine first"):
        runner.background("receive_update", {"source": announcement(bench.tensors)})
    for source in ({"weight_dir": 5}, {"weight_dir": str(bench.new), "names": []}):
        runner.background("begin_update", {"have_weights": True})
        with pytest.raises(RequestError, match="the only field") as caught:
            runner.background("receive_update", {"source": source})
        assert caught.value.field == "weight_dir"


def test_bodies_come_one_after_the_other_and_whole(bench: Bench) -> None:
    runner, facts = start(bench.old)
    packed = save(bench.tensors)
    runner.background("begin_update", {"have_weights": True})
    feed(runner, packed[:100])
    with pytest.raises(Conflict, match="of another request"):
        feed(runner, packed, stream="t", last=True)
    with pytest.raises(Conflict, match="still coming"):
        runner.background("finish_update", {})
    with pytest.raises(Conflict, match="no weight update is open"):
        feed(runner, packed[100:], last=True)
    assert outcome(runner, facts) == bench.want_old


def test_the_packing_may_be_agreed_on_at_the_meeting(bench: Bench) -> None:
    """vLLM's newer trainers agree on it there; an announcement with those fields overrides it."""
    runner, facts = start(bench.old, weight_transfer_config={"backend": "gloo", "packed_buffer_size_bytes": 30_000})
    trainer = Trainer(runner, packed=True, packed_num_buffers=2)
    runner.background("begin_update", {"have_weights": True})
    half = len(bench.tensors) // 2
    for names, packed, more in (
        (list(bench.tensors)[:half], True, {}), (list(bench.tensors)[half:], False, {"packed": False}),
    ):  # fmt: skip
        part = {name: bench.tensors[name] for name in names}
        sending = trainer.send(list(part.values()), packed=packed, buffer_bytes=30_000)
        runner.background("receive_update", {"source": announcement(part, is_checkpoint_format=True, **more)})
        sending.join()
    runner.background("finish_update", {})
    runner.call("commit_update", {})
    assert outcome(runner, facts) == bench.want_new
    trainer.die()


def test_memory_is_given_back_and_comes_again(bench: Bench) -> None:
    runner, facts = start(bench.old)
    runner.call("release", {"tags": ["kv_cache", "weights"]})
    assert runner.background("begin_update", {"have_weights": False}) is True
    by_stream(runner, bench.tensors)
    runner.background("finish_update", {})
    runner.call("commit_update", {})
    runner.call("restore", {"tags": ["kv_cache"]})
    assert outcome(runner, facts) == bench.want_new


def test_begin_update_returns_whether_weights_are_staged(bench: Bench) -> None:
    runner, _ = start(bench.old, weight_staging="in_place")
    assert runner.background("begin_update", {"have_weights": True}) is False
    assert runner.background("begin_update", {"have_weights": False}) is True


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "qwen3")
    runner, facts = start(bench.old)
    head, embedding = "lm_head.weight", bench.tensors["model.embed_tokens.weight"]
    for value, fits in ((embedding, True), (embedding + 1, False)):
        for order in (1, -1):
            tensors = dict(list((bench.tensors | {head: value}).items())[::order])
            runner.background("begin_update", {"have_weights": True})
            for name, tensor in tensors.items():
                feed(runner, save({name: tensor}), stream=name, last=True)
            if fits:
                runner.background("finish_update", {})
                runner.call("commit_update", {})
                assert outcome(runner, facts) == bench.want_new
            else:
                with pytest.raises(RequestError, match="ties them"):
                    runner.background("finish_update", {})


def test_packing_follows_the_rule() -> None:
    rule = broadcast.batches([3, 3, 3, 10, 1], lambda size: size, 5)
    assert list(rule) == [[3, 3], [3, 10], [1]]
    assert list(broadcast.batches([], lambda size: size, 5)) == []
    assert np.prod([]) == 1  # a scalar has one element


@pytest.mark.parametrize("length", [32, 128])
def test_a_sender_that_sends_another_size_fails_the_update(bench: Bench, length: int) -> None:
    runner, facts = start(bench.old)
    trainer = Trainer(runner)
    runner.background("begin_update", {"have_weights": True})
    sending = trainer.send([torch.zeros(length)], packed=False)
    with pytest.raises(TransferFailed, match="256 were announced"):
        runner.background("receive_update", {"source": announcement({NORM: bench.tensors[NORM]})})
    runner.background("shutdown_weight_transfer", {})
    sending.join()
    assert outcome(runner, facts) == bench.want_old
    trainer.die()
