"""What a trainer gives as weights, in every way in which it is sent to a scripted server (rl-faults F1, F5, F9, E2)."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.rl.distribution import rl
from tests.rl.scripted_http import OK, connected, refusal
from tokserve.rl import broadcast, weight_pairs
from tokserve.rl.digests import checksums
from tokserve.rl.weight_pairs import reading, weight_files

Pairs = Iterator[tuple[str, Tensor]]
NAMES = ("a", "b", "c")


def values(step: int) -> dict[str, Tensor]:
    """What has to arrive in a step; little of it changes."""
    weights = {name: torch.arange(400.0) + 1000 * number for number, name in enumerate(NAMES)}
    for number, tensor in enumerate(weights.values()):
        tensor[number + step] = -7.0
    return weights


def merging(step: int) -> Pairs:
    """Merge, and undo it at the end, as TRL walks a model of peft."""
    model = {name: torch.zeros(400) for name in NAMES}
    for name, tensor in model.items():
        tensor += values(step)[name]
    yield from model.items()
    for name, tensor in model.items():
        tensor -= values(step)[name]


def one_buffer(step: int) -> Pairs:
    buffer = torch.empty(400)
    for name, tensor in values(step).items():
        yield name, buffer.copy_(tensor)


def freeing(step: int) -> Pairs:
    """Free each tensor at the end of its turn, as FSDP1 does."""
    for name, tensor in values(step).items():
        yield name, tensor
        tensor.untyped_storage().resize_(0)


class Lazy(Mapping[str, Tensor]):
    """A mapping that reads each tensor into the same memory."""

    def __init__(self, step: int) -> None:
        self._step, self._buffer = step, torch.empty(400)

    def __getitem__(self, name: str) -> Tensor:
        return self._buffer.copy_(values(self._step)[name])

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


SOURCES: dict[str, Callable[[int], Any]] = {
    "merging": merging,
    "one_buffer": one_buffer,
    "freeing": freeing,
    "lazy": Lazy,
    "dict": values,
}


class Server:
    """Records the tensors that come in each body, and the calls."""

    def __init__(self, dtype: str = "float32", **info: Any) -> None:
        tensors = {name: [dtype, [400]] for name in NAMES}
        self.info = {"tensors": tensors, "tied": {}, "renames": [], "delta_refusal": None} | info
        self.files: list[dict[str, Tensor]] = []
        self.announced: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.refuses: dict[str, httpx.Response] = {}

    async def answer(self, request: httpx.Request) -> httpx.Response:
        content, path = await request.aread(), request.url.path
        self.calls.append(path)
        if path in self.refuses:
            return self.refuses.pop(path)
        if path == "/update_weights" and request.headers["content-type"] == "application/octet-stream":
            self.files.append(load(content))
        elif path == "/update_weights" and "update_info" in (body := json.loads(content)):
            self.announced.append(body["update_info"])
        return httpx.Response(200, json=self.info) if path == "/weight_info" else OK

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for file in self.files for name, tensor in file.items()}

    def use(self, use: Callable[[rl.AsyncClient], Any]) -> Any:
        async def scene() -> Any:
            async with connected(self.answer) as client:
                return await use(client)

        return asyncio.run(scene())


class RecordingGroup:
    """A process group that keeps what is sent over it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def broadcast(self, tensor: Tensor) -> None:
        self.sent.append(tensor.clone())

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name].float(), tensor.float()) for name, tensor in expected.items())


