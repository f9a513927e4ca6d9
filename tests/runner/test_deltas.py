"""Deltas on the weights that serve: what a commit leaves is compared with a runner that was started with the result.

A delta that is late, repeated, cut, changed on its way or of other weights changes nothing, and its error says what to
do.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.runner.drive import feature
from tests.runner.test_weight_sync import Trainer, announcement, feed, outcome, segment, start
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import Conflict, RequestError
from tokserve.features.weights import delta_sources
from tokserve.features.weights.checksums import checksums
from tokserve.features.weights.coordinates import Coordinates
from tokserve.features.weights.delta_staging import DeltaStaging
from tokserve.features.weights.runner_feature import RunnerUpdates
from tokserve.features.weights.weight_sources import Announcement
from tokserve.rl import WeightsError
from tokserve.rl import checksums as digests
from tokserve.rl.delta_directory import WeightDirectory
from tokserve.rl.deltas import (
    DeltaLabel,
    TensorDelta,
    decode_steps,
    difference,
    encode_steps,
    file_pieces,
    max_steps,
    tensors_of,
)
from tokserve.rl.push import PushedWeights, ServerTensors, sparse_broadcast
from tokserve.rl.sums import bits_of, change, partial_sum, set_checksum, tensor_sum

Weights = dict[str, Tensor]


class Served:
    """A runner, and a trainer that knows what it should have."""

    def __init__(self, directory: Path, family: str = "qwen3", dtype: str = "bfloat16", **options: Any) -> None:
        self.hf = tiny_config(family, num_hidden_layers=1)
        self.options = {"dtype": dtype, **options}
        self.directory = directory
        self.checkpoint = write_checkpoint(directory / "start", self.hf, seed=1)
        self.runner, self.facts = start(self.checkpoint, **self.options)
        self.server = ServerTensors.read(self.runner.background("weight_coordinates", {}))
        loaded = load_file(self.checkpoint / "model.safetensors")
        self.pushed = PushedWeights.of(self.server, self.server.collected(loaded)[0])
        self.pushed.version = self.version = "0"

    def changed(self, generator: random.Random, share: float = 0.01) -> Weights:
        """The trainer's weights after a step."""
        seed = torch.Generator().manual_seed(generator.getrandbits(40))
        weights = {}
        for name, tensor in self.pushed.tensors.items():
            weights[name] = tensor.clone()
            selected = torch.rand(tensor.shape, generator=seed) < share
            weights[name][selected] += torch.randn(int(selected.sum()), generator=seed).to(tensor.dtype)
        return weights

    def delta(self, weights: Weights, version: str) -> tuple[Any, Any, DeltaLabel]:
        deltas, sums = self.pushed.changes(weights)
        return deltas, sums, self.pushed.label(sums, version)

    def send(self, deltas: Any, label: DeltaLabel, change_body: Callable[[bytes], bytes] = bytes) -> None:
        """A delta's whole way, as the engine goes it."""
        body = change_body(b"".join(file_pieces(tensors_of(deltas), label.metadata())))
        try:
            self.begin(label)
            feed(self.runner, body[:100])
            feed(self.runner, body[100:], last=True)
            done = self.runner.background("finish_update", {"checksum": None})
            assert (done["version"], done["checksum"]) == (label.version, label.checksum)
        except RequestError:
            self.runner.background("abort_update", {})
            raise
        self.commit(label.version)

    def begin(self, label: DeltaLabel) -> None:
        base = {"base_version": label.base_version, "base_checksum": label.base_checksum}
        self.runner.background("begin_delta", {"version": self.version, **base})

    def commit(self, version: str) -> None:
        self.runner.call("commit_update", {})
        self.version = version

    def step(self, generator: random.Random, version: str, share: float = 0.01) -> None:
        deltas, sums, label = self.delta(self.changed(generator, share), version)
        self.send(deltas, label)
        self.pushed.commit(deltas, sums, label)

    def assert_exact(self) -> None:
        """Memory is that of a runner which loaded the weights whole, and both sums are right."""
        target = self.directory / "result"
        target.mkdir(exist_ok=True)
        save_file({name: tensor.float() for name, tensor in self.pushed.tensors.items()}, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(self.hf))
        fresh, facts = start(target, **self.options)
        assert checksums(self.runner.model) == checksums(fresh.model)
        assert self.runner.background("weights_checksum", {}) == self.pushed.checksum
        assert fresh.background("weights_checksum", {}) == self.pushed.checksum
        assert outcome(self.runner, self.facts) == outcome(fresh, facts)


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("qwen3", "bfloat16", {}),
        ("llama", "float32", {}),
        ("gemma3_text", "bfloat16", {}),
        ("qwen3", "bfloat16", {"head_dtype": "float32"}),
        pytest.param("llama", "float16", {"ops": {"*": "torch"}}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", "float32", {}, marks=pytest.mark.slow),
        pytest.param("qwen2", "bfloat16", {}, marks=pytest.mark.slow),
        pytest.param("mistral", "float16", {}, marks=pytest.mark.slow),
    ],
)
def test_a_chain_of_deltas_is_a_full_load(family: str, dtype: str, options: dict[str, Any], tmp_path: Path) -> None:
    served, generator = Served(tmp_path, family, dtype, **options), random.Random(1)
    first = outcome(served.runner, served.facts)
    for version, share in enumerate((0.01, 0.0, 0.3, 0.002, 1.0)):
        served.step(generator, str(version + 1), share)
    assert outcome(served.runner, served.facts) != first
    served.assert_exact()
    names = served.runner.background("checkpoint_checksums", {})["checkpoint"]
    expected = digests(served.pushed.tensors)
    assert {name: names[name] for name in expected} == expected


