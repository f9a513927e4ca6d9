"""`tokserve.SamplingParams`: the sampling parameters of a request as Python code writes them, with vLLM's arguments.

It can be changed, takes positional arguments and None for every default, and is checked when it is made.  What is sent
is the struct of `params`: `wire` makes one, and `AsyncLLM` and `LLM` call it.  Fields of vLLM's that only a caller in
Python can use are declared here, and those that are refused, with the reason.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, Self

import msgspec

from tokserve.base.errors import RequestError, invalid
from tokserve.client.inputs import typed
from tokserve.protocol import params

MAX_BIAS = 100.0  # `from_optional` clips to this, as OpenAI's API does
# in vLLM's order, which positional arguments have
POSITIONS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "watermarking",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "stream_interval",
    "skip_clone",
)
# of vLLM's, but for these values: why there is no such thing here
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {}
# the same of older versions: these are no fields
FORMER: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "use n"),
    "use_beam_search": ((None, False), "use LLM.beam_search"),
    "length_penalty": ((None, 1), "use LLM.beam_search"),
    "early_stopping": ((None, False), "use LLM.beam_search"),
    "logits_processors": ((None, []), "no code is loaded"),
    "guided_decoding": ((None,), "use structured_outputs"),
    "output_text_buffer_length": ((None, 0), "it follows from stop"),
}


class RequestOutputKind(Enum):
    """What each output of `AsyncLLM.generate` has: all tokens so far, those since the one before it, or, as the only
    output, all tokens at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class _Arguments(msgspec.StructMeta):
    """Makes instances from vLLM's arguments."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        if len(args) > len(POSITIONS):
            raise TypeError(f"SamplingParams takes at most {len(POSITIONS)} positional arguments, got {len(args)}")
        for name, value in zip(POSITIONS, args, strict=False):
            if name in values:
                raise TypeError(f"SamplingParams has two values of {name!r}")
            values[name] = value
        known = dict.fromkeys((*params.SamplingParams.__struct_fields__, *cls.__struct_fields__))
        for name in [name for name in values if name not in known]:
            if name not in FORMER:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"SamplingParams has no argument {name!r}{hint}")
            _refuse(name, values.pop(name), FORMER)
        made = super().__call__(**{name: value for name, value in values.items() if value is not None})
        made.output_kind = _output_kind(made.output_kind)
        made.wire().validate()
        return made


class SamplingParams(params.SamplingParams, frozen=False, kw_only=True, metaclass=_Arguments):  # type: ignore[misc]
    """How to draw tokens and when to stop: the fields of `params.SamplingParams`, and these.

    `output_kind`, `stream_interval` (at least so many tokens between two outputs): when and in which parts
    `AsyncLLM.generate` gives its outputs.  `truncate_prompt_tokens`: of the prompt, the last so many tokens are kept;
    -1: as many as the context has room for.  `flat_logprobs`, `skip_clone`, `skip_reading_prefix_cache` and
    `watermarking` have no effect: logprobs are arrays anyway, the prefix cache does not change results, and no
    watermark is configured.  Values of numpy and torch count as numbers and lists.

    Raises RequestError for a value that no model can take, TypeError for an argument that does not exist.
    """

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    truncate_prompt_tokens: int | None = None
    flat_logprobs: bool = False
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None
    watermarking: bool | None = None

    @staticmethod
    def from_optional(**values: Any) -> SamplingParams:
        """Parameters of values that may be None, the ids of `logit_bias` numbers or text; biases are clipped."""
        bias = values.get("logit_bias")
        if bias is not None:
            try:
                clipped = {int(token): min(MAX_BIAS, max(-MAX_BIAS, value)) for token, value in bias.items()}
            except (AttributeError, TypeError, ValueError):
                raise invalid("logit_bias", f"must be a number for each token id, got {bias!r}") from None
            values["logit_bias"] = clipped
        made: SamplingParams = SamplingParams(**values)
        return made

    def clone(self) -> Self:
        """A copy that shares nothing."""
        return copy.deepcopy(self)

    def wire(self) -> params.SamplingParams:
        """What is sent: of the declared types, though perhaps out of range.  Raises RequestError naming a field."""
        for name in REFUSED:
            _refuse(name, getattr(self, name), REFUSED)
        _check_integer("stream_interval", self.stream_interval, 1)
        _check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
        _output_kind(self.output_kind)
        values = {name: _plain(getattr(self, name)) for name in params.SamplingParams.__struct_fields__}
        for name in ("logprobs", "prompt_logprobs"):
            if values[name] is True:
                values[name] = 1
        return typed(params.SamplingParams, {name: value for name, value in values.items() if value is not None})


class OutputRules(NamedTuple):
    """What a caller in Python wants of its outputs and its prompt, beside the parameters that are sent."""

    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    interval: int = 1
    keep: int | None = None  # tokens of the prompt


def sampling_of(value: Any) -> params.SamplingParams:
    """What is sent for parameters in either form.  Raises RequestError."""
    if isinstance(value, SamplingParams):
        return value.wire()
    return typed(params.SamplingParams, value)


def output_rules(value: Any) -> OutputRules:
    """The rest of them, of parameters in either form."""
    if not isinstance(value, SamplingParams):
        return OutputRules()
    return OutputRules(_output_kind(value.output_kind), value.stream_interval or 1, value.truncate_prompt_tokens)


def _refuse(name: str, value: Any, rules: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    harmless, reason = rules[name]
    if not any(value is one or (type(value) in (int, float, list) and value == one) for one in harmless):
        raise RequestError(f"{name} is not supported: {reason}", field=name, code="unsupported")


def _check_integer(name: str, value: Any, low: int) -> None:
    if value is not None and (type(value) is not int or value < low):
        raise invalid(name, f"must be an integer of at least {low}, got {value!r}")


def _output_kind(value: Any) -> RequestOutputKind:
    """One of the kinds; vLLM's own enumeration has the same names."""
    if value is None:
        return RequestOutputKind.CUMULATIVE
    name = value.name if isinstance(value, Enum) else str(value)
    if name not in RequestOutputKind.__members__:
        raise invalid("output_kind", f"must be one of {', '.join(RequestOutputKind.__members__)}, got {value!r}")
    return RequestOutputKind[name]


def _plain(value: Any) -> Any:
    """A value of numpy or torch, or a list or mapping with some, as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    if type(value) is dict:
        return {_plain(key): _plain(one) for key, one in value.items()}
    return value
