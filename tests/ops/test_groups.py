"""Attention of requests that share pages: keys are read once for several of them, and no bit depends on it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.ops.samples.common import normal
from tests.ops.test_cpu import _C, CALLS, as_it_was  # noqa: F401  # as_it_was: of each test
from tests.tiers import slow_except

KEYS = 64  # of a block, which is read once or not
ROWS = 32  # queries times heads of a tile; of more heads, a tile has one query


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    both_ways: bool = False  # some rows see the keys after their queries


@dataclass(slots=True)
class Tree:
    """Block tables whose rows branch off one another at random pages."""

    page: int
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)
    num_pages: int = 0

    def add(self, rng: random.Random, longest: int) -> None:
        length = rng.randint(1, longest)
        prefix: list[int] = []
        if self.tables and rng.random() < 0.85:
            parent = rng.randrange(len(self.tables))
            full_pages = self.lengths[parent] // self.page  # a page that is not full belongs to one row
            prefix = self.tables[parent][: rng.choice([full_pages, rng.randint(0, full_pages)])]
            length = max(length, len(prefix) * self.page + rng.randint(1, 80))
        count = -(-length // self.page) - len(prefix)
        self.tables.append([*prefix, *range(self.num_pages, self.num_pages + count)])
        self.num_pages += count
        self.lengths.append(length)
        most = length - len(prefix) * self.page
        self.queries.append(min(most, rng.choice([1, 1, 1, 1, 2, 5, 40])))

    def branch(self, row: int, added: int) -> None:
        """A row that has all full pages of another one, and `added` positions more."""
        prefix = self.tables[row][: self.lengths[row] // self.page]
        count = -(-added // self.page)
        self.tables.append([*prefix, *range(self.num_pages, self.num_pages + count)])
        self.num_pages += count
        self.lengths.append(len(prefix) * self.page + added)
        self.queries.append(1)


class Batch:
    """The keys, values and queries of a tree's rows; what no row holds is NaN."""

    def __init__(self, tree: Tree, shape: Shape, dtype: torch.dtype, *, latent: bool = False) -> None:
        self.tree, self.shape, self.latent = tree, shape, latent
        total = sum(tree.queries)
        width = max(map(len, tree.tables)) + 1
        self.tables = torch.tensor([[*table, *[-1] * (width - len(table))] for table in tree.tables]).int()
        positions = [torch.arange(length) for length in tree.lengths]
        slots = [
            self.tables[row].long()[at // tree.page] * tree.page + at % tree.page for row, at in enumerate(positions)
        ]
        self.slots = torch.cat(slots).unique()
        self.sinks = normal(torch.float32, 3, shape.heads) if shape.sinks else None
        if latent:
            rows = normal(dtype, 1, len(self.slots), shape.dim)
            self.cache = torch.full((tree.num_pages, tree.page, shape.dim), torch.nan, dtype=dtype)
            self.cache.view(-1, shape.dim)[self.slots] = rows
            self.q = normal(dtype, 2, total, shape.heads, shape.dim - 8)
            self.q_rope = normal(dtype, 3, total, shape.heads, 8)
        else:
            kv = normal(dtype, 1, 2, len(self.slots), shape.kv_heads, shape.dim)
            self.caches = torch.full((2, tree.num_pages, shape.kv_heads, tree.page, shape.dim), torch.nan, dtype=dtype)
            CALLS["store_kv"](*kv.unbind(), *self.caches.unbind(), self.slots)
            self.q = normal(dtype, 2, total, shape.heads, shape.dim)
        self.starts = torch.tensor([0, *tree.queries]).cumsum(0).tolist()
        self.both_ways = torch.arange(len(tree.tables)) % 3 == 0

    def attend(self, rows: list[int]) -> list[Tensor]:
        """The results of these rows, computed in one call."""
        sizes = [self.tree.queries[row] for row in rows]
        tokens = torch.cat([torch.arange(self.starts[row], self.starts[row + 1]) for row in rows])
        query_start = torch.tensor([0, *sizes]).cumsum(0).int()
        lens = torch.tensor([self.tree.lengths[row] for row in rows]).int()
        shape, tables, scale = self.shape, self.tables[rows], self.shape.dim**-0.5
        if self.latent:
            result = CALLS["latent_attention"](
                self.q[tokens], self.q_rope[tokens], self.cache, tables, query_start, lens, scale
            )
        else:
            both_ways = self.both_ways[rows] if shape.both_ways else None
            result = CALLS["paged_attention"](
                self.q[tokens], *self.caches, tables, query_start, lens, scale, shape.window, 1.0, shape.softcap,
                self.sinks, both_ways,
            )  # fmt: skip
        return list(result.split(sizes))


SHAPES = [
    Shape(2, 1, 64, 16),
    Shape(4, 2, 32, 16, sinks=True),
    Shape(3, 3, 40, 64, softcap=5.0),
    Shape(8, 1, 24, 16, window=100),
    Shape(2, 2, 33, 5),
    Shape(4, 4, 16, 1, window=600, sinks=True),
    Shape(4, 2, 32, 128, both_ways=True),
    Shape(40, 1, 16, 32),
]


def compare(batch: Batch, rng: random.Random, trials: int) -> None:
    """Every row alone, then among others in any order and with any number of threads."""
    num_rows = len(batch.tree.tables)
    alone = [batch.attend([row])[0] for row in range(num_rows)]
    assert all(part.isfinite().all() for part in alone)
    for trial in range(trials):
        rows = list(range(num_rows))
        if trial:
            rows = rng.sample(rows, rng.randint(2, num_rows))
        _C.set_threads(1 + trial % 3)
        for row, part in zip(rows, batch.attend(rows), strict=True):
            assert torch.equal(part, alone[row])


def random_tree(rng: random.Random, page: int, rows: int, longest: int) -> Tree:
    tree = Tree(page)
    for _ in range(rows):
        tree.add(rng, longest)
    return tree


@pytest.mark.some(15)
@pytest.mark.parametrize(
    ("shape", "isa"),
    [
        pytest.param(
            shape,
            isa,
            marks=pytest.mark.slow if isa == "portable" and shape.heads * shape.dim > 120 else (),
            id=f"{shape.heads}-{shape.kv_heads}-{shape.dim}-{shape.page}-{isa}",
        )
        for shape in SHAPES
        for isa in _C.instruction_sets()
    ],
)
def test_rows_that_share_pages_are_those_alone(shape: Shape, isa: str) -> None:
    _C.select(isa)
    rng = random.Random(shape.dim)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for trial in range(3):
        tree = random_tree(rng, shape.page, 12, 500 if trial else 1300)
        before = _C.attention_keys()[1]
        compare(Batch(tree, shape, dtypes[(shape.dim + trial) % 3]), rng, 3)
        assert (_C.attention_keys()[1] > before) == (2 * shape.heads // shape.kv_heads <= ROWS)


@pytest.mark.parametrize("isa", slow_except(_C.instruction_sets(), *_C.instruction_sets()[:-1]))
@pytest.mark.parametrize("heads", [2, 20])
def test_latent_rows_that_share_pages_are_those_alone(heads: int, isa: str) -> None:
    _C.select(isa)
    rng = random.Random(heads)
    for page, dtype in ((16, torch.bfloat16), (7, torch.float32)):
        tree = random_tree(rng, page, 10, 700)
        compare(Batch(tree, Shape(heads, 1, 48, page), dtype, latent=True), rng, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_trees(seed: int) -> None:
    rng = random.Random(seed)
    shape = rng.choice(SHAPES)
    tree = random_tree(rng, shape.page, rng.randint(2, 90), rng.choice([80, 600, 2500]))
    compare(Batch(tree, shape, rng.choice([torch.bfloat16, torch.float32, torch.float16])), rng, 6)


def counted(batch: Batch, rows: list[int]) -> tuple[int, int]:
    """Keys that a call saw, and those that were not read for it alone."""
    before = _C.attention_keys()
    batch.attend(rows)
    seen, shared = _C.attention_keys()
    return seen - before[0], shared - before[1]


def group_of(members: int, prefix: int, added: int, shape: Shape) -> Batch:
    """Rows behind one prefix, each with `added` positions of its own."""
    tree = Tree(shape.page, [list(range(prefix // shape.page))], [prefix], [1], prefix // shape.page)
    for _ in range(members):
        tree.branch(0, added)
    return Batch(tree, shape, torch.bfloat16)


def test_keys_of_a_group_are_read_once() -> None:
    """The rows stand in any order; a tile has 32 rows, here of sixteen requests with two heads each."""
    _C.set_threads(1)
    members, prefix, added = 40, 10 * KEYS, 9
    batch = group_of(members, prefix, added, Shape(4, 2, 32, 16))
    rows = list(range(1, members + 1))
    for trial in range(3):
        random.Random(trial).shuffle(rows)
        tiles = -(-members // 16)
        assert counted(batch, rows) == (members * (prefix + added), (members - tiles) * prefix)


@pytest.mark.parametrize("threads", [1, 2, 32])
def test_a_group_is_work_for_all_threads_with_the_same_bits(threads: int) -> None:
    """Tiles have fewer rows, eight at the least, where threads would lack work: 64 for 32 threads, of four KV heads."""
    members, prefix, added = 64, 4 * KEYS, 9
    batch = group_of(members, prefix, added, Shape(8, 4, 32, 16))
    rows = list(range(1, members + 1))
    _C.set_threads(1)
    alone = torch.cat(batch.attend(rows))
    _C.set_threads(threads)
    _, shared = counted(batch, rows)
    tiles = members - shared // prefix
    assert tiles == {1: 4, 2: 4, 32: 16}[threads]
    assert torch.equal(torch.cat(batch.attend(rows)), alone)


def test_whole_blocks_are_shared_and_no_others() -> None:
    _C.set_threads(1)
    for prefix, blocks in ((48, 0), (64, 1), (112, 1), (128, 2)):
        batch = group_of(3, prefix, 5, Shape(2, 1, 32, 16))
        assert counted(batch, [1, 2, 3])[1] == 2 * blocks * KEYS


def test_groups_within_a_batch_of_others_are_seen() -> None:
    """Two groups behind one prompt, and rows that share nothing, mixed."""
    _C.set_threads(1)
    shape = Shape(2, 1, 32, 16)
    tree = Tree(16, [list(range(8))], [128], [1], 8)
    for _ in range(2):
        tree.branch(0, 256)  # rows 1 and 2: the prompt and 16 pages
    for parent in (1, 2, 1, 2, 1, 2):
        tree.branch(parent, 3)
    for _ in range(4):
        count = 20
        tree.tables.append(list(range(tree.num_pages, tree.num_pages + count)))
        tree.num_pages += count
        tree.lengths.append(count * 16)
        tree.queries.append(1)
    batch = Batch(tree, shape, torch.bfloat16)
    leaves = [3, 9, 4, 10, 5, 6, 11, 7, 8, 12]
    assert counted(batch, leaves)[1] == 2 * 2 * 384 + 128
    assert counted(batch, [9, 10, 11, 12])[1] == 0


def test_few_rows_are_divided_among_many_threads() -> None:
    """A tile of all rows would leave threads without work."""
    batch = group_of(16, 256, 9, Shape(2, 1, 32, 16))
    rows = list(range(1, 17))
    _C.set_threads(1)
    alone = batch.attend(rows)
    assert counted(batch, rows)[1] == 15 * 256
    _C.set_threads(8)
    assert counted(batch, rows)[1] == 12 * 256
    assert all(torch.equal(a, b) for a, b in zip(alone, batch.attend(rows), strict=True))


def test_a_page_outside_the_cache_is_refused_wherever_it_is() -> None:
    batch = group_of(3, 128, 40, Shape(2, 1, 32, 16))
    for row, at in ((1, 0), (3, 7), (2, 10), (3, 10)):
        tables = batch.tables.clone()
        batch.tables[row, at] = 10_000
        with pytest.raises(ValueError, match="a page is outside the cache"):
            batch.attend([1, 2, 3])
        batch.tables = tables
    batch.attend([1, 2, 3])
