"""What a model's weights were when they came, by the names and in the dtypes that they came in.

What lies in memory is packed, fused, converted or quantized, so it says nothing about what was sent.  A tensor that is
pushed is gone once it has been taken: its checksum is made when it comes.  What was read from files is in the files:
they are read again when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from safetensors import SafetensorError
from torch import Tensor

from tokserve.errors import Conflict, StartError
from tokserve.models import float8, weights
from tokserve.models.weights import Entry
from tokserve.rl.digests import checksum, checksums

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Renames = Iterable[tuple[str, str]]
Drawn = Callable[[], Iterable[tuple[str, Tensor]]]


class Arrivals:
    """Of one set of weights.  `kept` False: nothing is kept of what is pushed."""

    def __init__(self, *, kept: bool = True) -> None:
        self._kept = kept
        self._lost = False  # something came of which nothing was kept
        self._pushed: dict[str, str] = {}
        self._files: list[tuple[dict[str, Entry], str]] = []  # and the state that they were in
        self._drawn: Drawn | None = None

    def push(self, name: str, tensor: Tensor) -> None:
        """A tensor came that is nowhere else."""
        self._lost |= not self._kept
        if self._kept:
            self._pushed[name] = checksum(tensor)

    def read(self, listed: Mapping[str, Entry], stamp: str) -> None:
        """The tensors of a catalogue came, from files in this state."""
        self._files.append((dict(listed), stamp))

    def draw(self, drawn: Drawn) -> None:
        """The tensors came from a function that returns the same ones again."""
        self._drawn = drawn

    def checksums(self, renames: Renames, *, tied: bool) -> tuple[dict[str, str], dict[str, str]]:
        """By name, of the tensors that a model takes; and which names stand for the tensor of another.

        `tied`: the embedding and the head are one tensor, which is listed under both names, whichever came.  Raises
        Conflict if what came is not known any more.
        """
        if self._lost:
            raise Conflict("no checksums are kept of weights that are pushed (--no-weight-checksums)")
        found = dict(self._pushed)
        for listed, stamp in self._files:
            found |= self._of_files(listed, stamp)
        if self._drawn is not None:
            found |= checksums(self._drawn())
        own = {name: weights.own_name(name, renames) for name in found}
        found = {name: digest for name, digest in found.items() if own[name] and not float8.is_unused(own[name] or "")}
        return found, _twins(found, own) if tied else {}

    def _of_files(self, listed: Mapping[str, Entry], stamp: str) -> dict[str, str]:
        try:
            if weights.stamp(listed) != stamp:
                raise Conflict("the files that the weights came from have changed since they were read")
            return {name: checksum(weights.read(entry)) for name, entry in listed.items()}
        except (OSError, SafetensorError, StartError) as error:
            raise Conflict(f"the files that the weights came from cannot be read again: {error}") from None


def _twins(found: dict[str, str], own: Mapping[str, str | None]) -> dict[str, str]:
    """Of a tied model: list the tensor under both names."""
    names = {own[name]: name for name in found}
    embedding, head = names.get(EMBEDDING, EMBEDDING), names.get(HEAD, HEAD)
    if embedding not in found and head in found:
        found[embedding] = found[head]
    if embedding in found:
        found.setdefault(head, found[embedding])
    return {head: embedding} if head in found else {}
