"""Tables and batches against a plain loop over tokens."""

import numpy as np
import pytest

from tests.runner.drive import plan_of
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.plan import NewRow, StepPlan
from tokserve.runner.tables.host_slots import HostSlots
from tokserve.runner.tables.slots import MAX_TEMPERATURE, MIN_TEMPERATURE, last_indices, logit_lengths

SEQS, LENGTH, BLOCK = 6, 50, 4


@pytest.fixture
def slots() -> HostSlots:
    """Every slot full of its own tokens and blocks."""
    step_plan = HostSlots(SEQS, LENGTH, BLOCK)
    for slot in range(SEQS):
        tokens = np.arange(LENGTH, dtype=np.int32) + 100 * slot
        step_plan.assign(NewRow(slot, "", tokens, 10 + slot, SamplingParams(), slot, ()))
        step_plan.extend(slot, 0, [1000 * slot + 7 * i for i in range(5)])
        step_plan.extend(slot, 5, [1000 * slot + 7 * i for i in range(5, 13)])
    return step_plan


def plan(rows: list[tuple[int, int, int]]) -> StepPlan:
    return plan_of([(*row, 1) for row in rows])


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
def test_batch_is_what_a_loop_would_make(slots: HostSlots, rows: list[tuple[int, int, int]]) -> None:
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


def test_logits_rows_are_the_last_tokens_of_the_rows_that_need_them(slots: HostSlots) -> None:
    step_plan = plan([(1, 3, 6), (0, 8, 1), (5, 0, 17), (3, 31, 2)])
    batch = slots.build(step_plan, [])
    needed = np.array([1, 0, 4, 0], np.int32)
    rows = slots.logits_rows(step_plan, batch, needed)
    assert rows is not None
    assert (rows.tokens.tolist(), rows.query_start.tolist()) == ([5, 20, 21, 22, 23], [0, 1, 5])
    assert rows.seq_lens.tolist() == [9, 17]
    assert rows.block_tables.tolist() == batch.block_tables[[0, 2]].tolist()
    assert slots.logits_rows(step_plan, batch, step_plan.num_tokens) is None
    slots.assign(NewRow(1, "", np.zeros(1, np.int32), 1, SamplingParams(), 0, (), adapter=2))
    with_adapters = slots.logits_rows(step_plan, slots.build(step_plan, []), needed)
    assert with_adapters is not None and with_adapters.adapters is not None
    assert with_adapters.adapters.tolist() == [2, -1, -1, -1, -1]


def test_the_second_text_of_a_pair_ends_with_its_request(slots: HostSlots) -> None:
    def types(*rows: tuple[int, int, int]) -> list[int] | None:
        step_plan = slots.build(plan(list(rows)), []).token_types
        return None if step_plan is None else step_plan.tolist()

    tokens = np.zeros(6, np.int32)
    for slot, second in ((1, 4), (2, -1), (3, 2)):
        slots.assign(NewRow(slot, "", tokens, 6, PoolingParams(), 0, (), second=second))
    assert types((1, 0, 6), (2, 0, 6), (3, 0, 6)) == [0, 0, 0, 0, 1, 1, *[0] * 6, 0, 0, 1, 1, 1, 1]
    slots.assign(NewRow(1, "", tokens, 6, PoolingParams(), 0, ()))
    assert types((1, 0, 6), (3, 0, 3)) == [*[0] * 6, 0, 0, 1]
    slots.assign(NewRow(3, "", tokens, 6, PoolingParams(), 0, ()))
    assert types((1, 0, 6), (3, 0, 3)) is None


def test_last_indices() -> None:
    counts = np.array([2, 0, 1, 3], np.int32)
    assert last_indices(np.array([5, 6, 7, 20]), counts).tolist() == [3, 4, 6, 17, 18, 19]
    assert last_indices(np.zeros(0, np.int64), np.zeros(0, np.int32)).tolist() == []


def test_lengths_are_the_indices_of_the_tokens_to_sample() -> None:
    slots, lengths = logit_lengths(plan_of([(4, 0, 9, 1), (2, 5, 4, 0), (1, 10, 3, 3)], drafts=[[], [], [7, 8]]))
    assert (slots.tolist(), lengths.tolist()) == ([4, 1, 1, 1], [9, 11, 12, 13])


