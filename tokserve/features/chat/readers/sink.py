"""What readers of calls report, and to which object."""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class CallStatus(Enum):
    """The result of reading calls."""

    NONE = 0  # no call, and nothing was reported
    BROKEN = 1  # reported; what follows is not as the format has it
    WHOLE = 2


class CallSink(Protocol):
    """Takes what is read of calls."""

    num_begun: int  # calls

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call begins.  `call_id`: the id that the model gives it, "" if it gives none."""

    def add_arguments(self, text: str) -> None:
        """More JSON of its arguments."""

    def spoil_call(self) -> None:
        """Its arguments are not JSON, or lack their end."""

    def end_call(self) -> None:
        """Its arguments are complete, unless it is spoiled."""

    def between_calls(self) -> bool:
        """Another call may begin here.  Returns whether the text up to here became content."""