@pytest.fixture(params=[1, 1 << 28], ids=["small_parts", "one_part"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(weight_pairs, "PART_BYTES", request.param)
    return 3 if request.param == 1 else 1


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("way", ["update", "push", "llm"])
def test_each_tensor_is_read_before_the_next_one_is_made(source: Callable[[int], Any], way: str, parts: int) -> None:
    server = Server()
    if way == "llm":
        server.files = [load(b"".join(pieces)) for pieces in weight_files(source(0))]
    elif way == "push":
        server.use(lambda client: client.push(source(0)))
    else:
        server.use(lambda client: client.update_weights(source(0)))
    assert_same(server.tensors, values(0))
    assert len(server.files) == parts


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("method", ["update_weights", "push"])
def test_over_a_process_group_too(source: Callable[[int], Any], method: str, parts: int) -> None:
    server, group = Server(), RecordingGroup()

    async def use(client: Any) -> None:
        client._channel._group = group
        await getattr(client, method)(source(0))

    server.use(use)
    assert [name for info in server.announced for name in info["names"]] == list(NAMES) and len(group.sent) == parts
    sent = torch.cat([part.view(torch.uint8).view(torch.float32) for part in group.sent])
    assert torch.equal(sent, torch.cat(list(values(0).values())))


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_sent_over_a_group_directly_is_read_as_it_comes(packed: bool) -> None:
    group: Any = RecordingGroup()
    broadcast.send(group, (tensor for _, tensor in one_buffer(0)), packed=packed)
    sent = torch.cat([part.view(torch.uint8).view(torch.float32) for part in group.sent])
    assert torch.equal(sent, torch.cat(list(values(0).values())))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_deltas_are_of_the_values_when_the_tensor_came(source: Callable[[int], Any]) -> None:
    server = Server("bfloat16")

    async def use(client: Any) -> list[Any]:
        error = {"message": "other weights", "type": "conflict", "param": None, "code": "base_mismatch"}
        done = [await client.push(source(step), str(step), delta=True) for step in range(3)]
        server.refuses["/start_weight_update"] = httpx.Response(409, json={"error": error})
        return [*done, await client.push(source(3), "3", delta=True), await client.push(source(4), "4", delta=True)]

    done = server.use(use)
    assert [one.mode for one in done] == ["full", "delta", "delta", "full", "delta"]
    assert [one.num_changed for one in done] == [1200, 6, 6, 1200, 6]
    full, first, _, again, last = server.files
    rounded = [{name: tensor.bfloat16() for name, tensor in values(step).items()} for step in range(5)]
    assert_same(full, rounded[0])
    assert_same(again, rounded[3])
    for file, step in ((first, 1), (last, 4)):
        assert file["b#values"].tolist() == [rounded[step]["b"][step].item(), -7.0]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_directory_of_versions_has_them_too(source: Callable[[int], Any], tmp_path: Path) -> None:
    async def use(client: Any) -> list[str]:
        push = client.push
        return [
            (await push(source(step), str(step), delta=True, directory=tmp_path, anchor_every=2)).mode
            for step in range(3)
        ]

    assert Server().use(use) == ["full", "delta", "delta"]
    assert_same(load_file(tmp_path / "000000.full.safetensors"), values(0))
    assert_same(load_file(tmp_path / "000002.full.safetensors"), values(2))


def test_what_no_delta_can_change_is_pushed_in_full_from_a_source_that_was_read_once() -> None:
    server = Server()

    async def use(client: Any) -> list[Any]:
        await client.push(merging(0), delta=True)
        more = await client.push(((*pair,) for pair in [*values(1).items(), ("d", torch.ones(2))]), delta=True)
        await client.push(merging(1), delta=True)
        fewer = await client.push((pair for pair in values(2).items() if pair[0] != "b"), delta=True)
        await client.push(merging(2), delta=True)
        return [more, fewer, await client.push(((name, tensor + 1) for name, tensor in values(3).items()), delta=True)]

    reasons = [done.reason for done in server.use(use)]
    assert reasons == [
        "d is none of the tensors that a delta can change",
        "other tensors were pushed before",
        "more than a quarter of the weights changed",
    ]
    full = [file for file in server.files if not any("#" in name for name in file)]
    assert_same(full[1], {"d": torch.ones(2)} | values(1))
    assert_same(full[3], {name: values(2)[name] for name in ("a", "c")})
    assert_same(full[5], {name: tensor + 1 for name, tensor in values(3).items()})


@pytest.mark.parametrize("delta", [False, True])
def test_a_tied_tensor_of_a_generator_comes_once_or_twice_the_same(delta: bool) -> None:
    server = Server(tied={"head": "a"})

    def pairs(step: int, head: float) -> Pairs:
        buffer = torch.empty(400)
        for name, tensor in [*values(step).items(), ("head", values(step)["a"] + head)]:
            yield name, buffer.copy_(tensor)

    async def use(client: Any) -> None:
        for step, head in enumerate([0.0, 0.0, 1.0]):
            await client.push(pairs(step, head), delta=delta)

    server.use(use)
    assert [sorted({name.partition("#")[0] for name in file}) for file in server.files] == [
        ["a", "b", "c"],
        ["a", "b", "c"],
        ["a", "b", "c", "head"],
    ]
    assert torch.equal(server.files[-1]["head"], values(2)["a"] + 1)


@pytest.mark.parametrize("way", ["update", "push", "delta", "group", "llm", "compare"])
def test_a_source_goes_to_its_end_if_the_push_fails(way: str, parts: int) -> None:
    """Else an adapter would stay merged, and the other processes of a gathering would wait for this one."""
    server, ended = Server(), []

    def pairs() -> Pairs:
        yield from values(0).items()
        ended.append(True)

    async def use(client: Any) -> None:
        if way == "group":
            client._channel._group = RecordingGroup()
        path = {"delta": "/weight_info", "compare": "/weight_checker"}.get(way, "/update_weights")
        server.refuses[path] = refusal(400)
        with pytest.raises(rl.ServerError):
            if way == "compare":
                await client.compare_weights(pairs())
            elif way in ("update", "group"):
                await client.update_weights(pairs())
            else:
                await client.push(pairs(), delta=way == "delta")

    if way == "llm":
        files = weight_files(pairs())
        next(files)
        files.close()
    elif way != "delta":
        server.use(use)
    else:  # nothing was read yet
        server.use(use)
        return
    assert ended == [True]


def test_an_error_of_the_source_is_the_callers_and_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_pairs, "PART_BYTES", 1)
    server = Server()

    def broken(after: int) -> Pairs:
        yield from list(values(0).items())[:after]
        raise KeyError("gathering failed")

    async def use(client: Any) -> None:
        for after in (0, 2):
            for call in (client.update_weights, client.push):
                with pytest.raises(KeyError, match="gathering failed"):
                    await call(broken(after))

    server.use(use)
    updates = [path for path in server.calls if path != "/weight_info"]
    assert updates == ["/start_weight_update", *["/update_weights"] * 2, "/abort_weight_update"] * 2


def test_a_source_is_read_in_one_thread_without_gradients() -> None:
    threads = set()

    def pairs() -> Pairs:
        import threading

        with torch.no_grad():  # a setting of the thread
            for name, tensor in values(0).items():
                threads.add(threading.get_ident())
                yield name, tensor.requires_grad_()
        threads.add(threading.get_ident())

    server = Server()
    server.use(lambda client: client.push(pairs()))
    assert len(threads) == 1 and torch.is_grad_enabled()


def test_checksums_are_of_each_tensor_as_it_comes() -> None:
    assert checksums(one_buffer(0)) == checksums(values(0))


class Model(nn.Module):
    """A tied weight, a buffer that belongs to a checkpoint, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.tied = self.inner
        self.register_buffer("bias_of_experts", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


NAMES_OF_MODEL = ["bias_of_experts", "inner.bias", "inner.weight"]


class Compiled(nn.Module):
    """Calls what it wraps as torch.compile does, which takes seconds to load."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def partly_compiled() -> nn.Module:
    model = Model()
    model.inner = Compiled(model.inner)  # type: ignore[assignment]
    model.tied = model.inner
    return model


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "plain": Model,
    "partly_compiled": partly_compiled,
    "data_parallel": lambda: nn.DataParallel(Model()),
    "averaged": lambda: AveragedModel(Model()),
    "both": lambda: nn.DataParallel(Compiled(Model())),
}