def test_a_delta_in_parts_that_were_made_before_its_checksum_was_known(tmp_path: Path) -> None:
    served = Served(tmp_path)
    weights = served.changed(random.Random(3))
    for checksum in ("0" * 64, None, ""):  # another, none at all, and the right one
        sums = dict(served.pushed.sums)
        parts = [{name: one} for part in served.pushed.parts(weights, sums) for name, one in part.items()]
        label, partial = served.pushed.label(sums, "1"), served.pushed.label_of_part("1")
        served.begin(label)
        for part in parts:
            feed(served.runner, b"".join(file_pieces(tensors_of(part), partial.metadata())), last=True)
        if checksum == "":
            done = served.runner.background("finish_update", {"checksum": label.checksum})
            assert (done["version"], done["checksum"]) == ("1", label.checksum)
            served.commit("1")
            served.pushed.commit({name: one for part in parts for name, one in part.items()}, sums, label)
            return served.assert_exact()
        with pytest.raises(RequestError, match="it says 000" if checksum else "the delta's result is missing"):
            served.runner.background("finish_update", {"checksum": checksum})
        served.runner.background("abort_update", {})


def test_an_update_has_one_label_and_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tmp_path)
    deltas, _, label = served.delta(served.changed(random.Random(3)), "1")
    first, second, *_ = deltas

    def body(name: str, label: DeltaLabel) -> bytes:
        return b"".join(file_pieces(tensors_of({name: deltas[name]}), label.metadata()))

    for other in (replace(label, version="2"), replace(label, checksum="0" * 64)):
        served.begin(label)
        feed(served.runner, body(first, label), last=True)
        with pytest.raises(RequestError, match="must have the same versions and checksums"):
            feed(served.runner, body(second, other), last=True)
    served.begin(label)
    staging = feature(served.runner, RunnerUpdates).sync._staging
    info, tensors = sparse_broadcast({first: deltas[first]}, {first: served.pushed.described[first][1]})
    sent = iter(tensors * 2)
    monkeypatch.setattr(
        delta_sources, "receive_tensors", lambda _, named, packed: [(name, next(sent)) for name, *_ in named]
    )
    announced = msgspec.convert({key: value * 2 for key, value in info.items()}, Announcement)
    with pytest.raises(RequestError, match=f"{first} was sent twice"):
        delta_sources.from_group(cast(DeltaStaging, staging), announced, cast(Any, None))
    served.runner.background("abort_update", {})


def test_a_quantized_server_refuses_deltas(tmp_path: Path) -> None:
    served = Served(tmp_path, quantization="int8")
    assert "quantized" in str(served.server.refusal)
    with pytest.raises(Conflict, match="push full weights") as caught:
        served.step(random.Random(1), "1")
    assert caught.value.code == "delta_unsupported"


