"""Metrics that rooms declare over what their features of the engine report (`StepStats.rooms`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

# from what the rooms of an engine report, and the facts of its `Ready`; by the values of the label, if there is one
Value = Callable[[Mapping[str, Any], Mapping[str, Any]], float | Mapping[str, float]]


class EngineMetric(NamedTuple):
    """A metric with a sample for each engine, or for each value of `label` in each engine.

    `name`: without the prefix, and without the suffix of a counter.  `text`: its description.
    """

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    value: Value
    label: str = ""


def reported(name: str) -> Value:
    """What a room reports under this name; 0 before it has."""
    return lambda values, _: values.get(name, 0)


def add_reports(reports: Sequence[Any]) -> Any:
    """The sum of what several engines report under a name: of numbers, or of lists, tuples or mappings of them."""
    first = reports[0]
    if isinstance(first, Mapping):
        names = {name: None for report in reports for name in report}
        return {name: add_reports([report[name] for report in reports if name in report]) for name in names}
    if isinstance(first, (list, tuple)):
        longest = max(map(len, reports))
        return [sum(report[i] for report in reports if i < len(report)) for i in range(longest)]
    return sum(reports)
