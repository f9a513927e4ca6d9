"""`ScriptedServer`: the real server around a script instead of a model."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from tokserve.testing.process import ServerProcess
from tokserve.testing.script import Choice, Scripted, ScriptedReply

Replies = Iterable[ScriptedReply] | Callable[[list[int], int], ScriptedReply]


class ScriptedServer(ServerProcess):
    """Every route, limit and error is the server's; tokens, logprobs and faults are the script's.  `choices`: the
    choices that were replied to so far, in order; `unused`: how many replies are left of a list."""

    module = "tokserve.testing.scripted_process"

    def __init__(self, replies: Replies, options: dict[str, Any], **kwargs: Any) -> None:
        self.choices: list[Choice] = []
        self._function = replies if callable(replies) else None
        self._replies = [] if callable(replies) else list(replies)
        self._used = 0
        super().__init__({"depth": 1, **options}, **kwargs)
        self._answering = threading.Thread(target=self._answer, daemon=True)
        self._answering.start()

    @property
    def unused(self) -> int:
        """Replies of the list that no choice has had yet."""
        return len(self._replies) - self._used

    def stop(self, number: int = signal.SIGTERM) -> int:
        code = super().stop(number)
        self._answering.join(10)
        return code

    def _answer(self) -> None:
        """ScriptedReply to choices until the server ends."""
        with self._channel.makefile("rb") as choices, suppress(ConnectionError):
            for line in choices:
                scripted = self._scripted(msgspec.json.decode(line, type=Choice))
                self._channel.sendall(msgspec.json.encode(scripted) + b"\n")

    def _scripted(self, choice: Choice) -> Scripted:
        self.choices.append(choice)
        if self._function is not None:
            try:
                return Scripted(self._function(choice.prompt_ids, choice.index))
            except Exception as error:  # the caller's function: its error goes to the one who waits for the reply
                return Scripted(error=f"the script raised {type(error).__name__}: {error}")
        if self._used == len(self._replies):
            return Scripted(error=f"the script has {self._used} replies, and no more")
        self._used += 1
        return Scripted(self._replies[self._used - 1])


def scripted_server(
    replies: Replies, model: str | os.PathLike[str] = "demo", *, start_seconds: float = 60.0, **options: Any
) -> ScriptedServer:
    """A server whose choices are `replies`: a list, used in the order in which choices arrive, or a function of the
    prompt's ids and the choice's index.

    `model` gives tokenizer, chat template, vocabulary and context; its weights are not loaded.  `options` are those of
    `server`.  A choice without a reply is answered with 500.
    """
    return ScriptedServer(replies, {"model": model, **options}, start_seconds=start_seconds)
