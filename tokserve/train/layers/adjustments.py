"""Bias and penalties of a request: what its sampling parameters do to logits before the temperature, with a gradient.

They follow the server's order: bias, penalties (whose history is the prompt and the output so far), then the mask and
the temperature.  What only forbids ids is in the sampling mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve import ops
from tokserve.base.errors import RequestError
from tokserve.protocol.params import PARAMS_REFUSED, PARAMS_WITHOUT_EFFECT, SamplingParams

MAX_LOGIT = float(np.finfo(np.float32).max)
# as the server's: beyond these, logits are clamped and reckoned from the largest
MAX_PLAIN_BIAS, MAX_PLAIN_REPETITION = 2.0**8, 2.0**4
# what restricts a draw; its effect is in the mask, which is then needed
RESTRICTIONS = (
    "top_k",
    "top_p",
    "min_p",
    "min_tokens",
    "allowed_token_ids",
    "bad_token_ids",
    "bad_token_sequences",
    "bad_words",
    "no_repeat_ngram_size",
    "thinking_token_budget",
    "structured_outputs",
)


OF_LOGITS = ("temperature", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", *RESTRICTIONS)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A request's bias and penalties."""

    ids: NDArray[np.int64]  # with a bias
    biases: NDArray[np.float32]
    presence: float
    frequency: float
    repetition: float
    extreme: bool  # of bias or repetition


@dataclass(frozen=True, slots=True)
class AdjustedRow:
    """An adjustment at one position: `history` int32 is what came before it, `prompt_len` ids of it the prompt."""

    adjustment: Adjustment
    history: NDArray[np.int32]
    prompt_len: int


def adjustment_of(
    number: int, params: Mapping[str, Any] | SamplingParams | None, temperature: float, *, masked: bool, vocab: int
) -> Adjustment | None:
    """The adjustment that a sequence's sampling parameters make; None: they change no logit.  Raises ValueError, naming
    what is wrong."""
    if params is None:
        return None
    chosen = _of_logits(f"sampling_params[{number}]", params)
    has_grammar = chosen.pop("structured_outputs", None) is not None
    try:
        checked = msgspec.convert(chosen, SamplingParams, str_keys=True)
        checked.validate()
    except (msgspec.ValidationError, RequestError) as error:
        raise ValueError(f"sampling_params[{number}]: {error}") from error
    if "temperature" in chosen and checked.temperature != temperature:
        raise ValueError(
            f"sampling_params[{number}].temperature is {checked.temperature}, but temperature {temperature}"
        )
    default = SamplingParams()
    restricting = [name for name in RESTRICTIONS if getattr(checked, name) != getattr(default, name)]
    restricting += ["structured_outputs"] * has_grammar
    if restricting and not masked and not (temperature == 0.0 and set(restricting) <= {"top_k", "top_p", "min_p"}):
        raise ValueError(f"sampling_params[{number}].{restricting[0]} restricts the draws: give sampling_masks as well")
    bias = {token: value for token, value in (checked.logit_bias or {}).items() if 0 <= token < vocab}
    repetition = min(checked.repetition_penalty, MAX_LOGIT)
    if not bias and (checked.presence_penalty, checked.frequency_penalty, repetition) == (0.0, 0.0, 1.0):
        return None
    biased = any(abs(value) > MAX_PLAIN_BIAS for value in (checked.logit_bias or {}).values())
    plain = 1 / MAX_PLAIN_REPETITION <= checked.repetition_penalty <= MAX_PLAIN_REPETITION
    values = np.clip(np.array(list(bias.values()), np.float64), -MAX_LOGIT, MAX_LOGIT).astype(np.float32)
    return Adjustment(
        np.array(list(bias), np.int64),
        values,
        checked.presence_penalty,
        checked.frequency_penalty,
        repetition,
        biased or not plain,
    )


def _of_logits(where: str, params: Mapping[str, Any] | SamplingParams) -> dict[str, Any]:
    """The values of a request's parameters that count here: of JSON, where null is a default and ids are texts, of
    numpy and torch, or those of an object.  Raises ValueError for what no request that is accepted has."""
    if isinstance(params, SamplingParams):
        params = {name: getattr(params, name) for name in OF_LOGITS}
    if not isinstance(params, Mapping):
        raise ValueError(f"{where} must be a mapping or null, got {type(params).__name__}")
    values = {}
    for name, value in params.items():
        has_effect = value is not None and name not in PARAMS_WITHOUT_EFFECT
        if name in OF_LOGITS and has_effect:
            values[name] = _plain(value)
        elif has_effect and name not in SamplingParams.__struct_fields__ and value not in PARAMS_REFUSED.get(name, ()):
            raise ValueError(f"{where}.{name} is no sampling parameter of a request to this server")
    return values


def _plain(value: Any) -> Any:
    """Numbers and lists, of numpy's and torch's."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value


def adjust(logits: Tensor, rows: Sequence[AdjustedRow | None]) -> tuple[Tensor, Tensor]:
    """logits [n, V], changed in place where a row has an adjustment, and which rows are extreme [n] bool."""
    extreme = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    numbers = [number for number, row in enumerate(rows) if row is not None]
    for number in numbers:
        row = rows[number]
        assert row is not None
        adjustment = row.adjustment
        extreme[number] = adjustment.extreme
        logits[number].index_add_(0, _tensor(adjustment.ids, logits), _tensor(adjustment.biases, logits))
        penalties = (adjustment.presence, adjustment.frequency, adjustment.repetition)
        if penalties != (0.0, 0.0, 1.0):
            columns = (torch.tensor([value], dtype=torch.float32, device=logits.device) for value in penalties)
            lens = (
                torch.tensor([size], dtype=torch.int32, device=logits.device)
                for size in (row.prompt_len, len(row.history))
            )
            part = logits[number : number + 1]
            penalized = ops.penalize(part, _tensor(row.history[None], logits), *lens, *columns)
            part.copy_(penalized.clamp(-MAX_LOGIT, MAX_LOGIT) if adjustment.extreme else penalized)
    return logits, extreme


def slopes(logits: Tensor, rows: Sequence[AdjustedRow | None]) -> list[tuple[Tensor, Tensor] | None]:
    """The ids and the factors by which repetition changes the gradient at them, by row; `logits` [n, V] as the
    head's."""
    factors: list[tuple[Tensor, Tensor] | None] = []
    for logit, row in zip(logits, rows, strict=True):
        if row is None or row.adjustment.repetition == 1.0:
            factors.append(None)
            continue
        adjustment = row.adjustment
        biases = torch.zeros_like(logit).index_add_(
            0, _tensor(adjustment.ids, logits), _tensor(adjustment.biases, logits)
        )
        ids = _tensor(np.unique(row.history).astype(np.int64), logits)
        positive = (logit + biases).index_select(0, ids) > 0.0
        factors.append((ids, torch.where(positive, 1.0 / adjustment.repetition, adjustment.repetition)))
    return factors


def _tensor(values: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
