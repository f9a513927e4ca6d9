"""Deltas of a model that ranks share: each changes its part, and the checksum is that of the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import checkpoint, ops
from tokserve.base.errors import Conflict, RequestError
from tokserve.features.ranks.collectives import ProcessGroup
from tokserve.features.weights.checksums import checksums
from tokserve.features.weights.coordinates import Coordinates
from tokserve.features.weights.delta_staging import DeltaStaging
from tokserve.features.weights.rank_sums import RankSums, merged
from tokserve.layers.parallel import Group, Stage
from tokserve.models.decoder import Decoder
from tokserve.models.load import load_decoder
from tokserve.models.weights import model_name
from tokserve.rl.deltas import difference
from tokserve.rl.sums import Sums, set_checksum, tensor_sum

WHOLE = (1, 1)


class Exchange:
    """`ProcessGroup.all_gather` among threads, one of which each rank has."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._rows: list[Tensor | None] = [None] * size

    def gather(self, rank: int, row: Tensor) -> list[Tensor]:
        self._barrier.wait(120)
        self._rows[rank] = row
        self._barrier.wait(120)
        return [row for row in self._rows if row is not None]


class FakeProcessGroup:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank

    def all_gather(self, row: Tensor) -> list[Tensor]:
        return self._exchange.gather(self._rank, row)


