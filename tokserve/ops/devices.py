"""The devices that ops can be bound for, as a caller of this process names them."""

from __future__ import annotations

import torch

from tokserve.base.errors import StartError

DEVICES = ("cpu", "cuda")


def kind_of(device: str | torch.device) -> str:
    """The kind of a device that is here.  Raises StartError."""
    kind = str(device).partition(":")[0]
    if kind not in DEVICES:
        raise StartError(f"device {str(device)!r} must be one of {', '.join(DEVICES)}")
    chosen = torch.device(device)
    if kind == "cuda" and not has_gpu():
        raise StartError(f"device {str(device)!r}: torch sees no GPU here")
    if kind == "cuda" and chosen.index is not None and chosen.index != current_gpu():
        raise StartError(
            f"device {str(device)!r} is not this process's current GPU: call torch.cuda.set_device({chosen.index})"
        )
    return kind


def has_gpu() -> bool:
    return torch.cuda.is_available()


def current_gpu() -> int:
    return torch.cuda.current_device()
