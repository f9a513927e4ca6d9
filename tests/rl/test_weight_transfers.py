"""Pushes of the trainer's client against scripted answers: how failed updates end."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

from tests.rl.distribution import rl
from tests.rl.scripted_http import OK, Answer, bodies, connected, refusal, run
from tokserve.rl import TransferError, WeightsError, push
from tokserve.rl.broadcast import TransferGroup, batches
from tokserve.rl.delta_directory import WeightDirectory, chain, files_of
from tokserve.rl.deltas import DeltaReader, difference, file_pieces
from tokserve.rl.push import PushedWeights, ServerTensors

WEIGHTS = [("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]
START, PUT, FINISH, ABORT = "/start_weight_update", "/update_weights", "/finish_weight_update", "/abort_weight_update"


def test_a_group_that_the_server_refuses_does_not_keep_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    others_came, formed = threading.Event(), threading.Event()

    def group(*_: Any) -> None:
        others_came.wait(60)
        formed.set()

    monkeypatch.setattr("tokserve.rl.group_channel.TransferGroup", group)
    script: dict[str, list[Answer]] = {"/init_weight_transfer_engine": [refusal(409)]}
    try:
        _, error = run(script, lambda client: client.join("gloo", "127.0.0.1", 1))
        assert isinstance(error, rl.ServerError) and error.status == 409 and not formed.is_set()
    finally:
        others_came.set()
    assert formed.wait(60)


def test_a_group_that_the_server_refuses_gives_its_port_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script: dict[str, list[Answer]] = {"/init_weight_transfer_engine": [refusal(409)]}
    _, error = run(script, lambda client: client.join("gloo", "127.0.0.1", port, timeout=600.0))
    assert isinstance(error, rl.ServerError) and error.status == 409
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_unknown_backend_is_refused_before_any_other_rank_is_met() -> None:
    with pytest.raises(WeightsError, match="backend must be one of gloo, nccl, got 'mpi'"):
        TransferGroup("mpi", "127.0.0.1", 1, 0, 2, 1.0)


@pytest.mark.parametrize(
    ("script", "sent"),
    [
        ({}, [START, PUT, FINISH]),
        ({START: [refusal(409)]}, [START]),  # another trainer's update is open: it must not be aborted
        ({START: [httpx.ConnectError("refused")]}, [START]),
        ({START: [httpx.ReadError("cut")]}, [START, ABORT]),  # the answer may have been lost
        ({PUT: [refusal(400)]}, [START, PUT, ABORT]),
        ({PUT: [httpx.ReadError("cut")]}, [START, PUT, ABORT]),
        ({FINISH: [refusal(400)]}, [START, PUT, FINISH, ABORT]),
        ({FINISH: [refusal(400)], ABORT: [refusal(409)]}, [START, PUT, FINISH, ABORT]),
    ],
    ids=str,
)
def test_an_update_is_never_left_open_and_never_sent_twice(script: dict[str, list[Answer]], sent: list[str]) -> None:
    actual, result = run(dict(script), lambda client: client.update_weights(WEIGHTS))
    assert actual == sent
    assert (result == {"weight_version": "7", "epoch": 7}) is (not script)


def test_weights_are_sent_as_a_safetensors_file_float8_as_it_is() -> None:
    tensors = {"a": torch.randn(5, 3).to(torch.float8_e4m3fn), "b": torch.randn(5, 1), "c": torch.ones(3).bfloat16()}

    actual = load(b"".join(file_pieces(tensors)))
    assert actual.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name].float(), tensor.float())


class DeafGroup:
    """A process group whose other rank never joins."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert self.interrupted.wait(60), "no process ends the broadcast"
        raise TransferError("the transfer was interrupted")

    def interrupt(self) -> None:
        self.interrupted.set()


