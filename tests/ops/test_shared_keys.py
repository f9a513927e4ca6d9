"""GPU attention that reads keys once for rows that share pages: every row has the bits that it has by itself.

Kernels run in Triton's interpreter; with TRITON_INTERPRET=0, on a GPU.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.test_groups import Tree
from tests.ops.test_triton import DEVICE, DTYPES, INTERPRETED, pytestmark, randn
from tokserve.gpu.kernels import shared_keys
from tokserve.gpu.kernels.attention import SPLIT, attend_rows
from tokserve.ops import registry
from tokserve.ops.registry import OPS

__all__ = ["pytestmark"]
DTYPE = DTYPES[0] if INTERPRETED else DTYPES[-1]


class DecodeStep:
    """A token of each row, all of whose pages hold random numbers."""

    def __init__(self, tables: list[list[int]], lengths: list[int], page: int, heads: int, kv_heads: int) -> None:
        width = max(map(len, tables))
        self.tables = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables]).int().to(DEVICE)
        self.lengths = torch.tensor(lengths).int().to(DEVICE)
        blocks, dim = max(map(max, tables)) + 1, 16
        self.caches = [randn(DTYPE, n, blocks, kv_heads, page, dim).to(DEVICE) for n in (1, 2)]
        self.q = randn(DTYPE, 3, len(tables), heads, dim).to(DEVICE)
        self.sinks = randn(torch.float32, 4, heads).to(DEVICE)

    def attend(self, *, groups: bool, softcap: float = 0.0, sinks: bool = False) -> Tensor:
        starts = torch.arange(len(self.lengths) + 1, device=DEVICE).int()
        rows = (self.tables, starts, self.lengths)
        options = (0.25, 0, 0.5, softcap, self.sinks if sinks else None, None)
        if not groups:
            return attend_rows(self.q, *self.caches, *rows, *options)
        work = shared_keys.group_work(self.q, self.caches[0], *rows, 0)
        assert work.shape == (1, 4 * len(self.lengths) + 1), "it takes another way"
        return shared_keys.paged_attention(self.q, *self.caches, *rows, *options, work)

    def runs(self) -> list[list[int]]:
        """Splits that other rows' items hold, splits for the row's run, rows of that run; and items before each row."""
        starts = torch.arange(len(self.lengths) + 1, device=DEVICE).int()
        work = shared_keys.group_work(self.q, self.caches[0], self.tables, starts, self.lengths, 0)
        count = len(self.lengths)
        return [part.tolist() for part in work[0].split([count, count, count, count + 1])]


def test_a_switch_chooses_it() -> None:
    assert registry.choose("cuda", {})["attention_work"] == "triton"
    chosen = registry.choose("cuda", {"attention_work": "groups"})
    assert (chosen["attention_work"], chosen["paged_attention"]) == ("groups", "triton")


def test_runs_are_rows_whose_splits_are_in_the_same_pages() -> None:
    """Rows 1 to 3 share two splits, row 3 and row 4 one; row 5 ends where the first one does; row 6 is alone."""
    page, split = 64, SPLIT // 64
    first, second, third = ([*range(start, start + split)] for start in (0, 10, 20))
    tables = [
        [*third, 50],
        [*first, *second, 51],
        [*first, *second, 52],
        [*first, *second, 53, 60],
        [*first, *third, 54],
        [*first],
        [70, 71],
    ]
    lengths = [260, 520, 530, 590, 513, 256, 100]
    step = DecodeStep(tables, lengths, page, 2, 1)
    held, leads, members, before = step.runs()
    assert held == [0, 0, 1, 1, 1, 1, 0]
    assert leads == [0, 1, 0, 0, 0, 0, 0]
    assert members[1] == 5
    assert before == [0, 2, 5, 7, 9, 11, 11, 12]
    assert torch.equal(step.attend(groups=True), step.attend(groups=False))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("page", "heads", "kv_heads", "options"),
    [
        (64, 4, 2, {}),
        (16, 8, 1, {"sinks": True}),
        (1, 5, 1, {}),
        (256, 2, 2, {"sinks": True, "softcap": 3.0}),
    ],
)
def test_rows_have_the_bits_that_they_have_alone(
    page: int, heads: int, kv_heads: int, options: dict[str, float]
) -> None:
    """Rows that branch off one another at random pages, in the order of their tables and in another."""
    rng = random.Random(page)
    pages = 2 * SPLIT // page
    tree = Tree(page, [list(range(pages))], [2 * SPLIT], [1], pages)
    for _ in range(4):
        tree.branch(0, rng.randrange(1, 300))
    for _ in range(4):
        tree.add(rng, 600)
    order = sorted(range(len(tree.tables)), key=lambda row: tree.tables[row])
    for trial in range(2):
        tables, lengths = [tree.tables[row] for row in order], [tree.lengths[row] for row in order]
        step = DecodeStep(tables, lengths, page, heads, kv_heads)
        held, _, _, before = step.runs()
        assert before[-1] + sum(held) == sum(-(-length // SPLIT) for length in lengths)
        assert sum(held) > 0 or trial
        assert torch.equal(step.attend(groups=True, **options), step.attend(groups=False, **options))
        rng.shuffle(order)


def test_prompts_and_windows_are_left_to_the_other_kernels() -> None:
    work = OPS["attention_work"].implementations["groups"].call
    step = DecodeStep([[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]], [300, 310], 64, 2, 1)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    assert work(step.q, step.caches[0], step.tables, starts, step.lengths, 100).dim() == 1
    several = torch.tensor([0, 3, 4], dtype=torch.int32, device=DEVICE)
    assert work(step.q[[0, 0, 0, 1]], step.caches[0], step.tables, several, step.lengths, 0).dim() == 1


def test_work_of_one_row_and_one_kv_head_is_not_taken_for_runs() -> None:
    step = DecodeStep([[0, 1]], [70], 64, 4, 1)
    rows = (step.tables, torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), step.lengths)
    work = OPS["attention_work"].implementations["triton"].call(step.q, step.caches[0], *rows, 0)
    options = (0.25, 0, 0.5, 0.0, None, None)
    result = shared_keys.paged_attention(step.q, *step.caches, *rows, *options, work)
    assert torch.equal(result, step.attend(groups=False))
