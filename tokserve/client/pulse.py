"""Whether an engine that is there still turns: it is asked for a sign of life, now and ever again.

That it hangs an engine cannot say itself, and its process looks well; it answers between two steps, so silence means
a step that does not end, or a process that is stopped.  What comes of silence is the owner's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONGEST_PAUSE = 15.0  # seconds between two beats


class Pulse:
    """`start` in a running loop; `answered` with every answer.

    `ask` sends the question.  `on_hung` is called at every beat at which there has been no answer for `timeout`
    seconds, and was none at the beat before: had this process itself been stopped for so long, one beat would be
    late, and the answer be read before the next.
    """

    def __init__(self, timeout: float, ask: Callable[[], object], on_hung: Callable[[], object]) -> None:
        self._timeout = timeout
        self._ask = ask
        self._on_hung = on_hung
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: float | None = None  # when, if that is not answered
        self._was_hung = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Ask now; also anew, of another engine."""
        self.stop()
        self._loop = asyncio.get_running_loop()
        self._beat()

    def stop(self) -> None:
        """Ask no more; nothing is owed."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._asked = None
        self._was_hung = False

    def answered(self) -> None:
        """It turns."""
        self._asked = None
        self._was_hung = False

    @property
    def silence(self) -> float:
        """Seconds for which an answer has been owed."""
        return 0.0 if self._asked is None or self._loop is None else self._loop.time() - self._asked

    @property
    def hung(self) -> bool:
        """There has been no answer for longer than the timeout."""
        return self.silence > self._timeout

    def _beat(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(min(self._timeout / 4, LONGEST_PAUSE), self._beat)
        if self._asked is None:
            self._asked = self._loop.time()
            self._ask()
        elif self.hung and self._was_hung:
            self._on_hung()
        else:
            self._was_hung = self.hung
