"""The adapter of a request in the Python API: a name, or vLLM's `LoRARequest`."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a request is for, as in vLLM: adapters are identified by name; another `lora_int_id` or `lora_path`
    than before, or changed files, have it loaded again, and `load_inplace` in any case.  The other fields have no
    effect: they follow from the files."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | os.PathLike[str] = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return os.fspath(self.lora_path)


AdapterChoice = LoRARequest | str | None


def adapter_name(lora_request: AdapterChoice) -> str:
    """The name, "" for none."""
    return lora_request.lora_name if isinstance(lora_request, LoRARequest) else lora_request or ""
