"""Embeddings that take the place of placeholder ids, in whatever chunks a prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.runner.drive import Driver, Job, on_either_device, plan_of
from tests.runner.test_runner import outcomes, prompt
from tokserve.features.images.encoder import ImageEncoder
from tokserve.features.images.features import FeatureRows, FeatureTable
from tokserve.layers.batch import ForwardBatch
from tokserve.models.decoder import Decoder
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DeviceFacts, NewRow, StepPlan
from tokserve.protocol.prompt import Feature
from tokserve.runner.features import RunnerFeature, RunnerHooks
from tokserve.runner.runner import Runner

HIDDEN = 64


def feature(start: int, length: int, hidden: int = HIDDEN) -> Feature:
    data = np.arange(length * hidden, dtype="<f4") + 1000.0 * start
    return Feature("embeddings", b"", start, length, data.tobytes())


def row(slot: int, *features: Feature) -> NewRow:
    return NewRow(slot, "", np.zeros(40, np.int32), 40, SamplingParams(), 0, (), features=features)


def rows_of(table: FeatureTable, plan: StepPlan) -> FeatureRows | None:
    return table.before(plan, cast(Decoder, None))  # only images need the model


def first_columns(rows: FeatureRows | None) -> list[tuple[int, float]]:
    """Index in the batch and first number of each embedding."""
    assert rows is not None and rows.added is None
    index, embeddings = rows.embeds
    return list(zip(index.tolist(), embeddings[:, 0].tolist(), strict=True))


def test_the_part_of_a_feature_in_a_chunk_is_given() -> None:
    table = FeatureTable(2, torch.float32, torch.device("cpu"))
    table.assign(row(1, feature(3, 4, 2), feature(10, 2, 2)))
    table.assign(row(2))
    rows = rows_of(table, plan_of([(2, 0, 5, 1), (1, 0, 20, 1)]))
    assert first_columns(rows) == [(5 + 3 + i, 3000.0 + 2 * i) for i in range(4)] + [(15, 10000.0), (16, 10002.0)]
    assert first_columns(rows_of(table, plan_of([(1, 5, 6, 0)]))) == [(0, 3004.0), (1, 3006.0), (5, 10000.0)]
    for slot, computed, count in ((1, 0, 3), (1, 7, 3), (1, 12, 1), (2, 3, 4)):
        assert rows_of(table, plan_of([(slot, computed, count, 1)])) is None
    table.release(1)
    assert rows_of(table, plan_of([(1, 0, 20, 1)])) is None


def test_an_image_half_computed_is_encoded_again_with_new_weights() -> None:
    versions = iter((1.0, 2.0))

    class Encoder:
        def __call__(self, model: Decoder, feature: Feature) -> torch.Tensor:
            return torch.full((1, feature.length, 2), next(versions))

        def forget(self) -> None:
            """It keeps nothing."""

    table = FeatureTable(2, torch.float32, torch.device("cpu"), cast(ImageEncoder, Encoder()))
    table.assign(row(0, Feature("image", b"", 1, 6, b"")))
    assert first_columns(rows_of(table, plan_of([(0, 0, 3, 0)]))) == [(1, 1.0), (2, 1.0)]
    assert first_columns(rows_of(table, plan_of([(0, 3, 1, 0)]))) == [(0, 1.0)]
    table.on_weights()
    assert first_columns(rows_of(table, plan_of([(0, 4, 5, 0)]))) == [(i, 2.0) for i in range(3)]


def test_embeddings_have_the_models_dtype() -> None:
    table = FeatureTable(2, torch.bfloat16, torch.device("cpu"))
    table.assign(row(0, feature(0, 1, 2)))
    rows = rows_of(table, plan_of([(0, 0, 1, 0)]))
    assert rows is not None and [part.dtype for part in rows.embeds] == [torch.int64, torch.bfloat16]


class Embedded:
    """The model's embeddings of a vocabulary's ids, as a feature, and what a model without features would compute."""

    def __init__(self, runner: Runner) -> None:
        self._table = runner.model.embedding(torch.arange(runner.model.spec.vocab)).float()

    def feature(self, ids: list[int], start: int) -> Feature:
        data = self._table[torch.tensor(ids)].numpy().astype("<f4")
        return Feature("embeddings", b"", start, len(ids), data.tobytes())


@pytest.fixture(scope="module", params=["host", "cuda"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, DeviceFacts]:
    return on_either_device(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def embedding_model(loaded: tuple[Runner, DeviceFacts], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The runner's model, made to replace embeddings as batches say; how many in each batch that has any."""
    model = loaded[0].model
    forward: Callable[[ForwardBatch], torch.Tensor] = model.forward
    lookup = model.embedding
    counts: list[int] = []

    def replaced(batch: ForwardBatch) -> torch.Tensor:
        if batch.embeds is None:
            return forward(batch)
        index, embeddings = batch.embeds
        counts.append(len(index))

        def embed(ids: torch.Tensor) -> Any:
            return lookup(ids).index_copy(0, index, embeddings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "embedding", embed)
            return forward(batch)

    monkeypatch.setattr(model, "forward", replaced)
    yield counts


def test_embeddings_of_ids_in_place_of_placeholders_give_what_the_ids_give(
    loaded: tuple[Runner, DeviceFacts], embedding_model: list[int]
) -> None:
    runner, facts = loaded
    embedded = Embedded(runner)
    ids = prompt(37, 1)
    params = SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1, prompt_logprobs_start=30)
    expected = outcomes(Driver(runner, facts).run([Job(ids, params, 5)]))
    holes = [*ids[:3], *[0] * 7, *ids[10:20], *[0] * 5, *ids[25:]]
    features = (embedded.feature(ids[3:10], 3), embedded.feature(ids[20:25], 20))
    others = [Job(prompt(20, i), SamplingParams(max_tokens=6), i) for i in range(3)]
    for chunk in (1 << 30, 16, 5, 1):
        job = Job(holes, params, 5, features=features)
        embedding_model.clear()
        Driver(runner, facts, seed=chunk % 7).run([job, *[other.fresh() for other in others]], chunk=chunk)
        assert outcomes([job]) == expected
        assert sum(embedding_model) == 12
    embedding_model.clear()
    job = Job(holes, params, 5, features=features)
    Driver(runner, facts).run([job], chunk=9, preempt_after={0: 2})
    assert outcomes([job]) == expected and sum(embedding_model) == 24
    assert outcomes(Driver(runner, facts).run([Job(holes, params, 5)])) != expected


class Counted(RunnerFeature):
    """Counts the requests in slots."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def assign(self, row: NewRow) -> None:
        self.slots.append(row.slot)

    def release(self, slot: int) -> None:
        self.slots.remove(slot)


def test_only_hooks_that_a_feature_defines_are_collected() -> None:
    counted, table = Counted(), FeatureTable(2, torch.float32, torch.device("cpu"))
    hooks = RunnerHooks((counted, table))
    assert hooks.assign == (counted.assign, table.assign) and hooks.release == (counted.release, table.release)
    assert hooks.before == (table.before,) and hooks.on_weights == (table.on_weights,) and hooks.readers == ()