@pytest.mark.parametrize("failure", [refusal(400), httpx.ReadError("cut")], ids=["refused", "cut"])
def test_sending_stops_if_the_server_stops_receiving(failure: Answer) -> None:
    group = DeafGroup()

    async def push(client: rl.AsyncClient) -> None:
        client._channel._group = group  # type: ignore[assignment]
        try:
            await client.update_weights(WEIGHTS)
        finally:
            assert client._channel._group is None and group.interrupted.is_set()

    sent, error = run({"/update_weights": [failure]}, push)
    assert sent == ["/start_weight_update", "/update_weights", "/abort_weight_update"]
    assert isinstance(error, rl.ServerError | httpx.ReadError)


def test_the_first_update_and_the_first_pause_take_over() -> None:
    async def use(client: rl.AsyncClient) -> None:
        for _ in range(2):
            await client.pause("keep")
            await client.update_weights(dict(WEIGHTS))

    sent = bodies({}, use)
    assert [body.get("take_over") for path, body in sent if path == START] == [True, None]
    assert [body.get("take_over") for path, body in sent if path == "/pause"] == [True, None]
    assert all("take_over" not in body for path, body in bodies({}, use, take_over=False) if body is not None)


def test_calls_of_an_update_have_its_id() -> None:
    started = httpx.Response(200, json={"update_id": "u1"})

    async def use(client: rl.AsyncClient) -> None:
        await client.update_weights(torch.nn.Linear(2, 3), recompute_kv=True)
        with pytest.raises(rl.ServerError):
            await client.update_weights(WEIGHTS)
        await client.abort_weight_update()

    sent = bodies({START: [started], FINISH: [OK, refusal(400)]}, use)
    assert [path for path, _ in sent] == [START, f"{PUT}?update_id=u1", FINISH] * 2 + [ABORT] * 2
    assert sent[2][1] == {"weight_version": None, "recompute_kv": True, "update_id": "u1"}
    assert sent[6][1] == {"update_id": "u1"} and sent[7][1] == {}


def test_what_are_no_weights_is_refused_before_anything_is_sent() -> None:
    async def use(client: rl.AsyncClient) -> None:
        for wrong in ({"a": 1}, ["a"], 5, "a", torch.ones(2), [("a", "b")]):
            with pytest.raises(TypeError, match=r"weights are a module, a mapping or pairs|is no tensor"):
                await client.update_weights(wrong)  # type: ignore[arg-type]

    assert bodies({}, use) == []