def test_deltas_over_shared_memory_a_group_and_a_directory(tmp_path: Path) -> None:
    """Shared memory, a process group and a directory."""
    served, generator = Served(tmp_path), random.Random(2)
    deltas, sums, label = served.delta(served.changed(generator), "1")
    served.begin(label)
    with segment(tensors_of(deltas)) as (name, offsets):
        source = announcement(tensors_of(deltas), segment=name, offsets=offsets)
        served.runner.background("receive_update", {"source": source})
    served.runner.background("finish_update", {"checksum": label.checksum})
    served.commit("1")
    served.pushed.commit(deltas, sums, label)

    trainer = Trainer(served.runner)
    deltas, sums, label = served.delta(served.changed(generator, 0.05), "2")
    info, tensors = sparse_broadcast(deltas, {one: served.pushed.described[one][1] for one in deltas})
    served.begin(label)
    trainer.send(tensors, packed=False)
    served.runner.background("receive_update", {"source": info})
    served.runner.background("finish_update", {"checksum": label.checksum})
    served.commit("2")
    served.pushed.commit(deltas, sums, label)
    served.assert_exact()


def test_indices_beyond_two_to_the_31_over_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"large": (1 << 16, (1 << 15) + 1), "small": (1 << 16, 1 << 15)}
    last = {name: math.prod(shape) - 1 for name, shape in shapes.items()}
    changes = {
        name: TensorDelta(np.array([0, end]), torch.tensor([1, 2], dtype=torch.bfloat16)) for name, end in last.items()
    }
    info, tensors = sparse_broadcast(changes, shapes)
    assert [one.dtype for one in tensors[::2]] == [torch.int64, torch.int32]
    announced, sent, added = msgspec.convert(info, Announcement), iter(tensors), {}

    def received(group: Any, declared: Any, packed: bool) -> Any:
        for name, dtype, shape in declared:
            tensor = next(sent)
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
            yield name, tensor

    described = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    staging = SimpleNamespace(coordinates=SimpleNamespace(described=described), add=added.__setitem__)
    monkeypatch.setattr(delta_sources, "receive_tensors", received)
    delta_sources.from_group(staging, announced, None)  # type: ignore[arg-type]
    assert {name: delta.indices.tolist() for name, delta in added.items()} == {n: [0, end] for n, end in last.items()}


