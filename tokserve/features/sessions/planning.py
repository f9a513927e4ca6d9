"""What a request of a session answers: the ids of the turn that it continues, and the new ones; or a new root.

Pure: `whole` renders a conversation, and `Suffixes` what is new in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokserve.features.chat.templates.suffix import AnswerEnd, NotContinued, Suffixes
from tokserve.features.sessions.canonical import has_image
from tokserve.features.sessions.turns import Match
from tokserve.protocol.prompt import pack_ids, unpack_ids

IMAGES = "messages with images are rendered anew"
REWRITTEN = "the chat template rewrites earlier turns"


class NewIds(NamedTuple):
    """The ids that a request adds to a turn; None: the conversation is to be rendered, `because` says why."""

    ids: bytes | None
    because: str | None = None


def new_ids(match: Match, messages: Sequence[Any], suffixes: Suffixes, options: Mapping[str, Any]) -> NewIds:
    """What a request adds to the turn that it continues."""
    if match.turn_id is None:
        return NewIds(None, match.because)
    if any(map(has_image, messages)):
        return NewIds(None, IMAGES)
    end = AnswerEnd(unpack_ids(match.ids[-4:])[0], match.ended)
    try:
        ids = suffixes.ids(match.message, end, messages[match.num_messages :], messages[0]["role"], **options)
    except NotContinued as error:
        return NewIds(None, str(error))
    return NewIds(pack_ids(ids))


def extension(match: Match, whole: bytes) -> bytes | None:
    """The ids of a conversation that was rendered behind those of a turn; None: they are not a beginning of it."""
    return whole[len(match.ids) :] if match.turn_id is not None and whole.startswith(match.ids) else None