class CardWork:
    """Work of NCCL: its future is complete when it is enqueued, it itself after so many questions."""

    def __init__(self, questions: float) -> None:
        self.questions = questions
        self.waited = False

    def get_future(self) -> Any:
        raise AssertionError("the future says nothing")

    def is_completed(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def wait(self) -> None:
        assert self.is_completed(), "the stream waits, and all that follows in it"
        self.waited = True


class CardGroup:
    """A process group of NCCL."""

    def __init__(self, work: CardWork) -> None:
        self.work, self.aborted = work, False

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> CardWork:
        return self.work

    def abort(self) -> None:
        self.aborted = True


def card_group(work: CardWork, timeout: float) -> tuple[TransferGroup, CardGroup]:
    group, fake = TransferGroup.__new__(TransferGroup), CardGroup(work)
    group._group, group._backend, group._timeout = fake, "nccl", timeout
    group._interrupted, group._broken, group._announces_sizes = threading.Event(), False, False
    return group, fake


def test_a_transfer_between_gpus_ends_with_its_event() -> None:
    group, fake = card_group(CardWork(5), 60)
    group.broadcast(torch.zeros(1))
    assert fake.work.waited and not fake.aborted and not group._broken


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_transfer_between_gpus_can_be_ended(interrupted: bool) -> None:
    group, fake = card_group(CardWork(float("inf")), 60 if interrupted else 0)
    if interrupted:
        threading.Timer(0.01, group.interrupt).start()
    with pytest.raises(TransferError, match="interrupted" if interrupted else "silent"):
        group.broadcast(torch.zeros(1))
    assert fake.aborted and not fake.work.waited
    with pytest.raises(TransferError, match="broken"):
        group.broadcast(torch.zeros(1))


def described(weights: dict[str, torch.Tensor]) -> httpx.Response:
    """A server's reply about its tensors."""
    tensors = {name: ["float32", list(tensor.shape)] for name, tensor in weights.items()}
    return httpx.Response(200, json={"tensors": tensors, "tied": {}, "renames": [], "delta_refusal": None})


@pytest.mark.parametrize(("size", "changed"), [(40, 10), (5000, 1250)])
def test_a_tensor_is_whole_from_a_quarter_of_changed_elements_on(size: int, changed: int) -> None:
    for count, is_whole in ((changed - 1, False), (changed, True)):
        delta, _ = difference(torch.zeros(size), torch.arange(size).lt(count).float()) or (None, 0)
        assert (
            delta is not None
            and (delta.indices is None) is is_whole
            and delta.num_changed == (size if is_whole else count)
        )


def test_elements_of_a_delta_have_the_dtype_of_their_tensor() -> None:
    steps = ("a#steps", (2,), torch.uint8)
    for parts in ([("a", (8,), torch.float16)], [steps, ("a#values", (2,), torch.float16)]):
        with pytest.raises(WeightsError, match="the elements of a must be bfloat16, not float16"):
            DeltaReader({"a": (torch.bfloat16, (8,))}).announce(parts)
        DeltaReader({"a": (torch.float16, (8,))}).announce(parts)


def test_a_tied_tensor_comes_once_or_twice_the_same() -> None:
    described = {"model.embed.weight": (torch.bfloat16, (4, 3))}
    server = ServerTensors(described, {"lm_head.weight": "model.embed.weight"}, [("embed.", "model.embed.")], None)
    weight = torch.randn(4, 3)
    for head in (weight, weight.clone()):
        known, others = server.collected({"embed.weight": weight, "lm_head.weight": head})
        assert known == {"model.embed.weight": weight} and not others
    known, others = server.collected({"lm_head.weight": weight + 1, "embed.weight": weight, "c": weight})
    assert list(known) == ["model.embed.weight"] and sorted(others) == ["c", "embed.weight"]


def test_a_buffer_ends_with_the_tensor_that_brings_it_above_the_limit() -> None:
    """The rule is vLLM's: both ends must agree on it."""
    assert list(batches([4, 4, 1, 9, 2, 7], int, 8)) == [[4, 4, 1], [9], [2, 7]]
    assert list(batches([4, 4], int, 8)) == [[4, 4]]


def test_a_push_of_all_weights_is_for_the_server_that_is_there() -> None:
    weights = {"a": torch.tensor([1.0, 1 / 3])}
    served = {"tensors": {"a": ["bfloat16", [2]]}, "tied": {}, "renames": [], "delta_refusal": None}
    replies = [*[described(weights)] * 3, httpx.Response(200, json=served)]  # the first push asks twice
    sent: list[torch.Tensor] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        if request.url.path == PUT:
            sent.append(load(content)["a"])
        return replies.pop(0) if request.url.path == "/weight_info" else OK

    async def steps() -> list[str | None]:
        async with connected(answer) as client:
            return [(await client.push(weights, delta=delta)).reason for delta in (True, False, True)]

    assert asyncio.run(steps())[2] == "nothing was pushed before with delta=True", "what serves is of another push"
    assert not replies and [tensor.dtype for tensor in sent] == [torch.float32, torch.float32, torch.bfloat16]


def test_what_was_pushed_is_kept_without_the_event_loop() -> None:
    """A trainer computes its next step after a push, and the loop stands still meanwhile."""
    weights = {"a": torch.randn(300, 2), "b": torch.randn(5000)}

    async def steps(client: Any) -> list[Any]:
        await client.push(weights, delta=True)
        weights["b"][7] = 3.0
        done = await client.push(weights, delta=True)
        pushed = client._pusher._pushed
        expired = time.monotonic() + 60
        while not pushed.tensors["b"].equal(weights["b"]) and time.monotonic() < expired:
            time.sleep(0.001)
        return [done.mode, done.num_changed, pushed.tensors["b"][7].item()]

    _, result = run({"/weight_info": [described(weights)]}, steps)
    assert result == ["delta", 1, 3.0]


def test_a_push_that_gives_up_waiting_spoils_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, kept, commit = {"a": torch.zeros(300)}, threading.Event(), PushedWeights.commit

    def slowly(*args: Any) -> None:
        assert kept.wait(60)
        commit(*args)

    async def steps(client: Any) -> list[str]:
        await client.push(weights, delta=True)
        weights["a"][7] = 3.0
        await client.push(weights, delta=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.push(weights, delta=True), 0.05)  # until the copy is up to date
        kept.set()
        weights["a"][8] = 3.0
        done = await client.push(weights, delta=True)
        return [done.mode, done.num_changed]

    monkeypatch.setattr(PushedWeights, "commit", slowly)
    _, result = run({"/weight_info": [described(weights)]}, steps)
    assert result == ["delta", 1]


def test_a_version_that_could_not_be_written_is_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.zeros(300)}
    rename = Path.rename

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def steps(client: Any) -> list[str]:
        modes = []
        for version in "0123":
            weights["a"][int(version)] = 3.0
            monkeypatch.setattr(Path, "rename", full if version == "2" else rename)
            try:
                modes.append((await client.push(weights, version, delta=True, directory=tmp_path)).mode)
            except OSError:
                modes.append("failed")
        return modes

    _, result = run({"/weight_info": [described(weights)]}, steps)
    assert result == ["full", "delta", "failed", "full"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000000.full.safetensors",
        "000001.delta.safetensors",
        "000002.full.safetensors",
    ]
    files = files_of(tmp_path)
    assert [file.number for file in chain(files, "3", None)] == [2]