def test_a_directory_that_many_servers_follow(tmp_path: Path) -> None:
    writer, generator = Served(tmp_path / "a"), random.Random(3)
    late, quantized = Served(tmp_path / "b"), Served(tmp_path / "c", quantization="int8")
    chain = WeightDirectory(tmp_path / "chain", anchor_every=3)
    chain.write(("0", writer.pushed.checksum), writer.pushed.tensors, None)
    for version in range(1, 6):
        deltas, sums, label = writer.delta(writer.changed(generator), str(version))
        tensors = tensors_of(deltas)
        writer.pushed.commit(deltas, sums, label)
        full = writer.pushed.tensors if chain.needs_anchor else None
        chain.write((label.version, label.checksum), full, (label, tensors))
    assert sorted(path.name for path in chain.path.glob("*.full.*")) == [
        "000000.full.safetensors",
        "000003.full.safetensors",
    ]
    assert read_chain(late, chain.path, None) == (5, True)  # it has version 0: five deltas
    assert read_chain(quantized, chain.path, None) == (3, False)  # an anchor, and two deltas
    late.pushed = quantized.pushed = writer.pushed
    late.assert_exact()
    target = tmp_path / "c" / "whole"
    target.mkdir()
    save_file({name: tensor.float() for name, tensor in writer.pushed.tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(quantized.hf))
    fresh, _ = start(target, **quantized.options)
    assert checksums(quantized.runner.model) == checksums(fresh.model)
    assert read_chain(late, chain.path, "5") == (0, True)
    assert read_chain(late, chain.path, "1") == (2, False)  # back: the anchor of version 0
    with pytest.raises(RequestError, match="no file of version '9'"):
        read_chain(late, chain.path, "9")
    assert chain.prune() == ["000000.full.safetensors", *(f"00000{i}.delta.safetensors" for i in (1, 2))]
    with pytest.raises(RequestError, match="no file of version '2'"):
        read_chain(late, chain.path, "2")
    for path in chain.path.glob("*.full.*"):
        path.unlink()
    with pytest.raises(Conflict, match=r"no chain leads to version '4'.*write a full file"):
        read_chain(late, chain.path, "4")


def read_chain(served: Served, directory: Path, version: str | None) -> tuple[int, bool]:
    """(number of files, whether they were all deltas)"""
    args = {"weight_dir": str(directory), "version": version, "served_version": served.version}
    plan = served.runner.background("plan_chain", args)
    if plan["base"] is not None:
        base = {"base_version": served.version, "base_checksum": plan["base"]}
        served.runner.background("begin_delta", {"version": served.version, **base})
    else:
        served.runner.background("begin_update", {"have_weights": True})
    source = {"weight_dir": str(directory), "files": plan["files"]}
    served.runner.background("receive_update", {"source": source})
    served.runner.background("finish_update", {"checksum": plan["checksum"]} if plan["base"] is not None else {})
    served.commit(plan["version"])
    served.runner.background("forget_weights", {})
    return len(plan["files"]), plan["base"] is not None


FAULTS = (
    "none",
    "missed",
    "repeated",
    "cut",
    "flipped",
    "base",
    "steps",
    "count",
    "bomb",
    "killed",
    "restarted",
    "nan",
)


def faulty(served: Served, fault: str, generator: random.Random, version: str) -> None:
    """Push a delta with a fault; raises what the server says."""
    weights = served.changed(generator, generator.choice([0.001, 0.01, 0.1]))
    deltas, sums, label = served.delta(weights, version)
    if fault == "none":
        served.send(deltas, label)
        served.pushed.commit(deltas, sums, label)
    elif fault == "missed":
        before = (
            {name: one.clone() for name, one in served.pushed.tensors.items()},
            served.pushed.sums,
            served.pushed.version,
            served.pushed.checksum,
        )
        served.pushed.commit(deltas, sums, label)
        try:
            later, _, later_label = served.delta(served.changed(generator), version + "b")
            served.send(later, later_label)
        finally:
            served.pushed.tensors, served.pushed.sums, served.pushed.version, served.pushed.checksum = before
    elif fault == "repeated":
        served.send(deltas, label)
        served.pushed.commit(deltas, sums, label)
        served.send(deltas, label)
    elif fault == "base":
        served.send(deltas, DeltaLabel(label.base_version, "0" * 64, label.version, label.checksum))
    elif fault == "nan":
        name = generator.choice([name for name, delta in deltas.items() if delta.num_changed])
        deltas[name].values.view(-1)[0] = float("nan")
        served.send(deltas, label)
    elif fault == "killed":
        served.begin(label)
        feed(served.runner, b"".join(file_pieces(tensors_of(deltas), label.metadata()))[:2000])
        feed(served.runner, b"", broken=True)
    elif fault == "restarted":
        served.runner, served.facts = start(served.checkpoint, **served.options)
        served.version = "0"
        served.send(deltas, label)
        served.pushed.commit(deltas, sums, label)
    else:
        served.send(deltas, label, lambda body: spoiled(body, fault, generator))


def spoiled(body: bytes, fault: str, generator: random.Random) -> bytes:
    """A body that was damaged."""
    if fault == "cut":
        return body[: generator.randrange(101, len(body))]
    size = int.from_bytes(body[:8], "little")
    if fault == "flipped":
        place, bit = generator.randrange(8 + size, len(body)), 1 << generator.randrange(8)
        return body[:place] + bytes([body[place] ^ bit]) + body[place + 1 :]
    header = json.loads(body[8 : 8 + size])
    name = generator.choice([key.removesuffix("#steps") for key in header if key.endswith("#steps")])
    begin, end = header[name + "#steps"]["data_offsets"]
    if fault == "steps":  # no place is where it was
        steps = bytes([0]) * (end - begin) if generator.random() < 0.5 else bytes([255]) * (end - begin)
        return body[: 8 + size + begin] + steps + body[8 + size + end :]
    if fault == "count":
        right = header[name + "#values"]["shape"]
        header[name + "#values"]["shape"] = generator.choice([[n] for n in (0, 1 << 40, -1, 3) if [n] != right])
    else:  # sizes that would take all memory
        header[name + "#steps"] = {"dtype": "U8", "shape": [1 << 50], "data_offsets": [begin, begin + (1 << 50)]}
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + body[8 + size :]


def live(directory: Path, seed: int, length: int = 8) -> None:
    """A chain of pushes with faults: always the right weights, or the ones before and an error with a cure."""
    served, generator = Served(directory), random.Random(seed)
    for number in range(1, length):
        fault = generator.choice(FAULTS)
        before = served.pushed.checksum
        try:
            faulty(served, fault, generator, str(number))
            assert fault in ("none", "restarted"), fault
        except RequestError as error:
            assert fault != "none", (fault, error.message)
            served.runner.background("abort_update", {})
        if fault == "restarted":
            if served.version == "0":
                loaded = load_file(served.checkpoint / "model.safetensors")
                served.pushed = PushedWeights.of(served.server, served.server.collected(loaded)[0])
                served.pushed.version = "0"
        elif fault not in ("none", "repeated"):
            assert served.pushed.checksum == before
        runner = served.runner
        fresh = Coordinates(runner.model)
        assert fresh.checksum(fresh.sums) == served.pushed.checksum, (seed, number, fault)


@pytest.mark.some(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_deltas_change_nothing(fault: str, tmp_path: Path) -> None:
    served, generator = Served(tmp_path), random.Random(5)
    served.step(generator, "1")
    if fault == "none":
        return faulty(served, fault, generator, "2")
    with pytest.raises(RequestError) as caught:
        faulty(served, fault, generator, "2")
    served.runner.background("abort_update", {})
    message = caught.value.message
    if fault in ("missed", "repeated", "base", "restarted"):
        assert isinstance(caught.value, Conflict) and caught.value.code == "base_mismatch"
        assert "full weights" in message and message.count("checksum") == (1 if fault == "restarted" else 2), message
    if fault == "flipped":
        assert caught.value.code in ("checksum_mismatch", "weights_not_finite") or "place" in message
    if fault == "restarted":
        return None
    fresh = Coordinates(served.runner.model)
    assert fresh.checksum(fresh.sums) == served.pushed.checksum
    served.step(generator, "3")
    served.assert_exact()
    return None


@pytest.mark.slow
def test_random_chains(tmp_path: Path) -> None:
    for seed in range(6):
        live(tmp_path / str(seed), seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_random_chains(tmp_path: Path) -> None:
    for seed in range(100, 1100):
        live(tmp_path / str(seed), seed, 12)


def test_a_delta_in_an_update_of_all_weights_is_refused(tmp_path: Path) -> None:
    served = Served(tmp_path)
    deltas, _, label = served.delta(served.changed(random.Random(1)), "1")
    served.runner.background("begin_update", {"have_weights": True})
    with pytest.raises(RequestError, match="base_version and base_checksum"):
        feed(served.runner, b"".join(file_pieces(tensors_of(deltas), label.metadata())), last=True)


def test_one_bad_file_of_a_chain_changes_nothing(tmp_path: Path) -> None:
    served, generator = Served(tmp_path / "a"), random.Random(3)
    chain = WeightDirectory(tmp_path / "chain")
    before = served.pushed.checksum
    for version in range(1, 4):
        deltas, sums, label = served.delta(served.changed(generator), str(version))
        chain.write((label.version, label.checksum), None, (label, tensors_of(deltas)))
        served.pushed.commit(deltas, sums, label)
    path = chain.path / "000001.delta.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(RequestError, match="full"):
        read_chain(served, chain.path, None)
    fresh = Coordinates(served.runner.model)
    assert fresh.checksum(fresh.sums) == before


# --- the format ---


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever finds and encodes what changed: the extension, or numpy where there is none."""
    if request.param == "compiled":
        pytest.importorskip("tokserve._C")
    else:
        monkeypatch.setattr("tokserve.rl.deltas.native", None)
        monkeypatch.setattr("tokserve.rl.sums.native", None)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("size", [1, 7, 300, 70_000, 200_000])
def test_index_steps_are_decoded_to_the_indices(size: int) -> None:
    generator = np.random.default_rng(size)
    for count in {0, 1, size // 1000, size // 3, size}:
        indices = np.sort(generator.choice(size, count, replace=False))
        steps = encode_steps(indices)
        dtype = torch.from_numpy(steps).dtype
        assert decode_steps(steps, count, size).tolist() == indices.tolist()
        assert count <= len(steps) <= max_steps(count, size, dtype)


@pytest.mark.usefixtures("loops")
def test_steps_of_any_bytes_ascend_or_are_refused() -> None:
    generator = np.random.default_rng(1)
    for _ in range(500):
        dtype = generator.choice([np.uint8, np.uint16])
        steps = generator.integers(0, 4, generator.integers(0, 50)).astype(dtype) * generator.integers(1, 64)
        count, size = int(generator.integers(0, 50)), int(generator.integers(1, 4000))
        try:
            indices = decode_steps(steps.astype(dtype), count, size)
        except WeightsError:
            continue
        assert len(indices) == count and (np.diff(indices) > 0).all() and (indices >= 0).all()
        assert not count or indices[-1] < size


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_differences_are_the_changed_elements(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1, 3, 5, 1000, (1 << 20) + 5):
        old = torch.randn(size, generator=generator).to(dtype)
        assert difference(old, old.float()) is None
        new = old.clone()
        places = torch.randperm(size, generator=generator)[: max(1, size // 50)].sort().values
        new[places] = -new[places]
        result = difference(old, new)
        assert result is not None
        delta, added = result
        assert (tensor_sum(old) + added) % (1 << 64) == tensor_sum(new)
        if delta.indices is None:
            assert size < 4 and delta.values.equal(new)
        else:
            assert delta.indices.tolist() == places.tolist() and delta.values.equal(new[places])
    zero = torch.zeros(8, dtype=dtype)
    result = difference(zero, torch.cat([-zero[:1], zero[1:]]))
    assert result is not None and result[0].num_changed == 1  # the sign of a zero is a bit


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_masters_are_rounded_as_torch_rounds_them(dtype: torch.dtype, masters: torch.dtype) -> None:
    """Random bits but those of NaN, so ties, subnormal numbers and overflow too."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(-(1 << 31), 1 << 31, (70_001,), generator=generator)
    halves = words << 16 | torch.randint(0, 2, words.shape, generator=generator) << 15  # ties of bfloat16
    new = torch.cat([words, halves]).to(torch.int32).view(torch.float32).nan_to_num(1.0).to(masters)
    old = new.to(dtype).roll(1)
    old[::2] = new.to(dtype)[::2]
    result = difference(old, new)
    assert result is not None
    delta, added = result
    assert (tensor_sum(old) + added) % (1 << 64) == tensor_sum(new.to(dtype))
    assert delta.indices is None and bits_of(delta.values).tolist() == bits_of(new.to(dtype)).tolist()
    result = difference(old[:10], new[:10])
    assert result is not None and result[0].values.equal(new[:10].to(dtype))
    old = new.to(dtype, copy=True)
    assert difference(old, new) is None
    old[7::1000] = -old[7::1000]
    result = difference(old, new)
    assert result is not None and result[0].indices is not None
    assert result[0].indices.tolist() == list(range(7, len(old), 1000))
    assert result[0].values.equal(new.to(dtype)[7::1000])


@pytest.mark.usefixtures("loops")
def test_checksums_equal_their_documented_definition() -> None:
    """Against the definition in docs/rl.md, in plain integers; and a change is the difference of two sums."""

    def factor(number: int) -> int:
        mask = (1 << 64) - 1
        z = (number + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return (z ^ z >> 31) | 1

    generator = np.random.default_rng(1)
    for size in (0, 1, 4095, 4096, 9000):
        bits = generator.integers(0, 1 << 16, size).astype(np.uint16)
        expected = sum(int(v) * factor(i % 4096) * factor(4096 + i // 4096) for i, v in enumerate(bits)) % (1 << 64)
        tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        assert tensor_sum(tensor) == partial_sum(bits) == expected
        if size > 4096:
            assert (partial_sum(bits[:4096]) + partial_sum(bits[4096:], 4096)) % (1 << 64) == expected
        places = np.flatnonzero(generator.random(size) < 0.1)
        after = bits.copy()
        after[places] = generator.integers(0, 1 << 16, len(places))
        assert (expected + change(places, bits[places], after[places])) % (1 << 64) == partial_sum(after)
    assert bits_of(torch.tensor([1.0])).tolist() == [0x3F800000]
    wide = bits_of(torch.from_numpy(generator.normal(size=5000)))  # float64, in a file that another writer has made
    after = wide.copy()
    places = np.array([0, 7, 4097])
    after[places] ^= np.uint64(1 << 63 | 5)
    assert (partial_sum(wide) + change(places, wide[places], after[places])) % (1 << 64) == partial_sum(after)
    described = {"b": (torch.float32, (2, 3)), "a": (torch.bfloat16, ())}
    lines = b"a bfloat16  8000000000000000\nb float32 2,3 0000000000000005\n"
    assert set_checksum({"b": 5, "a": 1 << 63}, described) == hashlib.sha256(lines).hexdigest()
