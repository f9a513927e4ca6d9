"""The replies of /generate: {text, output_ids, meta_info} per choice; every event of a stream has all of it so far.

Lists stay encoded while they grow, so that an event costs a copy of what was sent before, and no encoding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tokserve.base.errors import RequestError
from tokserve.client.outputs import ChoiceOutput, Column, DraftCounts
from tokserve.families.mixtures.columns import NAME as EXPERTS
from tokserve.families.mixtures.columns import ExpertRows
from tokserve.features.chat.token_segments import SegmentReader
from tokserve.features.entropy.columns import NAME as ENTROPIES
from tokserve.features.entropy.columns import entropies
from tokserve.features.masks.columns import NAME as MASKS
from tokserve.features.masks.reply import mask_lists
from tokserve.server.generation import Generation
from tokserve.server.http.body import encode_json
from tokserve.server.replies import logprobs, reply_metrics, sse
from tokserve.server.replies.reply_fields import last_version, prompt_versions, versions

ROWS = 1024  # of a list that are encoded at a time: other threads run in between
ENDS_OF_ERRORS = 500
Triple = tuple[float | None, int, str | None]
Name = Callable[[int], str | None]


class ReplyForm(NamedTuple):
    """What the reply to one prompt has besides its tokens.  `start`: of the prompt's logprobs, None without any.
    `top`: alternatives per token.  `named`: whether token_ids_logprob was given.  `has_drafts`: counts of drafts.
    `routed_start`: of the routed experts, None without any."""

    has_logprobs: bool
    start: int | None
    top: int
    named: bool
    has_masks: bool
    has_drafts: bool
    routed_start: int | None = None


class SglangReply(msgspec.Struct):
    """A choice, with all of its tokens so far."""

    output_ids: Raw
    details: dict[str, Any] = msgspec.field(name="meta_info")
    text: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class _EncodedList:
    """A JSON array that grows."""

    def __init__(self) -> None:
        self._items = bytearray()
        self.length = 0

    def extend(self, items: Iterator[Any]) -> None:
        while rows := list(islice(items, ROWS)):
            if self._items:
                self._items += b","
            self._items += encode_json(rows)[1:-1]
            self.length += len(rows)

    def json(self) -> Raw:
        return Raw(b"[%b]" % bytes(self._items))


class _TokenLists:
    """Logprobs of tokens as triples, with those of the alternatives and of the named ids if these were requested."""

    def __init__(self, form: ReplyForm, name: Name) -> None:
        self._form = form
        self._name = name
        self.tokens, self.top, self.named = _EncodedList(), _EncodedList(), _EncodedList()

    def add_first(self, token_id: int) -> None:
        """A token without logprobs: nothing comes before it."""
        self.tokens.extend(iter([(None, token_id, self._name(token_id))]))
        self.top.extend(iter([None]))

    def extend(self, columns: Column, token_ids: Sequence[int]) -> None:
        top, name = self._form.top, self._name
        pairs = zip(token_ids, logprobs.rows(columns), strict=True)
        self.tokens.extend((row[0], token, name(token)) for token, row in pairs)
        if top:
            self.top.extend(_triples(row[2][:top], row[3][:top], name) for row in logprobs.rows(columns))
        if self._form.named:
            self.named.extend(_triples(row[2][top:], row[3][top:], name) for row in logprobs.rows(columns))

    def fields(self, side: str) -> dict[str, Any]:
        """Their names in meta_info; `side`: input or output."""
        fields: dict[str, Any] = {f"{side}_token_logprobs": self.tokens.json()}
        if self._form.top:
            fields[f"{side}_top_logprobs"] = self.top.json()
        if self._form.named:
            fields[f"{side}_token_ids_logprobs"] = self.named.json()
        return fields


def _triples(ids: Sequence[int], values: Sequence[float], name: Name) -> list[Triple]:
    return [(value, token, name(token)) for token, value in zip(ids, values, strict=True)]


def _draft_counts(drafts: DraftCounts) -> dict[str, Any]:
    """What meta_info says of the drafts of an ended choice.  Entry j of the histogram: steps that accepted j."""
    report = reply_metrics.speculative_decoding([drafts], "summary", 0)
    return {
        "spec_accept_length": report.mean_acceptance_length,
        "spec_accept_rate": report.draft_acceptance_rate,
        "spec_verify_ct": report.num_spec_steps,
        "spec_correct_drafts_histogram": report.acceptance_histogram,
    }


def _routed_experts(rows: ExpertRows) -> dict[str, Any]:
    """The chosen experts, base64 of int32 [positions, layers, chosen], and the first of the positions."""
    return {"routed_experts": rows.ids.astype("<i4").tobytes(), "routed_experts_start_len": rows.start}


class ChoiceDetails:
    """A choice, with all that has come of it."""

    def __init__(self, form: ReplyForm, name: Name, prompt_len: int) -> None:
        self.form = form
        self._prompt_len = prompt_len
        self._ids = _EncodedList()
        self._last_id: int | None = None
        self.text = ""
        self._cached = 0
        self._output = _TokenLists(form, name)
        self._input = _TokenLists(form, name)
        self._masks, self._mask_logprobs = _EncodedList(), _EncodedList()
        self._entropies: _EncodedList | None = None
        self._end: ChoiceOutput | None = None
        self.reasoning_tokens = 0

    def begin(self, prompt_ids: Sequence[int], scores: Column | None) -> None:
        """Take the prompt's logprobs, which come with the first delta."""
        start = self.form.start
        if start is not None and start < len(prompt_ids):
            self._input.add_first(prompt_ids[start])
            if scores is not None:
                self._input.extend(scores, prompt_ids[start + 1 :])

    def add(self, c: ChoiceOutput) -> None:
        if c.token_ids:
            self._ids.extend(iter(c.token_ids))
            self._last_id = c.token_ids[-1]
        self.text += c.text or ""
        self._cached = max(self._cached, c.cached_tokens)
        if self.form.has_logprobs and c.logprobs is not None:
            self._output.extend(c.logprobs, c.token_ids)
        if self.form.has_masks and MASKS in c.columns:
            masks, values = mask_lists(c.columns[MASKS])
            self._masks.extend(iter(masks))
            self._mask_logprobs.extend(iter(values))
        if ENTROPIES in c.columns:
            self._entropies = self._entropies or _EncodedList()
            self._entropies.extend(iter(entropies(c.columns[ENTROPIES])))
        if c.finish_reason is not None:
            self._end = c

    def ids(self) -> Raw:
        return self._ids.json()

    def details(self, request_id: str, elapsed: float, version: str) -> dict[str, Any]:
        """All of `meta_info`.  `version`: of the weights that serve now."""
        end, count = self._end, self._ids.length
        fields: dict[str, Any] = {
            "id": request_id,
            "finish_reason": None if end is None else self._finish_reason(end, count),
            "prompt_tokens": self._prompt_len,
            "weight_version": version,
            "completion_tokens": count,
            "cached_tokens": self._cached,
            "reasoning_tokens": self.reasoning_tokens,
            "dp_rank": None,
            "e2e_latency": elapsed,
        }
        if end is not None:
            spans = versions(end)
            fields["weight_versions"] = spans
            fields["prefill_weight_versions"] = prompt_versions(end)
            if spans:
                fields["weight_version"] = spans[-1].version
            if self.form.has_drafts:
                fields |= _draft_counts(end.drafts)
            if self.form.routed_start is not None and EXPERTS in end.values:
                fields |= _routed_experts(end.values[EXPERTS])
        if self.form.has_logprobs:
            fields |= self._output.fields("output")
            fields["output_token_logprobs_length"] = self._output.tokens.length
            fields |= self._input.fields("input")
        if self.form.has_masks:
            fields["output_token_sampling_mask"] = self._masks.json()
            fields["output_token_sampling_logprobs"] = self._mask_logprobs.json()
            fields["output_token_sampling_mask_length"] = self._masks.length
        if self._entropies is not None:
            fields["output_token_entropy"] = self._entropies.json()
        return fields

    def _finish_reason(self, end: ChoiceOutput, count: int) -> dict[str, Any]:
        if end.finish_reason == "stop":
            return {"type": "stop", "matched": matched_stop(end, self._last_id)}
        if end.finish_reason == "length":
            return {"type": "length", "length": count}
        failed = end.finish_reason == "error"
        return {
            "type": "abort",
            "message": end.message or f"Aborted: {end.stop_detail or end.finish_reason}",
            "status_code": ENDS_OF_ERRORS if failed else None,
            "err_type": "InternalServerError" if failed else None,
        }