@pytest.mark.slow
def test_names_of_a_compiled_module_are_those_of_its_checkpoint() -> None:
    test_names_of_a_module_are_those_of_its_checkpoint(lambda: torch.compile(Model(), backend="eager"))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_names_of_a_module_are_those_of_its_checkpoint(wrap: Callable[[], nn.Module]) -> None:
    module = wrap()
    with reading(module) as pairs:
        assert sorted(dict(pairs)) == NAMES_OF_MODEL
    if not isinstance(module, AveragedModel):
        state = {name: tensor for name, tensor in module.state_dict().items() if "tied" not in name}
        for source in (state, state.items()):
            with reading(source) as pairs:
                assert sorted(dict(pairs)) == NAMES_OF_MODEL


class SplitTensor(Tensor):
    """A tensor that keeps its values in others."""

    @staticmethod
    def __new__(cls) -> SplitTensor:
        split: SplitTensor = Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)  # type: ignore[attr-defined]
        return split

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls() if func is torch.ops.aten.detach.default else NotImplemented


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def partitioned() -> Tensor:
    tensor = nn.Parameter(torch.empty(0))
    tensor.ds_shape = (4,)  # type: ignore[attr-defined]
    return tensor


NO_VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.ones(4, device="meta"), "w is a meta tensor"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "w has the layout sparse_coo"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "w has the layout sparse_csr"),
    "complex": (lambda: torch.ones(4, dtype=torch.complex64), "w has dtype torch.complex64"),
    "bool": (lambda: torch.ones(4, dtype=torch.bool), "w has dtype torch.bool"),
    "split": (SplitTensor, "w is a SplitTensor"),
    "freed": (freed, "w has no memory any more"),
    "partitioned": (partitioned, "w is partitioned by DeepSpeed"),
    "number": (lambda: 1.0, "w is no tensor, but of type float"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("make", "message"), NO_VALUES.values(), ids=NO_VALUES)
