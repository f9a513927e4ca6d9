"""Tables and batches against a plain loop over tokens."""

import numpy as np
import pytest

from tokserve.params import SamplingParams
from tokserve.plan import NewRow, StepPlan
from tokserve.runner.slots import COLDEST, Slots

SEQS, LENGTH, BLOCK = 6, 50, 4


@pytest.fixture
def slots() -> Slots:
    """Every slot full of its own tokens and blocks."""
    made = Slots(SEQS, LENGTH, BLOCK)
    for slot in range(SEQS):
        tokens = np.arange(LENGTH, dtype=np.int32) + 100 * slot
        made.enter(NewRow(slot, "", tokens, 10 + slot, SamplingParams(), slot, ()))
        made.extend(slot, 0, [1000 * slot + 7 * i for i in range(5)])
        made.extend(slot, 5, [1000 * slot + 7 * i for i in range(5, 13)])
    return made


def plan(rows: list[tuple[int, int, int]]) -> StepPlan:
    slots, computed, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return StepPlan(0, slots, counts, computed, np.ones(len(rows), np.bool_))


@pytest.mark.parametrize(
    "rows",
    [
        [(3, 0, 1)],
        [(0, 12, 1), (5, 49, 1), (2, 0, 1)],
        [(4, 0, 50)],
        [(1, 3, 6), (0, 8, 1), (5, 0, 17), (3, 31, 2)],
        [(2, 7, 2), (4, 9, 0), (5, 1, 1)],
    ],
)
def test_batch_is_what_a_loop_would_make(slots: Slots, rows: list[tuple[int, int, int]]) -> None:
    batch = slots.build(plan(rows), [])
    tokens = [(slot, p) for slot, computed, count in rows for p in range(computed, computed + count)]
    assert batch.input_ids.tolist() == [100 * slot + p for slot, p in tokens]
    assert batch.positions.tolist() == [p for _, p in tokens]
    assert batch.slot_mapping.tolist() == [(1000 * slot + 7 * (p // BLOCK)) * BLOCK + p % BLOCK for slot, p in tokens]
    assert batch.query_start.tolist() == np.cumsum([0] + [count for _, _, count in rows]).tolist()
    assert batch.seq_lens.tolist() == [computed + count for _, computed, count in rows]
    width = max(-(-(computed + count) // BLOCK) for _, computed, count in rows)
    assert batch.block_tables.tolist() == [[1000 * slot + 7 * i for i in range(width)] for slot, _, _ in rows]
    kinds = [str(t.dtype) for t in (batch.input_ids, batch.positions, batch.slot_mapping)]
    assert kinds == ["torch.int64"] * 3
    kinds = [str(t.dtype) for t in (batch.query_start, batch.seq_lens, batch.block_tables)]
    assert kinds == ["torch.int32"] * 3
    assert batch.block_tables.is_contiguous()


def test_ends_are_the_last_tokens_of_the_rows_that_draw(slots: Slots) -> None:
    made = plan([(1, 3, 6), (0, 8, 1), (5, 0, 17), (3, 31, 2)])
    made.samples[:] = [True, False, True, False]
    batch = slots.build(made, [])
    ends = slots.ends(made, batch)
    assert ends is not None
    assert (ends.tokens.tolist(), ends.query_start.tolist(), ends.seq_lens.tolist()) == ([5, 23], [0, 1, 2], [9, 17])
    assert ends.block_tables.tolist() == batch.block_tables[[0, 2]].tolist()
    decoding = plan([(0, 12, 1), (5, 49, 1)])
    assert slots.ends(decoding, slots.build(decoding, [])) is None


def test_batch_does_not_change_with_the_tables(slots: Slots) -> None:
    batch = slots.build(plan([(0, 4, 1), (1, 4, 1)]), [])
    slots.tokens[:] = 0
    slots.blocks[:] = 0
    assert batch.input_ids.tolist() == [4, 104]
    assert batch.block_tables.tolist() == [[0, 7], [1000, 1007]]


def test_only_zero_is_greedy_and_nothing_is_colder_than_a_float_can_divide_by() -> None:
    made = Slots(5, 8, 4)
    for slot, temperature in enumerate((0.0, 5e-324, 1e-40, 1e-20, 0.7)):
        row = NewRow(slot, "", np.zeros(1, np.int32), 1, SamplingParams(temperature=temperature), 0, ())
        made.enter(row)
    assert made.greedy.tolist() == [True, False, False, False, False]
    assert made.temperature.tolist() == [1.0, COLDEST, COLDEST, np.float32(1e-20), np.float32(0.7)]


@pytest.mark.parametrize("seed", [0, -1, -(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) + 5])
def test_any_seed_fits(seed: int) -> None:
    made = Slots(1, 8, 4)
    made.enter(NewRow(0, "", np.zeros(1, np.int32), 1, SamplingParams(), seed, ()))
    assert int(made.seeds[0]) % (1 << 64) == seed % (1 << 64)
