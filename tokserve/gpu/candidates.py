"""Switches of kernels that no GPU has decided on yet: one table, and what this process uses of it.

A candidate computes the bits of what it replaces; the start of a server compares them on the GPU that it has, and does
without candidates where they differ.  `benchmarks/gpu_tune.py --candidates` measures each on a card and writes those
that gain to the user's file, which starts read if `--gpu-candidates` does not name any.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokserve.base.errors import StartError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A switch.  `kernels`: those that it changes; `predicted`: what it is to gain, before a GPU has run it."""

    name: str
    kernels: tuple[str, ...]
    predicted: str
    default: bool = False


CANDIDATES = (
    Candidate(
        "decode_tile",
        ("decode",),
        "attention of a step in tiles of 16 rows: 11.7 -> 9.7 us of one row with 1024 keys; float8 caches 1.6 times as "
        "fast; heads of 256 twice",
    ),
    Candidate(
        "decode_early",
        ("decode",),
        "keys of earlier steps are fetched, and the next kernel begins, before the inputs are there: -1.5 us of 11.7",
    ),
    Candidate(
        "sample_few",
        ("maxima", "bound", "largest", "draw"),
        "a small top-k is drawn from without dividing, clearing or filtering logits: 256 rows 410 -> 90 us",
    ),
    Candidate(
        "linear_tma",
        ("linear_tma", "gated_tma", "add_chains"),
        "a warp of its own fetches the inputs of products of 65 rows and more: 8B with 256 rows 220 -> 175 us a layer",
    ),
    Candidate(
        "float8_tma",
        ("linear_tma",),
        "the same of float8: 8B with 256 rows 22.7 -> 18 ms a step, with decode_tile 14",
    ),
    Candidate(
        "float8_rows",
        ("norm", "activate"),
        "a norm or a gate rounds its rows to float8 for the product after it: 3 of 13 kernels a layer less, 8B float8 "
        "with one row 5 %",
    ),
    Candidate(
        "chains_next",
        ("linear", "linear_early", "norm", "norm_rope_store", "add_chains"),
        "chains of a product of up to 16 rows are added by the norm or the rotation after it, not by the last of its "
        "programs: -1.1 us of each of 3 products a layer, 0.6B with one row 7 %, 8B 1.7 %",
    ),
    Candidate(
        "prompt_groups",
        ("prompt",),
        "attention of prompts by two groups of warps, whose keys another warp fetches: 8,192 tokens of 8B "
        "2.28 -> 1.15 ms a layer, 0.6B 1.4 times as fast",
    ),
    Candidate(
        "products_early",
        ("linear_early",),
        "products of up to 16 rows fetch weights into shared memory before their inputs are there: -2 us of each of 4 "
        "a layer, 0.6B with one row 1.275 -> 1.05 ms, 8B 4 %",
    ),
    Candidate(
        "experts_gated",
        ("gated_experts",),
        "an expert's gate and what it gates in one kernel: 30B-A3B with one row 3 us of a layer, with 256 rows 5 %",
    ),
    Candidate(
        "experts_dependent",
        ("route", "sort", "tiles", "experts", "gated_experts", "combine"),
        "a mixture's kernels begin while the ones before end: -0.25 us of each of 7 kernels a layer, 30B-A3B with one "
        "row 4 %",
    ),
    Candidate(
        "dependents_early",
        ("all dependent ones",),
        "a kernel lets the next one begin as soon as its own inputs are there: -0.3 us of each of 8 kernels a layer, "
        "0.6B with one row 5 %",
    ),
)
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}
FILE = Path("~/.config/tokserve/gpu-candidates.json")  # the names of those that are on, by the GPU's name
_on = {candidate.name for candidate in CANDIDATES if candidate.default}  # in this process


def is_on(name: str) -> bool:
    """Whether this process uses the candidate."""
    return name in _on


def in_use() -> list[str]:
    """The candidates that this process uses."""
    return [name for name in BY_NAME if name in _on]


def use(names: Iterable[str]) -> None:
    """Let this process use these candidates and no others.  Graphs keep what they were captured with."""
    _on.clear()
    _on.update(names)


def selected(names: str | None, gpu: str) -> list[str]:
    """The candidates that the option names, "all", or "none"; None: those of the user's file for this GPU, or the
    defaults.  Raises StartError for an unknown name."""
    if names is None:
        stored = stored_for(gpu)
        return [one.name for one in CANDIDATES if one.default] if stored is None else stored
    if names in ("all", "none"):
        return list(BY_NAME) if names == "all" else []
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in BY_NAME:
            raise StartError(f"option gpu_candidates: unknown candidate {name!r}; there are: {', '.join(BY_NAME)}")
    return chosen


def stored_for(gpu: str) -> list[str] | None:
    """What the user's file says of this GPU; None if it says nothing.  Names that no longer exist count for nothing."""
    path = FILE.expanduser()
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get(gpu)
        return None if names is None else [name for name in names if name in BY_NAME]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("%s is not read: %s", path, error)
        return None


def store(gpu: str, names: Iterable[str]) -> Path:
    """Write the names for this GPU to the user's file; returns its path."""
    path = FILE.expanduser()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(stored | {gpu: list(names)}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path
