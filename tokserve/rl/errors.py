"""What can go wrong in a trainer's process.  Without torch, and without anything of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ServerError(Exception):
    """An error response.  `status` is HTTP's; `kind`, `field` and `code` are the error's type, param and code."""

    def __init__(
        self, status: int, message: str, kind: str = "", field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message, self.kind, self.field, self.code = status, message, kind, field, code


class PromptsFailed(ServerError):
    """The server refused or failed some prompts of a call, and has computed all the others.

    `results`: of `generate` the rollouts of the other prompts, each with its `prompt_index`; of `score` a list by
    sequence, None where it failed.  `failures`: the error of each prompt that failed, by its index; `status`, `field`
    and so on are those of the first one.
    """

    def __init__(self, results: Sequence[Any], failures: Mapping[int, ServerError], num_prompts: int) -> None:
        index, first = next(iter(failures.items()))
        message = f"{len(failures)} of {num_prompts} prompts failed; prompts[{index}]: {first.message}"
        super().__init__(first.status, message, first.kind, first.field, first.code)
        self.results, self.failures = list(results), dict(failures)


class ClientClosed(RuntimeError):
    """The client has been closed, or it is another process's."""


class TorchMissing(ImportError):
    """The call takes or sends tensors, and torch is not installed."""


class WeightsError(ValueError):
    """Tensors, or a file of them, are not what they have to be.  `field`: of the call, if it is to blame."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.field, self.code = message, field, code


class WeightsConflict(WeightsError):
    """They belong to other weights than those that are there."""


class TransferError(WeightsError):
    """Tensors did not arrive as announced, or the other end of a process group has gone."""
