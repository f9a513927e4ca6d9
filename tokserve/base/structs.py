"""What msgspec raises for bytes that are no message, and its Struct classes prepared for several threads.

msgspec looks up the types of a class's fields when it first decodes one, and marks the class as known before it has
found them all.  If another thread decodes into the class at that moment, the process ends with a segmentation fault
(seen with msgspec 0.22).  So each process that decodes in threads looks all of them up beforehand, in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

PACKAGE = __name__.partition(".")[0]
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # raised for bytes that are no message


def prepare_structs() -> None:
    """Look up the field types of all Struct classes of this package that have been imported."""
    for kind in struct_classes():
        try:
            msgspec.json.Decoder(kind)
        except TypeError:  # a union of types that cannot be told apart: the class is encoded only
            continue


def struct_classes() -> Iterator[type[msgspec.Struct]]:
    """Every Struct class of this package that has been imported."""
    pending = list(msgspec.Struct.__subclasses__())
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__.partition(".")[0] == PACKAGE:
            yield kind