def test_drafts_are_after_the_tokens_of_their_rows(slots: HostSlots) -> None:
    step_plan = plan_of([(1, 10, 3, 3), (4, 7, 1, 1), (0, 0, 6, 2)], drafts=[[7, 8], [], [9]])
    slots.write_drafts(step_plan)
    assert slots.build(step_plan, []).input_ids.tolist() == [110, 7, 8, 407, 0, 1, 2, 3, 4, 9]


def test_rejected_drafts_are_taken_off_the_next_plan_only(slots: HostSlots) -> None:
    slots.limit_computed(np.array([1, 4, 3], np.int32), np.array([11, 20, 9]))
    slots.assign(NewRow(3, "", np.zeros(5, np.int32), 5, SamplingParams(), 0, ()))
    step_plan = plan_of([(1, 13, 1, 1), (4, 18, 1, 1), (3, 12, 1, 1), (0, 30, 1, 1)])
    assert slots.corrected(step_plan).num_computed.tolist() == [11, 18, 12, 30]
    assert slots.corrected(step_plan) is step_plan


def test_a_pooling_request_takes_a_slot(slots: HostSlots) -> None:
    slots.assign(NewRow(2, "", np.zeros(5, np.int32), 5, PoolingParams(), 0, ()))
    assert slots.greedy[2] and slots.temperature[2] == 1.0


def test_batch_does_not_change_with_the_tables(slots: HostSlots) -> None:
    batch = slots.build(plan([(0, 4, 1), (1, 4, 1)]), [])
    slots.tokens[:] = 0
    slots.blocks[:] = 0
    assert batch.input_ids.tolist() == [4, 104]
    assert batch.block_tables.tolist() == [[0, 7], [1000, 1007]]


def test_only_zero_is_greedy_and_temperatures_are_what_a_float_can_divide_by() -> None:
    step_plan = HostSlots(7, 8, 4)
    for slot, temperature in enumerate((0.0, 5e-324, 1e-40, 1e-20, 0.7, 2.5, 1e300)):
        row = NewRow(slot, "", np.zeros(1, np.int32), 1, SamplingParams(temperature=temperature), 0, ())
        step_plan.assign(row)
    assert step_plan.greedy.tolist() == [True] + [False] * 6
    cold = [1.0, MIN_TEMPERATURE, MIN_TEMPERATURE, np.float32(1e-20), np.float32(0.7)]
    assert step_plan.temperature.tolist() == [*cold, 2.5, MAX_TEMPERATURE]


@pytest.mark.parametrize("seed", [0, -1, -(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) + 5])
def test_any_seed_fits(seed: int) -> None:
    step_plan = HostSlots(1, 8, 4)
    step_plan.assign(NewRow(0, "", np.zeros(1, np.int32), 1, SamplingParams(), seed, ()))
    assert int(step_plan.seeds[0]) % (1 << 64) == seed % (1 << 64)


def test_a_decode_batch_is_reused(slots: HostSlots) -> None:
    tokens = slots.tokens[4].copy()[:LENGTH]
    slots.assign(NewRow(4, "", tokens, 1, SamplingParams(), 0, (), adapter=1))
    filled = slots.decode_batch(2, [], adapters=True)
    for rows in ([(4, 30, 1), (0, 3, 1)], [(2, 7, 1), (4, 48, 1)]):
        step_plan = plan(rows)
        slots.fill(step_plan, filled)
        built, batch = slots.build(step_plan, []), filled.batch
        for name in ("input_ids", "positions", "seq_lens", "slot_mapping", "query_start"):
            assert getattr(batch, name).tolist() == getattr(built, name).tolist()
        width = built.block_tables.shape[1]
        assert batch.block_tables[:, :width].tolist() == built.block_tables.tolist()
        assert batch.adapters is not None
        assert batch.adapters.tolist() == [1 if slot == 4 else -1 for slot, *_ in rows]


def test_columns_are_those_of_the_requests_in_the_slots_now(slots: HostSlots) -> None:
    numbers, lengths = np.array([3, 1], np.int32), np.array([7, 9])
    assert slots.columns(numbers, lengths).seeds.tolist() == [3, 1]
    slots.assign(NewRow(1, "", np.zeros(1, np.int32), 1, SamplingParams(temperature=0.0), 77, ()))
    columns = slots.columns(numbers, lengths + 1)
    assert (columns.seeds.tolist(), columns.lengths.tolist()) == ([3, 77], [8, 10])
    assert columns.greedy.tolist() == [False, True]
    assert slots.columns(numbers[::-1].copy(), lengths).seeds.tolist() == [77, 3]