def matched_stop(end: ChoiceOutput, last_id: int | None = None) -> Any:
    """What the output ended with: an id, a stop string, or None.  `last_id`: that of its last token, if `end` may not
    have it."""
    if end.stop_detail == "eos":
        return end.token_ids[-1] if end.token_ids else last_id
    return end.stop_reason


def version_metadata(first: ChoiceOutput) -> dict[str, Any]:
    """`metadata` of a reply in OpenAI's shape: which weights made the first choice."""
    return {"weight_version": last_version([first]), "weight_versions": versions(first)}


class GenerateRenderer:
    """The choices of a generation in this dialect.  `forms`: one per prompt.  `listed`: the reply is a list.
    `version`: that of the weights that serve now.  `reader_after`: reads the output to a prompt, to count its
    reasoning; None: it is not told apart."""

    def __init__(
        self,
        generation: Generation,
        forms: Sequence[ReplyForm],
        name: Name,
        *,
        request_ids: Sequence[str],
        listed: bool,
        text: bool,
        echo: bool,
        version: Callable[[], str],
        reader_after: Callable[[Sequence[int]], SegmentReader] | None,
    ) -> None:
        self._generation = generation
        self._request_ids = request_ids
        self._listed = listed
        self._text = text
        self._echo = echo
        self._version = version
        self._start = time.monotonic()
        self._forms = forms
        self._name = name
        self._choices: dict[int, ChoiceDetails] = {}  # those that have begun
        self._reader_after = reader_after
        self._readers: dict[int, SegmentReader] = {}

    def _count_reasoning(self, choice: ChoiceDetails, c: ChoiceOutput) -> None:
        if self._reader_after is None:
            return
        if c.index not in self._readers:
            self._readers[c.index] = self._reader_after(self._generation.prompt_ids(c.index))
        reader, is_last = self._readers[c.index], c.finish_reason is not None
        deque(reader.read(c.text or "", c.token_ids, None, final=is_last), maxlen=0)
        if is_last:
            deque(reader.finish(), maxlen=0)
        choice.reasoning_tokens = reader.reasoning_tokens

    def _add(self, c: ChoiceOutput) -> SglangReply:
        choice = self._choices.get(c.index)
        if choice is None:
            index = c.index // self._generation.n
            prompt_len = self._generation.streams[index].prompt_len
            choice = self._choices[c.index] = ChoiceDetails(self._forms[index], self._name, prompt_len)
            choice.begin(self._generation.prompt_ids(c.index), c.prompt_logprobs)
        choice.add(c)
        self._count_reasoning(choice, c)
        elapsed = (c.times[2] if c.finish_reason is not None else 0.0) or time.monotonic() - self._start
        request_id = self._request_ids[c.index // self._generation.n]
        reply = SglangReply(choice.ids(), choice.details(request_id, elapsed, self._version()))
        if self._text:
            reply.text = choice.text
        if self._echo:
            reply.prompt_token_ids = self._generation.prompt_ids(c.index)
        return reply

    def reply(self, completions: Sequence[ChoiceOutput]) -> bytes:
        """The whole reply as JSON: an object, or a list of them."""
        replies = [self._add(c) for c in completions]
        return encode_json(replies if self._listed else replies[0])

    def delta(self, delta: ChoiceOutput) -> bytes:
        reply = self._add(delta)
        if self._listed:
            reply.index = delta.index
        return sse.event(encode_json(reply))

    def tail(self) -> bytes:
        return b""


def last_events(error: RequestError | None) -> bytes:
    """The last events of a stream: the error, if there is one, and [DONE]."""
    if error is None:
        return sse.DONE
    retryable = error.retry_after is not None or error.status == 503
    detail = {"message": error.message, "type": error.type, "code": error.status, "retryable": retryable}
    return sse.event(encode_json({"error": detail})) + sse.DONE