def test_a_directory_is_continued_where_it_ended(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(300)}

    def push(versions: str) -> Any:
        async def steps(client: Any) -> None:
            for version in versions:
                weights["a"][int(version)] = 3.0
                await client.push(weights, version, delta=True, directory=tmp_path, anchor_every=2)

        return run({"/weight_info": [described(weights)]}, steps)

    push("01234")
    assert WeightDirectory(tmp_path).prune() == [
        "000000.full.safetensors",
        "000001.delta.safetensors",
        "000002.delta.safetensors",
        "000002.full.safetensors",
        "000003.delta.safetensors",
    ]
    push("5")  # another trainer begins with a full file
    assert [(file.number, file.identity[0], file.base is None) for file in files_of(tmp_path)] == [
        (4, "4", False),
        (4, "4", True),
        (5, "5", True),
    ]


def test_a_version_can_be_pushed_again(tmp_path: Path) -> None:
    """The trainer has not heard whether its push was a success."""
    weights = {"a": torch.zeros(300)}

    async def steps(client: Any) -> None:
        for version in "0112":
            weights["a"][int(version)] = 3.0
            await client.push(weights, version, delta=True, directory=tmp_path)

    run({"/weight_info": [described(weights)]}, steps)
    files = files_of(tmp_path)
    assert [file.number for file in chain(files, "1", None)] == [0, 1]
    assert [file.number for file in chain(files, "2", files[0].identity)] == [1, 3]


def test_a_part_is_sent_while_other_tensors_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.zeros(40), "b": torch.zeros(30), "c": torch.zeros(20)}
    described = {name: (torch.float32, tuple(tensor.shape)) for name, tensor in weights.items()}
    pushed = PushedWeights.of(ServerTensors(described, {}, [], None), weights)
    first_sent, compare = threading.Event(), push.difference

    def waiting(old: torch.Tensor, new: torch.Tensor) -> Any:
        if len(old) < 40:
            assert first_sent.wait(60)
        return compare(old, new)

    monkeypatch.setattr(push, "difference", waiting)
    monkeypatch.setattr(push, "PART_BYTES", 1)
    changed = {name: tensor.index_fill(0, torch.tensor([3]), 1.0) for name, tensor in weights.items()}
    parts = pushed.parts(changed, dict(pushed.sums))
    size, pieces = push.file_of(next(parts), pushed.label_of_part("1"))
    assert len(b"".join(pieces)) == size
    first_sent.set()
    assert {name for part in parts for name in part} == {"b", "c"}
