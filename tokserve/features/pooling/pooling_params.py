"""`tokserve.PoolingParams`: what is made of a pooling request's vector, with vLLM's arguments.

The engine is not told: it gets the struct of `params`, which follows from the model and the task.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from tokserve.base.errors import RequestError, invalid

# of vLLM's, but for these values: why there is no such thing here
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "step_tag_id": ((None,), "vectors are of the last token, or of all"),
    "returned_token_ids": ((None,), "the logits of all labels are returned"),
    "late_interaction_params": ((None,), "ask for the vectors of tokens, and compare them"),
    "late_chunking_params": ((None,), "ask for the vectors of tokens, and average them"),
    "extra_kwargs": ((None, {}), "no plugin reads it"),
}


@dataclass(slots=True)
class PoolingParams:
    """`use_activation`: to length 1, or to probabilities; None: as the model says; `normalize` is its older name.
    `dimensions`: cut a vector to so many values.  `task` must be that of the call, if it is given.  The next three have
    no effect: the prefix cache does not change results, and there is one output, at the end.

    Raises RequestError.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: Any = None
    late_chunking_params: Any = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, (harmless, reason) in REFUSED.items():
            if getattr(self, name) not in harmless:
                raise invalid(name, f"is not supported: {reason}", code="unsupported")
        for name in ("use_activation", "normalize"):
            if not isinstance(getattr(self, name), bool | None):
                raise invalid(name, f"must be a boolean, got {getattr(self, name)!r}")
        for name in ("dimensions", "truncate_prompt_tokens"):
            if type(getattr(self, name)) not in (int, type(None)):
                raise invalid(name, f"must be an integer, got {getattr(self, name)!r}")

    @property
    def activates(self) -> bool | None:
        """`use_activation`, by either name."""
        return self.normalize if self.use_activation is None else self.use_activation

    def clone(self) -> Self:
        """A copy that shares nothing."""
        return copy.deepcopy(self)


def each_pooling(value: Any, count: int, **given: Any) -> list[PoolingParams]:
    """The parameters of each of `count` prompts: `value` is one for all, or one each; what is `given` by the call comes
    before theirs.  Raises RequestError."""
    one = value is None or isinstance(value, PoolingParams | Mapping)
    listed: Any = [value] * count if one else value
    if not isinstance(listed, Sequence) or not all(isinstance(entry, PoolingParams | Mapping) for entry in listed):
        if not one:
            raise RequestError(
                f"pooling_params must be PoolingParams, or a list with one for each prompt, got {value!r}",
                field="pooling_params",
            )
        listed = [PoolingParams()] * count
    if len(listed) != count:
        raise RequestError(f"there are {count} prompts and {len(listed)} pooling_params", field="pooling_params")
    names = {name: one for name, one in given.items() if one is not None}
    return [_with(entry, names) for entry in listed]


def _with(params: PoolingParams | Mapping[str, Any], given: Mapping[str, Any]) -> PoolingParams:
    known = [field.name for field in fields(PoolingParams)]
    values = dict(params) if isinstance(params, Mapping) else {name: getattr(params, name) for name in known}
    if unknown := values.keys() - set(known):
        raise RequestError(f"unknown field 'pooling_params.{min(unknown)}'", field=f"pooling_params.{min(unknown)}")
    return PoolingParams(**values | dict(given))
