"""Parses generate replies into `ChoiceOutput`s, which the renderers of the text routes render.

The tokens may come from any server; text, stop strings and logprobs follow the same rules as those of this one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.base.errors import RequestError, invalid
from tokserve.client.inputs import bare_id
from tokserve.client.outputs import TERMINATORS, ChoiceOutput, Column
from tokserve.dialects.openai.derender.bodies import ParsedChoice, ParsedReply
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS
from tokserve.protocol.params import MAX_CHOICES, SamplingParams
from tokserve.server.generation import PromptTokensDetails, Usage
from tokserve.server.http import body
from tokserve.server.replies import logprobs_parser
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.serving import Serving
from tokserve.text.detokenizer import Detokenizer
from tokserve.text.stops import StopStrings

R = TypeVar("R")


class ExternalReply:
    """The `generation.ReplyContext` of replies that were generated elsewhere."""

    def __init__(self, request_id: str | None, n: int) -> None:
        self.key = bare_id(request_id) if request_id else secrets.token_hex(16)
        self.n = n
        self.fingerprint: str | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.reported: ReplyMetrics | None = None  # the metrics of the server that generated
        self.prompts: list[list[int]] = []
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def usage(self, later_tokens: int = 0) -> Usage:
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens - later_tokens
        return Usage(
            prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(self.cached_tokens)
        )

    def metrics(self) -> ReplyMetrics | UnsetType:
        return UNSET if self.reported is None else self.reported

    def prompt_ids(self, index: int = 0) -> list[int]:
        return self.prompts[index // self.n]


class ReplyReader:
    """Parses generate replies into `ChoiceOutput`s.  `params` None: unknown, and all of the replies is shown.
    `with_prompt`: the parameters, as they are for a prompt."""

    def __init__(
        self,
        serving: Serving,
        params: SamplingParams | None,
        needs_prompt: bool,
        with_prompt: Callable[[SamplingParams, list[int]], SamplingParams] | None = None,
    ) -> None:
        self._serving = serving
        self._with_prompt = with_prompt
        self._eos = frozenset(serving.llm.ready.eos_token_ids)
        self.params = msgspec.structs.replace(
            params or SamplingParams(), return_sampling_mask=False, return_entropy=False
        )
        self._known = params is not None
        self._needs_prompt = needs_prompt or (params is not None and params.prompt_logprobs is not None)
        self._external: ExternalReply | None = None
        self._stops = StopStrings(self.params.stop_strings())
        self.ends: list[ChoiceOutput] = []

    @property
    def external(self) -> ExternalReply:
        """The context of the replies; add one first."""
        assert self._external is not None
        return self._external

    def add(self, value: Any, field: str, prompt: Sequence[int] | None, count: int | None, index: str) -> None:
        """Parse one reply.  `prompt` and `count`: the prompt's ids and length, if the client sends them; `index`: their
        index in these fields, for errors."""
        reply = body.convert(value, ParsedReply, field)
        where = f"{field}.choices"
        if not reply.choices:
            raise invalid(where, "must not be empty")
        if self._external is None:
            n = self.params.n if self._known else len(reply.choices)
            self._external = ExternalReply(reply.request_id, n)
            if not self._known and reply.choices[0].logprobs is not None:
                self.params = msgspec.structs.replace(self.params, logprobs=0)
        external = self._external
        external.kv_transfer_params = external.kv_transfer_params or reply.kv_transfer_params
        external.reported = external.reported or reply.metrics
        if external.n > MAX_CHOICES:
            raise invalid(where, f"must have at most {MAX_CHOICES} entries, got {external.n}")
        if sorted(choice.index for choice in reply.choices) != list(range(external.n)):
            raise invalid(where, f"must have each index from 0 to {external.n - 1} once")
        ids = self._prompt(reply, field, prompt, index)
        if self._with_prompt is not None:
            self.params = self._with_prompt(self.params, ids or [])
        external.prompt_tokens += prompt_length(reply, ids, count, index)
        if reply.usage is not None and reply.usage.prompt_tokens_details is not None:
            external.cached_tokens += reply.usage.prompt_tokens_details.cached_tokens
        scores = self._scores(reply, f"{field}.prompt_logprobs", ids)
        first = len(external.prompts) * external.n
        external.prompts.append(ids or [])
        ends = [self._end(choice, f"{where}[{i}]", scores) for i, choice in enumerate(reply.choices)]
        for end in sorted(ends, key=lambda end: end.index):
            end.index += first
            self.ends.append(end)

    def _prompt(self, reply: ParsedReply, field: str, prompt_ids: Sequence[int] | None, index: str) -> list[int] | None:
        """The prompt's ids, if the client sends them or the reply has them."""
        echoed = reply.prompt_token_ids
        echoed_ids = None if echoed is None else self.ids_of(echoed, f"{field}.prompt_token_ids")
        sent_ids = None if prompt_ids is None else self.ids_of(list(prompt_ids), f"prompt_token_ids{index}")
        if echoed_ids is not None and sent_ids is not None and echoed_ids != sent_ids:
            raise invalid(f"prompt_token_ids{index}", f"differs from {field}.prompt_token_ids")
        ids = echoed_ids if sent_ids is None else sent_ids
        if self._needs_prompt and not ids:
            raise RequestError(
                "prompt_token_ids is required: the reply has to repeat or score the prompt",
                field=f"prompt_token_ids{index}",
            )
        return ids

    def ids_of(self, ids: list[int] | bytes, field: str) -> list[int]:
        unpacked = body.unpack_ids(ids, field) if isinstance(ids, bytes) else ids
        self._serving.check_ids(unpacked, field)
        return unpacked

    def _scores(self, reply: ParsedReply, field: str, ids: list[int] | None) -> Column | None:
        """The prompt's logprobs, if the request has prompt_logprobs."""
        if self.params.prompt_logprobs is None:
            return None
        if reply.prompt_logprobs is None or ids is None:
            raise invalid(field, "is required: the request asks for them")
        start = max(1, self.params.prompt_logprobs_start)
        scores = logprobs_parser.parse_prompt(reply.prompt_logprobs, ids, self.params.prompt_logprobs, field)
        if scores is not None and scores.num_rows != len(ids) - start:
            raise invalid(field, "must have an entry per prompt token")
        return scores

    def logprobs_of(self, choice: ParsedChoice, ids: list[int], field: str) -> Column | None:
        params = self.params
        if params.logprobs is None and not params.logprob_token_ids:
            return None
        if choice.logprobs is None:
            raise invalid(field, "is required: the request asks for logprobs")
        top = (params.logprobs or 0) if self._known else None
        return logprobs_parser.parse_output(choice.logprobs, ids, top, params.logprob_token_ids or (), field)

    def _end(self, choice: ParsedChoice, where: str, scores: Column | None) -> ChoiceOutput:
        """Parse one choice; its text is cut at a stop string if the generating server has not done so."""
        ids = self.ids_of(choice.token_ids, f"{where}.token_ids")
        logprobs = self.logprobs_of(choice, ids, f"{where}.logprobs")
        kind = self.stop_kind(choice, ids)
        end = ChoiceOutput(
            choice.index,
            ids,
            "",
            {} if logprobs is None else {LOGPROBS: logprobs},
            values={} if scores is None else {PROMPT_LOGPROBS: scores},
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            stop_detail=kind,
            message=choice.stop_detail.message if choice.stop_detail else None,
        )
        text_ids = ids[:-1] if kind in TERMINATORS and not self.params.include_stop_str_in_output else ids
        stops, min_tokens = self.params.stop_strings(), self.params.min_tokens
        if isinstance(choice.stop_reason, str):  # already cut after the token that completed the match
            stops, min_tokens = [choice.stop_reason] if choice.stop_reason else [], max(0, len(ids) - 1)
        end.text, hit = self.detokenizer(stops, min_tokens).push(text_ids, True)
        if hit is not None:
            end.token_ids = ids[: hit.index + 1]
            end.columns = {name: column.part(0, hit.index + 1) for name, column in end.columns.items()}
            end.finish_reason, end.stop_reason, end.stop_detail, end.message = "stop", hit.text, "stop_string", None
        spans = ((span.version, span.start, min(span.end, len(end.token_ids))) for span in choice.weight_versions or ())
        end.weight_versions = [span for span in spans if span[1] < max(1, len(end.token_ids))]
        return end

    def detokenizer(self, stops: Sequence[str], min_tokens: int) -> Detokenizer:
        params = self.params
        shared = self._stops if stops == params.stop_strings() else stops
        return Detokenizer(
            self._serving.tokenizer,
            shared,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            spaces_between_special=params.spaces_between_special_tokens,
            min_tokens=min_tokens,
            stop_after=params.stop_after,
        )

    def stop_kind(self, choice: ParsedChoice, ids: list[int]) -> str | None:
        """The kind of stop_detail, as given, or inferred as far as possible."""
        if choice.stop_detail is not None and choice.stop_detail.kind is not None:
            return choice.stop_detail.kind
        reason = choice.stop_reason
        if choice.finish_reason == "stop" and ids:
            if isinstance(reason, str):
                return "stop_string"
            if reason is None and ids[-1] in self._eos:
                return "eos"
            if reason == ids[-1]:
                return "stop_token"
        return None


def prompt_length(reply: ParsedReply, ids: list[int] | None, count: int | None, index: str) -> int:
    """The prompt's length, from three fields that must agree; 0 if it is in none."""
    usage_length = reply.usage.prompt_tokens if reply.usage else None
    lengths = [length for length in (count, len(ids) if ids else None, usage_length) if length is not None]
    if len(set(lengths)) > 1:
        field = f"prompt_tokens{index}"
        raise RequestError(
            f"{field}, prompt_token_ids and the reply's usage differ in the prompt's length", field=field
        )
    if lengths and not 0 <= lengths[0] < 1 << 31:
        raise invalid(f"prompt_tokens{index}", f"must be from 0 to {(1 << 31) - 1}")
    return lengths[0] if lengths else 0


def with_prefix(field: str, make: Callable[[], R]) -> R:
    """`make()`; `field` is prepended to the field of an error."""
    try:
        return make()
    except RequestError as error:
        if error.field is None:
            error.message, error.field = error.message.replace("the body", field), field
        else:
            error.rename_field(f"{field}.{error.field}")
        raise
