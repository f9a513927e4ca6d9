"""Grammar rules of an object's properties in a notation of its own: their order, and how many there must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokserve.features.chat.grammars.schemas import NotExpressible, Schema

MOST_RULES = 4000  # for the properties of one object whose number is bounded


@dataclass(frozen=True, slots=True)
class Member:
    """A property: the rule of its name and value, and whether the object must have it."""

    rule: str
    required: bool


def demanded(schema: Schema, name: str) -> dict[str, Any]:
    """The schemas of the properties of `name` by their names, those that it only requires included.  Raises
    NotExpressible for one that it requires and does not allow."""
    more = [key for key in schema.required if key not in schema.properties]
    if more and schema.additional is False:
        raise NotExpressible(f"the parameters of {name!r} require {more[0]!r} and do not have it")
    return schema.properties | dict.fromkeys(more, schema.additional)


def sequence(
    members: Sequence[Member], other: str, comma: str, bounds: tuple[int, int | None], extra: dict[str, str]
) -> str | None:
    """The right side of the rule for the members in their order, with `comma` between those that are there; None: no
    number of them is within the `bounds`.

    `other`: the rule of a member that the schema does not name, which come last; "": there is none.  `extra` gets the
    rules that this one needs.  Raises NotExpressible where these are too many.
    """
    low, high = bounds
    if high is not None and low > high:
        return None
    if high is not None and not other and high >= len(members):
        high = None
    if not comma and high is None and low <= sum(member.required for member in members):
        parts = [member.rule if member.required else f"({member.rule})?" for member in members]
        return " ".join([*parts, f"({other})*" if other else ""])
    most = max(1, low) if high is None else high  # the members before a place are counted up to here
    if len(members) * min(most + 1, len(members)) > MOST_RULES:
        raise NotExpressible(f"minProperties and maxProperties of up to {most} need too many rules")
    names = [_named(member.rule, extra) for member in members]
    other = _named(other, extra) if other else ""
    rests = [_others(other, comma, low, high, count) for count in range(most + 1)]  # by the members before
    for place, member, rule in reversed([*zip(range(len(members)), members, names, strict=True)]):
        here: list[str | None] = []
        for count in range(min(place, most) + 1):
            first = f"{comma if count else ''} {rule}".strip()
            after = rests[min(count + 1, most)] if high is None or count < high else None
            ways = [] if after is None else [f"{first} {after}".strip()]
            if not member.required and rests[count] is not None:
                ways.append(rests[count] or '""')
            here.append(_named(" | ".join(ways), extra) if ways else None)
        rests = here
    return rests[0]


def _others(other: str, comma: str, low: int, high: int | None, count: int) -> str | None:
    """The rule of the members that the schema does not name, after `count` others."""
    least, most = max(0, low - count), None if high is None else high - count
    if not other or most == 0:
        return None if least else ""
    if not count:  # no comma before the first
        upper = "" if most is None else most - 1
        several = f"{other} ({comma} {other}){{{max(0, least - 1)},{upper}}}"
        return several if least else f"({several})?"
    return f"({comma} {other}){{{least},{'' if most is None else most}}}"


def _named(rule: str, extra: dict[str, str]) -> str:
    """The name of a new rule."""
    name = f"member{len(extra)}"
    extra[name] = rule
    return name
