"""Parts of prompts that change how their tokens are computed: images, and the second texts of pairs."""

from __future__ import annotations

import numpy as np

from tokserve.protocol.images import KIND, ImageFormat, image_grid, rope_positions
from tokserve.protocol.plan import Int32, NewRow, StepPlan
from tokserve.runner.tables.attention_rows import DividedRows, Span, divide
from tokserve.runner.tables.slots import Int64


class PromptParts:
    """What the requests in the slots have of these."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        # of slots with images: positions along three axes [3, n] up to the last image's end, and the shift after it
        self._axes: dict[int, tuple[Int64, int]] = {}
        self._images: dict[int, list[Span]] = {}  # of slots with images whose tokens see each other
        self._seconds: dict[int, int] = {}  # of slots with pairs: where the second text begins

    def assign(self, row: NewRow, kind: ImageFormat | None) -> None:
        """A request takes its slot; `kind`: of images, if the model reads some."""
        for table in (self._axes, self._images, self._seconds):
            table.pop(row.slot, None)
        if row.second >= 0:
            self._seconds[row.slot] = row.second
        images = [feature for feature in row.features if feature.kind == KIND]
        if images and kind is not None and kind.axes:
            grids = [(feature.start, image_grid(feature.data)) for feature in images]
            self._axes[row.slot] = rope_positions(grids, kind.merge)
        if images and kind is not None and kind.bidirectional:
            self._images[row.slot] = [(feature.start, feature.start + feature.length) for feature in images]

    @property
    def has_axes(self) -> bool:
        """Whether a slot's tokens stand elsewhere in the rope tables than in the prompt."""
        return bool(self._axes)

    def are_in(self, plan: StepPlan) -> bool:
        """Whether a row of the plan is computed otherwise than by its tokens and their number."""
        if not (self._axes or self._images or self._seconds):
            return False
        slots = plan.slots.tolist()
        return any(slot in self._axes or slot in self._seconds for slot in slots) or self.divided(plan) is not None

    def divided(self, plan: StepPlan) -> DividedRows | None:
        """The plan's rows for attention; None: as they are."""
        return divide(plan, self._images) if self._images else None

    def rope_positions(
        self, slots: Int32, computed: Int32, counts: Int32, positions: Int64
    ) -> tuple[Int64, Int64 | None]:
        """Where the tokens [T] of a plan's rows stand in the rope tables; and if some of them are an image's, this by
        axis [3, T]."""
        with_images = [row for row, slot in enumerate(slots.tolist()) if slot in self._axes]
        if not with_images:
            return positions, None
        rope, axes = positions.copy(), np.broadcast_to(positions, (3, len(positions))).copy()
        starts = np.add.accumulate(counts, dtype=np.int64) - counts
        for row in with_images:
            known, shift = self._axes[int(slots[row])]
            start, count, first = int(starts[row]), int(counts[row]), int(computed[row])
            axes[:, start : start + count] += shift
            part = known[:, first : first + count]
            axes[:, start : start + part.shape[1]] = part
            rope[start : start + count] = axes[0, start : start + count]
        return rope, axes if (axes != rope).any() else None

    def types(self, slots: Int32, counts: Int32, positions: Int64) -> Int64 | None:
        """The types of the tokens [T] of a plan's rows: 1 in the second text of a pair, else 0; None: there are no
        pairs."""
        if not self._seconds:
            return None
        starts = np.array([self._seconds.get(slot, self._most_tokens) for slot in slots.tolist()], np.int64)
        return (positions >= starts.repeat(counts)).astype(np.int64)
