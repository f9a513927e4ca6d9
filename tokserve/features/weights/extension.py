"""The operator's code that runs in the engine's process: the worker extension and functions applied to the model.

Both are named as `module:name` and imported there; only names and plain values come over the wire.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import msgspec

from tokserve.base.errors import Forbidden, NotFound, RequestError, StartError


def named(reference: str) -> Any:
    """What `module:name` (or `module.name`) refers to.  Raises RequestError."""
    module, _, name = reference.partition(":") if ":" in reference else reference.rpartition(".")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(f"{reference!r} cannot be imported: {error}") from None
    return value


def make(reference: str | None, runner: Any) -> Any:
    """The worker extension, or None: the class with the runner as its argument, or mixed into a `WorkerBase`, as vLLM
    does, if its constructor takes no argument.  Raises StartError."""
    if reference is None:
        return None
    try:
        extension = named(reference)
        if isinstance(extension, type) and not _takes_an_argument(extension):
            return type(extension.__name__, (WorkerBase, extension), {})(runner)
        return extension(runner)
    except (RequestError, TypeError) as error:
        raise StartError(f"option worker_extension_cls: {error}") from None


class WorkerBase:
    """What methods of a class that is mixed in find on `self`, under vLLM's names; the class's own constructor is not
    called."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner  # and its `model`
        self.device = runner.backend.device.torch_device
        self.rank = self.local_rank = runner.ranks.rank


def _takes_an_argument(kind: type) -> bool:
    try:
        inspect.signature(kind).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a class without a signature, written in C
        return True
    return True


def call(extension: Any, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call a public method of the extension; returns plain values."""
    if extension is None:
        raise Forbidden("there is no worker extension: start the server with --worker-extension-cls module:Class")
    function = None if method.startswith("_") or not hasattr(extension, method) else getattr(extension, method)
    if not callable(function):
        raise NotFound(f"the worker extension has no method {method!r}", field="method")
    return plain(function(*args, **kwargs))


def plain(value: Any) -> Any:
    """`value` as it can be sent; what cannot becomes its text in ASCII."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=str))
    except (TypeError, ValueError, OverflowError):
        return ascii(value)
