"""The options of sessions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.config.common import FOR_EVER, Positive, about

# of Claude Code, Codex and opencode
AGENT_HEADERS = (
    "X-Claude-Code-Session-Id",
    "session-id",
    "thread-id",
    "x-session-id",
    "x-session-affinity",
)
History = Literal["ids", "template"]


class SessionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How conversations are kept."""

    sessions: Annotated[
        bool,
        about("Keep the turns of conversations, token for token, for trainers; see docs/sessions.md."),
    ] = False
    session_history: Annotated[
        History,
        about(
            "What a turn that continues another one is prompted with: ids, those of the earlier prompt and answer and "
            "what is new; template, a rendering of the whole conversation, which is a new root if it differs."
        ),
    ] = "ids"
    session_header: Annotated[
        list[str] | None,
        about(
            "Headers with the id of a session, besides X-Session-ID; the first one that a request has counts. Default: "
            f"{', '.join(AGENT_HEADERS)}."
        ),
    ] = None
    max_sessions: Annotated[Positive, about("How many sessions may exist at a time.")] = 10_000
    max_sessions_per_key: Annotated[
        Positive | None, about("How many of them one API key may have. Default: as many as there may be.")
    ] = None
    max_session_bytes: Annotated[
        int, about("Memory of all sessions together, in bytes; beyond it, requests of sessions get 429.", ge=1 << 16)
    ] = 1 << 30
    session_ttl: Annotated[
        float, about("Seconds without a request after which a session is dropped.", gt=0, le=FOR_EVER)
    ] = 86_400.0
    session_cache_share: Annotated[
        float,
        about(
            "Part of the KV cache in which blocks of open sessions are kept before those of other requests; the "
            "sessions used last have it.",
            ge=0,
            le=1,
        ),
    ] = 0.5
    session_dir: Annotated[
        str | None,
        about(
            "Directory in which sessions are kept as files, too: the next server with it has them. Conversations can "
            "be read there."
        ),
    ] = None


def check_sessions(config: Config) -> None:
    """Raise StartError for a server that cannot keep sessions."""
    options = config.options_of(SessionOptions)
    if options.session_dir is not None and not options.sessions:
        raise StartError("option session_dir: needs --sessions")
    if options.sessions and config.server.tokens_only:
        raise StartError("option sessions: needs a tokenizer, and --tokens-only loads none")
    if options.sessions and config.model.runner == "pooling":
        raise StartError("option sessions: needs a model that generates, and --runner pooling computes vectors")
