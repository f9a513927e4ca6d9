"""SGLang's sampling parameters as `SamplingParams`.

Names, defaults and meanings are SGLang's; an unknown name is an error there too.  What this server cannot do is refused
by name, and values without an effect are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tokserve.base.errors import RequestError, invalid
from tokserve.protocol.params import LogprobsMode, SamplingParams, StructuredOutputs
from tokserve.server import compat
from tokserve.server.http import body, errors

PREFIX = "sampling_params."
GREEDY = 1e-6  # a temperature below is 0
ANY_JSON = "$$ANY$$"  # as json_schema: any JSON object
FORMS = ("json_schema", "regex", "choice", "ebnf")
# the names of `SamplingParams` and `RequestOptions` in the body of /generate
OTHER_NAMES: Mapping[str, str] = {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
    "prompt_logprobs_start": "logprob_start_len",
    "return_sampling_mask": "return_sampling_mask",
    "request_id": "rid",
    "max_tokens": f"{PREFIX}max_new_tokens",
    "min_tokens": f"{PREFIX}min_new_tokens",
    "seed": f"{PREFIX}sampling_seed",
    "thinking_token_budget": f"{PREFIX}max_thinking_tokens",
    "include_stop_str_in_output": f"{PREFIX}no_stop_trim",
    "model": "lora_path",
}


class SglangSamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of /generate.  null is the default, but for `max_new_tokens`, where it is the rest of the
    context.  `logprobs_mode` is this server's own."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    max_thinking_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    logprobs_mode: LogprobsMode | None = None
    ebnf: str | None = None
    stop_regex: Any = None  # this and the next three are refused
    structural_tag: Any = None
    beam_width: Any = None
    watermark: Any = None
    custom_params: Any = None  # this and the next: no effect
    stream_interval: Any = None


_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logprobs_mode",
)
_RENAMED = {
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
    "max_thinking_tokens": "thinking_token_budget",
}


def read_sampling(value: Any, field: str) -> SglangSamplingParams:
    """The parameters of one prompt; `field`: their path in the body.  Raises `RequestError` naming a wrong one."""
    known = [name for name in SglangSamplingParams.__struct_fields__ if name not in compat.SGLANG_PARAMS]
    params = body.convert({} if value is None else value, SglangSamplingParams, field, known=known)
    for name, rule in compat.SGLANG_PARAMS.items():
        errors.refuse_unsupported(f"{field}.{name}", getattr(params, name), rule.no_effect, rule.note)
    return params


def temperature_of(sent: SglangSamplingParams) -> float:
    """The temperature, 0 for one so low that SGLang takes the most probable token."""
    temperature = 1.0 if sent.temperature is None else sent.temperature
    return 0.0 if 0 <= temperature < GREEDY else temperature


def translate(sent: SglangSamplingParams, **computed: Any) -> SamplingParams:
    """The parameters under this server's names; `computed`: what other fields of the body say.  As in SGLang, what the
    model recommends has no effect."""
    values: dict[str, Any] = {}
    for name, target in (*((name, name) for name in _SAME), *_RENAMED.items()):
        value = getattr(sent, name)
        if value is not None:
            values[target] = value
    if sent.temperature is not None:
        values["temperature"] = temperature_of(sent)
    values["max_tokens"] = sent.max_new_tokens
    if sent.max_new_tokens == 0:
        values["min_tokens"] = 0
    if sent.logit_bias is not None:
        values["logit_bias"] = {_token(key): bias for key, bias in sent.logit_bias.items()}
    values["structured_outputs"] = _form(sent)
    return SamplingParams(**(values | computed))


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 9):
        raise invalid(f"{PREFIX}logit_bias", f"must have token ids as keys, got {key[:20]!r}")
    return int(key)


def form_field(params: Iterable[SglangSamplingParams]) -> str:
    """The path of the first form that is sent, for errors about it."""
    sent = (name for one in params for name in FORMS if getattr(one, name) not in (None, ""))
    return PREFIX + next(sent, FORMS[0])


def _form(sent: SglangSamplingParams) -> StructuredOutputs | None:
    forms = [name for name in FORMS if getattr(sent, name) not in (None, "")]
    if len(forms) > 1:
        raise RequestError(f"give only one of {' and '.join(forms)}", field=PREFIX + forms[1])
    if not forms:
        return None
    if forms == ["json_schema"]:
        if sent.json_schema == ANY_JSON:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=sent.json_schema)
    if forms == ["ebnf"]:
        return StructuredOutputs(grammar=sent.ebnf)
    return StructuredOutputs(**{forms[0]: getattr(sent, forms[0])})
