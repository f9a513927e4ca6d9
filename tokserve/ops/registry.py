"""The registry of ops: a torch reference defines an op, and implementations of the same signature have names.

`@op` declares a reference, with the tolerances that tests compare implementations with; `choose` picks one
implementation per op, once, at start-up.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from tokserve.base.errors import StartError

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "torch"
REFERENCES_RUN = {"cpu"}  # device kinds that the references run on
ORDER = {"cpu": ("cpp", REFERENCE), "cuda": ("triton", "cublas", REFERENCE)}  # by device kind, best first
FAST = {"cuda": "cublas"}  # by device kind: the implementation that is not batch invariant
EXTENSIONS = {  # by device kind: the required module, and the module that registers the implementations
    "cpu": ("tokserve._C", "tokserve.ops.cpu.kernels"),
    "cuda": ("triton", "tokserve.gpu.kernels"),
}

WITHOUT_KERNELS = (
    "no kernels: ops run as torch references, about a hundred times slower.  Install them with a C++ compiler: "
    "apt-get install g++ && make install, or pip install --force-reinstall --no-deps with the source's directory"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Implementation(Generic[P, R]):
    """A function, and its device kind (None: all)."""

    call: Callable[P, R]
    device: str | None


@dataclass(slots=True)
class Op(Generic[P, R]):
    """A named operation.

    `tolerance` maps each dtype that the op takes to the (absolute, relative) distance that an implementation may have
    from the reference; tests/ops/samples has inputs to compare them with.  `follows`: the op whose choice of
    implementation this one shares.
    """

    name: str
    reference: Callable[P, R]
    tolerance: Mapping[torch.dtype, tuple[float, float]]
    follows: str | None = None
    implementations: dict[str, Implementation[P, R]] = field(default_factory=dict)

    def implement(self, name: str, *, device: str) -> Callable[[Callable[..., R]], Callable[P, R]]:
        """Decorator: register an implementation.

        It has the reference's signature: parameters that it only passes on may be `*rest`.  Ops are called with
        positional arguments.
        """

        def register(call: Callable[..., R]) -> Callable[P, R]:
            if name in self.implementations:
                raise ValueError(f"op {self.name} already has an implementation {name!r}")
            self.implementations[name] = Implementation(call, device)
            return call

        return register

    def available(self, device: str) -> list[str]:
        """Names of those for `device`, best first."""
        order = ORDER[device]
        names = [n for n, i in self.implementations.items() if i.device in (None, device)]
        return sorted(names, key=lambda n: order.index(n) if n in order else len(order))


OPS: dict[str, Op[Any, Any]] = {}


def op(
    *, tolerance: Mapping[torch.dtype, tuple[float, float]], follows: str | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator: declare an op by its torch reference; the op is named after the function."""

    def declare(reference: Callable[P, R]) -> Op[P, R]:
        name = reference.__name__
        if name in OPS:
            raise ValueError(f"op {name} is declared twice")
        declared = Op(name, reference, tolerance, follows)
        declared.implementations[REFERENCE] = Implementation(reference, None)
        OPS[name] = declared
        return declared

    return declare


def load_extension(device: str) -> str | None:
    """Register the compiled implementations for `device`; returns why there are none, or None if there are."""
    extension, registrations = EXTENSIONS[device]
    try:
        importlib.import_module(extension)
        importlib.import_module(registrations)
    except ImportError as error:
        return f"{extension} does not load ({error})"
    return None


def set_threads(device: str, count: int, cpus: Sequence[int] = ()) -> None:
    """Set the number of threads of the compiled implementations for `device`, where they have any, and their CPUs."""
    registrations = sys.modules.get(EXTENSIONS[device][1])
    if registrations is None or not hasattr(registrations, "set_threads"):
        return
    if not registrations.set_threads(count, cpus):
        logger.warning("the system does not let threads be bound to CPUs; they run unbound")


def choose(device: str, overrides: Mapping[str, str]) -> dict[str, str]:
    """Op -> name of the implementation to use on `device`.

    `overrides` maps op names to implementation names; "*" stands for every op that is not named and has
    that implementation.  Raises StartError, listing what exists, for a name that does not.
    """
    if device not in ORDER:
        raise StartError(f"no ops for device {device!r}; there are: {_listed(ORDER)}")
    implementations = set(overrides.values())
    missing = "" if set(overrides) >= {"*"} and implementations == {REFERENCE} else load_extension(device)
    if missing and device not in REFERENCES_RUN:
        raise StartError(f"option device: {device} needs kernels that are not here: {missing}")
    if missing:
        logger.warning("%s; %s", missing, WITHOUT_KERNELS)
    for name in overrides:
        if name != "*" and name not in OPS:
            raise StartError(f"option ops: unknown op {name!r}; there are: {_listed(OPS)}")
        if name != "*" and OPS[name].follows:
            raise StartError(f"option ops: {name!r} is chosen with {OPS[name].follows!r}; name that one instead")
    reason = f" ({missing})" if missing else ""
    everywhere = overrides.get("*")
    names = {name: declared.available(device) for name, declared in OPS.items()}
    if everywhere is not None and not any(everywhere in available for available in names.values()):
        known = {one for available in names.values() for one in available}
        raise StartError(
            f"option ops: no op has an implementation {everywhere!r} here; there are: {_listed(known)}{reason}"
        )
    chosen = {}
    for name, available in names.items():
        pick = overrides.get(OPS[name].follows or name)
        if pick is not None and pick not in available:
            raise StartError(
                f"op {name!r} has no implementation {pick!r} here; there are: {_listed(available)}{reason}"
            )
        if pick is None:
            pick = everywhere if everywhere in available else available[0]
        chosen[name] = pick
    return chosen


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
