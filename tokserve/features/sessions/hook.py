"""Follows the conversations of a server: finds the turn that a request continues, and keeps what was answered."""

from __future__ import annotations

import copy
import io
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from tokserve.base.errors import invalid
from tokserve.client.outputs import ChoiceOutput, merge
from tokserve.families.mixtures.columns import NAME as EXPERTS
from tokserve.features.chat.conversation_hooks import ChatConversation, ReturnedMessage
from tokserve.features.chat.templates.histories import is_continued as is_continued_by_mark
from tokserve.features.chat.templates.suffix import NotContinued, Suffixes
from tokserve.features.chat.text_context import TextContext
from tokserve.features.images.parts import UnreadImage
from tokserve.features.masks.columns import NAME as MASKS
from tokserve.features.sessions import planning
from tokserve.features.sessions.access import Sessions, cache_key, owner_of, sessions_of
from tokserve.features.sessions.calls import AddTurn, BeginRequest, EndRequest, FindTurn, reason_kind
from tokserve.features.sessions.canonical import PromptContext, chain, content_text, digest
from tokserve.features.sessions.options import AGENT_HEADERS, SessionOptions
from tokserve.features.sessions.store import FIRST, check_id
from tokserve.features.sessions.turns import Match, TurnAnswer, TurnPrompt
from tokserve.protocol.columns import LOGPROBS
from tokserve.protocol.logprobs import Logprobs
from tokserve.protocol.prompt import TokenPrompt, pack_ids
from tokserve.server.affinity import SESSION_HEADER, session_rank
from tokserve.server.generation import Generation
from tokserve.server.http.auth import route_path
from tokserve.server.http.workers import off_loop
from tokserve.server.serving import Serving

logger = logging.getLogger(__name__)

PATH = "/sessions/"  # what the paths of a session's routes begin with
TEMPLATE_OPTIONS = ("template", "kwargs", "documents", "add_special_tokens")  # on which a turn's prompt depends
SUFFIX_OPTIONS = ("context", "add_special_tokens")  # of a rendering of the whole, not of what is new
ANEW = "the history is rendered by the template (--session-history template)"


def make_hook(serving: Serving) -> SessionHook | None:
    """The hook of a server that keeps sessions."""
    options = serving.config.options_of(SessionOptions)
    return SessionHook(serving, options) if options.sessions else None


def session_id_of(request: Request, headers: Sequence[str], body: Any) -> str | None:
    """The id of a request's session: in its path, a header or its body.  Raises RequestError for one that is none."""
    in_path = request.path_params.get("id") if route_path(request.scope).startswith(PATH) else None
    candidates = [in_path, request.headers.get(SESSION_HEADER)]
    candidates += [request.headers.get(name) for name in headers]
    session_id = next(filter(None, candidates), body)
    if session_id is None or session_id == "":
        return None
    if not isinstance(session_id, str):
        raise invalid("session_id", "must be a string")
    check_id(session_id)
    return session_id


class SessionHook:
    """Follows the conversations whose requests name a session."""

    def __init__(self, serving: Serving, options: SessionOptions) -> None:
        self._serving = serving
        self._options = options
        self._headers = AGENT_HEADERS if options.session_header is None else options.session_header
        self._sessions = sessions_of(serving)
        self._suffixes = Suffixes(serving.state_of(TextContext).template, serving.llm.ready.eos_token_ids)
        self._logged: Counter[str] = Counter()
        if serving.state_of(TextContext).template.sources is not None:
            try:
                self._suffixes.check()
            except NotContinued as error:
                logger.warning("sessions: no conversation can be continued by its ids: %s", error)

    async def begin(self, request: Request, conversation: ChatConversation) -> RunningTurn | None:
        """Find the turn that the conversation continues, and what is new.  Raises RequestError."""
        session_id = session_id_of(request, self._headers, conversation.session_id)
        if session_id is None:
            return None
        owner, messages = owner_of(request), list(conversation.messages)
        is_continued = conversation.options.get("continue_final_message") or is_continued_by_mark(messages)
        begun = messages.pop() if is_continued and messages else None

        def digests() -> tuple[list[bytes], PromptContext]:
            parts = {name: conversation.options.get(name) for name in TEMPLATE_OPTIONS}
            tools = conversation.options.get("tools") or []
            return chain(messages), PromptContext(conversation.model, digest(tools), digest(parts))

        digested, context = await off_loop(request, conversation.size, digests)
        before_answers = [
            one
            for one, later in zip(digested, messages[1:], strict=False)
            if isinstance(later, dict) and later.get("role") == "assistant"
        ]
        match = await self._sessions.call(FindTurn(owner, session_id, context, digested, before_answers))
        new = await off_loop(request, conversation.size, lambda: self._new_ids(match, conversation))
        turn = RunningTurn(self._sessions, owner, session_id, conversation, match)
        turn.set_chain(context, digested, begun)
        turn.rank = session_rank(self._serving.llm, session_id)
        if new.ids is not None:
            turn.continue_with(new.ids)
        else:
            turn.because = new.because
            self._log(new.because or FIRST)
        return turn

    def _new_ids(self, match: Match, conversation: ChatConversation) -> planning.NewIds:
        if self._options.session_history == "template" and match.turn_id is not None:
            return planning.NewIds(None, ANEW)
        options = {name: value for name, value in conversation.options.items() if name not in SUFFIX_OPTIONS}
        return planning.new_ids(match, conversation.messages, self._suffixes, options)

    def _log(self, reason: str) -> None:
        """Log why a conversation continues no turn, each reason once."""
        kind = reason_kind(reason)
        self._logged[kind] += 1
        if self._logged[kind] == 1 and reason != FIRST:
            logger.info("sessions: a request begins anew: %s (logged once)", reason)