def test_a_tensor_without_values_is_named_before_an_update_is_opened(make: Callable[[], Any], message: str) -> None:
    server = Server()

    async def use(client: Any) -> None:
        for method in (client.update_weights, client.push):
            for source in ({"w": make()}, [("v", torch.ones(1)), ("w", make())], iter([("w", make())])):
                with pytest.raises(TypeError, match=message):
                    await method(source)

    server.use(use)
    assert set(server.calls) <= {"/weight_info"}


def test_tensors_of_other_classes_are_sent_by_their_values() -> None:
    class Named(Tensor):
        pass

    weights = {"a": torch.ones(400).as_subclass(Named), "b": torch.ones(1).expand(400), "c": torch.ones(800)[::2]}
    server = Server()
    server.use(lambda client: client.update_weights(weights))
    assert_same(server.tensors, dict.fromkeys(NAMES, torch.ones(400)))


@pytest.mark.parametrize("name", ["base_model.model.q.lora_A.default.weight", "lm_head.modules_to_save.default.weight"])
def test_a_part_of_an_adapter_is_refused_with_what_to_do(name: str) -> None:
    server = Server()

    async def use(client: Any) -> None:
        with pytest.raises(TypeError, match="is a part of an adapter: push peft's module itself"):
            await client.push({"q.base_layer.weight": torch.ones(2), name: torch.ones(2)})

    server.use(use)
    assert not server.calls


@pytest.fixture(params=[1, 2])
def processes(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many processes share what is sharded; the others do nothing."""
    fake_pg = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def test_what_fsdp2_has_sharded_is_refused_by_name_if_a_part_is_elsewhere(processes: int) -> None:
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard  # takes long to load
    tensors = importlib.import_module("torch.distributed.tensor")
    model, server = nn.Linear(8, 4), Server()
    expected = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (processes,)))
    mesh = dist.init_device_mesh("cpu", (processes,))
    copies = {name: tensors.distribute_tensor(tensor, mesh, [tensors.Replicate()]) for name, tensor in expected.items()}

    async def use(client: Any) -> None:
        await client.update_weights(copies)  # all of it is here
        assert_same(server.tensors, expected)
        server.files.clear()
        for weights in (model, model.state_dict(), model.named_parameters()):
            if processes > 1:
                server.calls.clear()
                with pytest.raises(TypeError, match=r"weight is sharded over 2 processes: push pairs of .*full_tensor"):
                    await client.update_weights(weights)
                assert not server.calls
            else:
                await client.update_weights(weights)
                assert_same(server.tensors, expected)

    server.use(use)