def opened(directory: Path, tensor: int, stages: int, rank: int) -> Decoder:
    group, stage = Group(rank % tensor, tensor), Stage(rank // tensor, stages)
    options = {"dtype": "bfloat16", "head_dtype": "auto", "load_format": "auto", "seed": 0}
    return load_decoder(directory, checkpoint.hf_config(directory), **options, group=group, stage=stage)  # type: ignore[arg-type]


class RankedModel:
    """The ranks of one model, each in a thread when they do something together."""

    def __init__(self, directory: Path, tensor: int, stages: int) -> None:
        self.size = tensor * stages
        self.decoders = [opened(directory, tensor, stages, rank) for rank in range(self.size)]
        exchange = Exchange(self.size)
        totals = [RankSums(FakeProcessGroup(exchange, rank)).total for rank in range(self.size)]  # type: ignore[arg-type]
        self.coordinates = [Coordinates(one, total) for one, total in zip(self.decoders, totals, strict=True)]

    def together(self, do: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return [future.result() for future in [pool.submit(do, rank) for rank in range(self.size)]]

    def checksum(self) -> str:
        first, *others = self.together(lambda rank: self.coordinates[rank].checksum(self.coordinates[rank].sums))
        assert all(other == first for other in others)
        return str(first)

    def staging(self, rank: int, checksum: str) -> DeltaStaging:
        coordinates = self.coordinates[rank]
        return DeltaStaging(self.decoders[rank], coordinates, ("0", checksum), coordinates.sums())


def changed(old: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Some elements of each tensor, and all of one."""
    new = {}
    for number, (name, tensor) in enumerate(sorted(old.items())):
        share = 1.0 if number == 3 else 0.02
        selected = torch.rand(tensor.shape, generator=generator) < share
        new[name] = torch.where(selected, tensor + torch.randn(tensor.shape, generator=generator), tensor)
    return new


def rounded(model: Coordinates, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {model.tied.get(name, name): tensor for name, tensor in weights.items()}
    named = {model_name(name, model.renames) or name: tensor for name, tensor in tensors.items()}
    return {name: tensor.to(model.described[name][0]).contiguous() for name, tensor in named.items()}


def written(directory: Path, hf: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    checkpoint_of = write_checkpoint(directory, hf, seed=1)
    save_file(weights, checkpoint_of / "model.safetensors")
    return checkpoint_of


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("family", "tensor", "stages"),
    [
        ("qwen3", 2, 1),
        ("qwen3", 4, 1),
        ("qwen3", 1, 2),
        ("gemma3_text", 2, 2),
        ("phi3", 2, 1),
        ("qwen2", 4, 1),
        ("gpt_neox", 2, 1),
        ("gpt2", 2, 1),
        ("opt", 1, 2),
    ],
)
def test_each_rank_has_what_it_would_have_loaded(family: str, tensor: int, stages: int, tmp_path: Path) -> None:
    ops.bind("cpu", {})
    hf = tiny_config(family, dtype="bfloat16")
    start = write_checkpoint(tmp_path / "start", hf, seed=1)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(start / "model.safetensors")
    updated = changed({name: one.float() for name, one in weights.items()}, generator)
    model, one = RankedModel(start, tensor, stages), Coordinates(opened(start, *WHOLE, 0))
    base = model.checksum()
    assert base == one.checksum(one.sums)
    old, new = rounded(one, weights), rounded(one, updated)
    target = set_checksum({name: tensor_sum(value) for name, value in new.items()}, one.described)
    deltas = {name: actual[0] for name in new if (actual := difference(old[name], new[name])) is not None}
    assert {delta.indices is None for delta in deltas.values()} == {True, False}

    def apply(rank: int) -> None:
        staging = model.staging(rank, base)
        for name, delta in deltas.items():
            staging.add(name, delta)
        staging.finish(target)
        staging.apply()

    model.together(apply)
    assert model.checksum() == target
    result = written(tmp_path / "result", hf, updated)
    for rank, decoder in enumerate(model.decoders):
        assert checksums(decoder) == checksums(opened(result, tensor, stages, rank))
    if any(parameter.held is not None for parameter in model.decoders[0].parameters_by_name().values()):
        with pytest.raises(Conflict, match="no rank has whole tensors"):
            model.decoders[0].provenance.checksums((), tied=False)


def test_one_tensor_of_heads_that_ranks_share_takes_no_delta(tmp_path: Path) -> None:
    ops.bind("cpu", {})
    model = RankedModel(write_checkpoint(tmp_path, tiny_config("phi3", num_key_value_heads=2), seed=1), 4, 1)

    def refused(rank: int) -> str:
        with pytest.raises(Conflict, match=r"qkv_proj\.weight is one tensor of parts") as caught:
            model.coordinates[rank].checksum(model.coordinates[rank].sums)
        return str(caught.value.code)

    assert model.together(refused) == ["delta_unsupported"] * 4


def test_a_rank_that_fails_ends_the_delta_on_all(tmp_path: Path) -> None:
    ops.bind("cpu", {})
    model = RankedModel(write_checkpoint(tmp_path, tiny_config("qwen3"), seed=1), 2, 1)

    def sums(rank: int) -> Sums:
        if rank == 1:
            raise RequestError("the file cannot be read")
        return model.coordinates[rank].sums()

    def fail(rank: int) -> str:
        with pytest.raises((RequestError, RuntimeError)) as caught:
            model.coordinates[rank].checksum(lambda: sums(rank))
        return str(caught.value)

    assert model.together(fail) == ["another rank has failed", "the file cannot be read"]
    assert model.checksum()


@pytest.mark.parametrize("total", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_checksums_with_the_highest_bit_are_returned(total: int) -> None:
    sums = RankSums(cast(ProcessGroup, FakeProcessGroup(Exchange(1), 0)))
    assert sums.total(lambda: {"a": total}, {"a": (None, (2, 5))}) == {"a": total}


def test_parts_must_form_tensors() -> None:
    def row(*columns: int) -> Tensor:
        return torch.tensor([2, *columns])

    sizes = {"a": 10}
    assert merged(["a"], [row(5, 1, 4), row(-6, 2, 6)], sizes) == {"a": (1 << 64) - 1}
    assert merged(["a"], [row(5, 1, 10), row(5, 1, 10), row(0, 3, 0)], sizes) == {"a": 5}
    with pytest.raises(Conflict) as caught:
        merged(["a"], [row(5, 1, 10), row(6, 1, 10)], sizes)
    assert caught.value.code == "checksum_mismatch"
    with pytest.raises(Conflict) as caught:  # they overlap
        merged(["a"], [row(5, 1, 6), row(6, 2, 6)], sizes)
    assert caught.value.code == "delta_unsupported"
    nothing = torch.tensor([1, 0, 0, 0])
    assert merged(["a"], [nothing, nothing], sizes) == {}
    with pytest.raises(Conflict, match="same files"):
        merged(["a"], [nothing, row(5, 1, 10)], sizes)