class RunningTurn:
    """A request of a session, until its answers have ended.  `prompt`: what it answers, None until it is rendered."""

    def __init__(
        self, sessions: Sessions, owner: str, session_id: str, conversation: ChatConversation, match: Match
    ) -> None:
        self.prompt: TokenPrompt | None = None
        self.rank: int | None = None
        self.cache_key = cache_key(owner, session_id)
        self.because: str | None = None
        self._sessions = sessions
        self._owner, self._session_id = owner, session_id
        self._conversation = conversation
        self._match, self._number = match, match.number
        self._new_ids = b""
        self._messages: bytes | None = None  # behind the match, as JSON
        self._parts: dict[int, list[ChoiceOutput]] = {}  # deltas of choices that have not ended
        self._context: PromptContext
        self._digests: list[bytes]
        self._begun = ""
        self._message: ReturnedMessage
        self._generation: Generation

    def set_chain(self, context: PromptContext, digests: list[bytes], begun: Any) -> None:
        """`digests`: of the messages without `begun`, the message that the answer continues; None: there is none."""
        self._context, self._digests = context, digests
        self._begun = "" if begun is None else content_text(begun.get("content"))

    def continue_with(self, new_ids: bytes) -> None:
        """The prompt is that of the turn that was matched, its answer, and `new_ids`."""
        self._new_ids = new_ids
        self.prompt = TokenPrompt(self._match.ids + new_ids)

    async def rendered(self, request: Request, prompt: TokenPrompt) -> None:
        """The whole conversation was rendered: it extends the turn that was matched, or it is a root."""
        new_ids = None if prompt.features else planning.extension(self._match, prompt.ids)
        if new_ids is not None:
            self._new_ids, self.because = new_ids, None
            return
        if self.because == ANEW:
            self.because = planning.REWRITTEN
        self._new_ids, self._match = prompt.ids, Match(because=self.because)

    def attach(self, generation: Generation, message: ReturnedMessage) -> None:
        """Follow the output of the request, which the engine has accepted."""
        self._generation, self._message = generation, message
        generation.adjust = self._take
        close = generation.on_close

        def closed() -> None:
            close()
            self._end()

        generation.on_close = closed
        digest = self._digests[-1] if self._digests else b""
        begun = BeginRequest(self._owner, self._session_id, self._number, generation.request_id, digest)
        self._sessions.notify(begun)

    def _take(self, delta: ChoiceOutput) -> ChoiceOutput:
        """Keep a delta; the client gets it as it asked for it."""
        self._parts.setdefault(delta.index, []).append(copy.copy(delta))
        if delta.finish_reason is not None:
            self._add(merge(self._parts.pop(delta.index))[0])
        if not self._conversation.keeps_logprobs:
            delta.columns = {name: column for name, column in delta.columns.items() if name != LOGPROBS}
        return delta

    def _end(self) -> None:
        """The request is over.  A choice that was given up keeps the tokens that its client got."""
        for parts in self._parts.values():
            (choice,) = merge(parts)
            choice.finish_reason, choice.stop_detail = "abort", self._generation.cause
            if choice.token_ids:
                self._add(choice)
        self._parts.clear()
        self._sessions.notify(EndRequest(self._owner, self._session_id, self._generation.request_id))

    def _add(self, choice: ChoiceOutput) -> None:
        if choice.finish_reason == "error":
            return
        prompt, answer = self._new_prompt(), self._answer(choice)
        self._sessions.notify(AddTurn(self._owner, self._session_id, self._number, prompt, answer))

    def _new_prompt(self) -> TurnPrompt:
        parent, first = self._match.turn_id, self._match.num_messages
        if self._messages is None:
            self._messages = _encoded(self._conversation.messages[first:])
        return TurnPrompt(
            context=self._context,
            parent=parent,
            because=None if parent is not None else self.because or FIRST,
            new_ids=self._new_ids,
            chain=self._digests[first:],
            messages=self._messages,
        )

    def _answer(self, choice: ChoiceOutput) -> TurnAnswer:
        scores, masks, experts = choice.logprobs, choice.columns.get(MASKS), choice.values.get(EXPERTS)
        npy, message = io.BytesIO(), self._message(choice)
        if self._begun:  # clients join both
            message["content"] = self._begun + message["content"]
        if experts is not None:
            np.save(npy, experts.ids, allow_pickle=False)
        return TurnAnswer(
            token_ids=pack_ids(choice.token_ids),
            token_logprobs=b"" if scores is None else Logprobs.of(scores).token_logprobs.tobytes(),
            mode="" if scores is None else scores.form,
            finish_reason=choice.finish_reason or "",
            stop_detail=choice.stop_detail,
            seed=self._generation.seed + choice.index,
            weight_versions=choice.weight_versions,
            prompt_weight_versions=choice.prompt_weight_versions,
            message=message,
            request_id=self._generation.request_id,
            mask_rows=None if masks is None else masks.records,
            mask_ids=b"" if masks is None else masks.items,
            routed_experts=None if experts is None else npy.getvalue(),
        )


def _encoded(messages: Sequence[Any]) -> bytes:
    """The messages as JSON; null if they are nested too deeply."""
    try:
        return msgspec.json.encode([_plain(message) for message in messages])
    except RecursionError:
        return b"null"


def _plain(message: Any) -> Any:
    """The message with images as its client described them."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return message | {"content": [dict(one.part) if isinstance(one, UnreadImage) else one for one in content]}
