"""The figures of a run: counts, rates, percentiles, goodput; as JSON and as a table.

Names in the JSON are those of vLLM's benchmark, so that scripts can read both.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokserve.base.errors import StartError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
    "latency": "latency of a batch",
}
GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class Outcome:
    """One request.  Times are seconds; `start`, `sent` and `end` count from the beginning of the run.  `ttft` and
    `e2el` begin at `start`, the scheduled time; `sent` is when the request was sent."""

    start: float
    sent: float = 0.0
    end: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    itl: list[float] = field(default_factory=list)
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def e2el(self) -> float:
        return self.end - self.start


def parse_percentiles(text: str) -> list[float]:
    """`50,99.9` as numbers.  Raises StartError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0.0 <= value <= 100.0 for value in values):
        raise StartError(f"--percentiles must be numbers from 0 to 100 with commas between them, got {text!r}")
    return values


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as limits in milliseconds.  Raises StartError."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in GOODPUT or not value > 0.0:
            raise StartError(f"--goodput takes {', '.join(f'{g}:MS' for g in GOODPUT)}, got {pair!r}")
        limits[name] = value
    return limits


def meets_goodput(outcome: Outcome, limits: dict[str, float]) -> bool:
    """Whether a served request is within every limit; one without a second token is within any tpot."""
    return all((getattr(outcome, name) or 0.0) * 1e3 <= limit for name, limit in limits.items())


def _label(percentile: float) -> str:
    return f"p{percentile:g}"


def spread(name: str, seconds: Iterable[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean, median, std and percentiles in ms under their names; None where nothing was measured."""
    ms = np.array(list(seconds), np.float64) * 1e3
    labels = ["mean", "median", "std", *(_label(p) for p in percentiles)]
    if not len(ms):
        return {f"{label}_{name}_ms": None for label in labels}
    values = [np.mean(ms), np.median(ms), np.std(ms), *np.percentile(ms, percentiles)]
    return {f"{label}_{name}_ms": float(value) for label, value in zip(labels, values, strict=True)}


def totals(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """Counts and rates over the requests that were served."""
    served = [o for o in outcomes if o.error is None]
    tokens_in, tokens_out = sum(o.input_tokens for o in served), sum(o.output_tokens for o in served)
    span = max(duration, 1e-9)
    return {
        "duration": duration,
        "completed": len(served),
        "failed": len(outcomes) - len(served),
        "total_input_tokens": tokens_in,
        "total_cached_tokens": sum(o.cached_tokens for o in served),
        "total_output_tokens": tokens_out,
        "request_throughput": len(served) / span,
        "output_throughput": tokens_out / span,
        "total_token_throughput": (tokens_in + tokens_out) / span,
        "finish_reasons": dict(Counter(reason for o in served for reason in o.finish_reasons)),
        "first_error": next((o.error for o in outcomes if o.error is not None), None),
    }


def result(
    outcomes: Sequence[Outcome], duration: float, percentiles: Sequence[float], limits: dict[str, float]
) -> dict[str, Any]:
    """The result of a run under vLLM's names."""
    served = [o for o in outcomes if o.error is None]
    row = totals(outcomes, duration)
    num_good = sum(meets_goodput(o, limits) for o in served)
    row["request_goodput"] = num_good / max(duration, 1e-9) if limits else None
    row |= spread("ttft", (o.ttft for o in served if o.ttft is not None), percentiles)
    row |= spread("tpot", (o.tpot for o in served if o.tpot is not None), percentiles)
    row |= spread("itl", (gap for o in served for gap in o.itl), percentiles)
    row |= spread("e2el", (o.e2el for o in served), percentiles)
    row["mean_send_delay_ms"] = float(np.mean([o.sent - o.start for o in served]) * 1e3) if served else None
    return row


def cache_hits(outcomes: Sequence[Outcome], shared: int) -> dict[str, int]:
    """Hits of the prefix cache.  `shared`: cached tokens that the chat template puts before all prompts.  A prompt is
    repeated if at least half of its own tokens were cached: a block of them may be by chance."""
    served = [o for o in outcomes if o.error is None]
    lengths = [(o.cached_tokens - shared, o.input_tokens - shared) for o in served]
    return {
        "template_cached_tokens": sum(min(shared, o.cached_tokens) for o in served),
        "repeated_prompts": sum(cached > 0 and 2 * cached >= length for cached, length in lengths),
    }


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Lists with an entry per request, in the order of the requests."""
    return {
        "input_lens": [o.input_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itl for o in outcomes],
        "e2els": [o.e2el for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
    }


def table(row: dict[str, Any], percentiles: Sequence[float]) -> str:
    """The table that is printed after a run."""
    shared = row.get("template_cached_tokens")
    template = f", {shared} of them the chat template's" if shared else ""
    kernels = ["kernels    none: the server is about a hundred times slower than with its compiled extension"]
    lines = (kernels if row.get("kernels") == "none" else []) + [
        f"requests   {row['completed']} served, {row['failed']} failed in {row['duration']:.2f} s",
        f"tokens     {row['total_input_tokens']} in ({row['total_cached_tokens']} cached{template}), "
        f"{row['total_output_tokens']} out",
        f"rate       {row['request_throughput']:.2f} req/s, {row['output_throughput']:.1f} output tok/s, "
        f"{row['total_token_throughput']:.1f} total tok/s",
    ]
    if row.get("request_goodput") is not None:
        lines.append(f"goodput    {row['request_goodput']:.2f} req/s")
    if row["finish_reasons"]:
        lines.append("finished   " + ", ".join(f"{name} {count}" for name, count in row["finish_reasons"].items()))
    columns = ["mean", "median", "std", *(_label(p) for p in percentiles)]
    metrics = [m for m in METRICS if row.get(f"mean_{m}_ms") is not None]
    if metrics:
        lines += ["", f"{'ms':<24}" + "".join(f"{column:>10}" for column in columns)]
        for name in metrics:
            values = "".join(f"{row[f'{column}_{name}_ms']:>10.2f}" for column in columns)
            lines.append(f"{METRICS[name]:<24}{values}")
    if row["first_error"] is not None:
        lines += ["", f"first error: {row['first_error']}"]
    return "\n".join(lines)


def check_path(path: str | None, flag: str) -> None:
    """Raise StartError if the result could not be written, before a long run."""
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise StartError(f"{flag}: the directory of {path} does not exist")
    if path is not None and os.path.isdir(path):
        raise StartError(f"{flag}: {path} is a directory")


def write_row(row: dict[str, Any], path: str) -> None:
    """Write the result as one JSON object."""
    try:
        Path(path).write_text(json.dumps(row, allow_nan=False) + "\n")
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None
