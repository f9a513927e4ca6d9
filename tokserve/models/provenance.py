"""Checksums of the tensors that a model was loaded from, by checkpoint name and in their original dtype.

The weights in memory are packed, fused, converted or quantized, so their bytes cannot be compared with a trainer's.  A
pushed tensor exists only while it is being taken, so its checksum is computed then.  Tensors that were read from files
are read again when the checksums are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from safetensors import SafetensorError
from torch import Tensor

from tokserve.base.errors import Conflict, StartError
from tokserve.base.rooms import part
from tokserve.models import weights
from tokserve.models.formats import is_unused
from tokserve.models.weights import Entry

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Renames = Iterable[tuple[str, str]]
Generator = Callable[[], Iterable[tuple[str, Tensor]]]


class Provenance:
    """Where one set of weights came from.  `enabled` False: no checksums of pushed tensors are computed."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._incomplete = False  # a tensor was pushed while this was not enabled
        self._pushed: dict[str, str] = {}
        self._files: list[tuple[dict[str, Entry], str]] = []  # catalogues, each with the stamp of its files
        self._generator: Generator | None = None

    def add_pushed(self, name: str, tensor: Tensor) -> None:
        if self._enabled:
            self._pushed[name] = _checksum(tensor)
        else:
            self._incomplete = True

    def add_files(self, catalogue: Mapping[str, Entry], stamp: str) -> None:
        """Record the tensors of a catalogue; `stamp`: of its files when they were read."""
        self._files.append((dict(catalogue), stamp))

    def set_generator(self, generator: Generator) -> None:
        """Record that the tensors were generated; calling `generator` again returns the same ones."""
        self._generator = generator

    def checksums(self, renames: Renames, *, tied: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Checksums by name, of the tensors that the model uses; and aliases, names that share another name's tensor.

        `tied`: the embedding and the head share one tensor, which is listed under both names.  Raises Conflict if the
        checksums are not available.
        """
        if self._incomplete:
            raise Conflict("no checksums of pushed weights are computed (--no-weight-checksums)")
        digests = dict(self._pushed)
        for catalogue, stamp in self._files:
            digests |= _of_files(catalogue, stamp)
        if self._generator is not None:
            digests |= {name: _checksum(tensor) for name, tensor in self._generator()}
        model_names = {name: weights.model_name(name, renames) for name in digests}
        used = {
            name: digest for name, digest in digests.items() if (target := model_names[name]) and not is_unused(target)
        }
        return used, _add_aliases(used, model_names) if tied else {}


def _checksum(tensor: Tensor) -> str:
    """The checksum that trainers compute as well."""
    digest: str = part("weights", "checksum")(tensor)
    return digest


def _of_files(catalogue: Mapping[str, Entry], stamp: str) -> dict[str, str]:
    try:
        if weights.stamp(catalogue) != stamp:
            raise Conflict("the files that the weights were read from have changed since")
        return {name: _checksum(weights.source(entry)) for name, entry in catalogue.items()}
    except (OSError, SafetensorError, StartError) as error:
        raise Conflict(f"the files that the weights were read from cannot be read again: {error}") from None


def _add_aliases(digests: dict[str, str], model_names: Mapping[str, str | None]) -> dict[str, str]:
    """List the shared tensor of a tied model under both names; returns {head: embedding}."""
    names = {model_names[name]: name for name in digests}
    embedding, head = names.get(EMBEDDING, EMBEDDING), names.get(HEAD, HEAD)
    if embedding not in digests and head in digests:
        digests[embedding] = digests[head]
    if embedding in digests:
        digests.setdefault(head, digests[embedding])
    return {head: embedding} if head in digests else {}
