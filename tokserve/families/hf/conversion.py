"""Where the tensors of a checkpoint go in a module of transformers, which may name, join or split them otherwise.

transformers lists what it does to a checkpoint's tensors as it loads them: renamings, and converters that make one or
several tensors of the module from those of a group, for instance one tensor of all experts from one of each.  Here each
tensor of a group is a `Parameter` of its own, so that checkpoints and updates have the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tokserve.base.errors import StartError
from tokserve.layers.parameter import Parameter


class Conversions:
    """What transformers does to the tensors of a checkpoint for `module`, a PreTrainedModel."""

    def __init__(self, module: Any) -> None:
        self._module = module
        transforms = get_model_conversion_mapping(module)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]

    def target(self, name: str) -> tuple[str, str | None]:
        """The module's name for a checkpoint's tensor, and the pattern of the converter that takes it, if one does."""
        target, pattern = rename_source_key(name, self._renamings, self._converters)
        return target, pattern

    def groups(self, shapes: Mapping[str, tuple[int, ...]], targets: Mapping[str, Parameter]) -> list[TensorGroup]:
        """The tensors of a checkpoint that converters take for these targets.  Raises StartError."""
        patterns: dict[str, dict[str, str]] = {}
        for name in sorted(shapes, key=dot_natural_key):
            target, pattern = self.target(name)
            if pattern is not None and target in targets:
                patterns.setdefault(target, {})[name] = pattern
        groups = []
        for target, of_names in patterns.items():
            first = next(iter(of_names.values()))
            converter = next(one for one in self._converters if first in one.source_patterns)
            groups.append(TensorGroup(self._module, converter, target, of_names, shapes, targets))
        return groups


class _Sizes:
    """Takes the place of the module, for converters that look up how large its parameters are."""

    def __init__(self, targets: Mapping[str, Parameter]) -> None:
        self._targets = targets

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._targets[name].shape, device="meta")

    get_parameter_or_buffer = get_parameter


class TensorGroup:
    """The tensors of which one converter makes a target, or several.  `patterns`: by name, in their order."""

    def __init__(
        self,
        module: Any,
        converter: Any,
        target: str,
        patterns: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        targets: Mapping[str, Parameter],
    ) -> None:
        self._module, self._converter, self._target, self._patterns = module, converter, target, dict(patterns)
        self._received: dict[str, Tensor] = {}
        self._sizes = _Sizes(targets)
        planned = self._convert({name: torch.empty(shapes[name], device="meta") for name in patterns})
        for name, tensor in planned.items():
            expected = list(targets[name].shape) if name in targets else "no such tensor"
            if list(tensor.shape) != expected:
                raise StartError(
                    f"{self._module.__class__.__name__}: the tensors of {name} do not fit: expected {expected}, found "
                    f"{list(tensor.shape)}"
                )
        self.targets = {name: targets[name] for name in planned}
        dtype = targets[target].dtype
        self.parameters = {name: Parameter(shapes[name], self._loader(name, dtype), dtype) for name in patterns}

    def _loader(self, name: str, dtype: torch.dtype) -> Callable[[Tensor], None]:
        def load(tensor: Tensor) -> None:
            self._received[name] = tensor.to(dtype, copy=True)
            if len(self._received) == len(self._patterns):
                received, self._received = self._received, {}
                for target, tensor in self._convert(received).items():
                    self.targets[target].load(tensor)

        return load

    def _convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the targets that a conversion makes."""
        converter = deepcopy(self._converter)
        for name, pattern in self._patterns.items():
            converter.add_tensor(self._target, name, pattern, tensors[name])
        try:
            converted = converter.convert(self._target, model=self._sizes, config=self._module.config)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise StartError(f"the tensors of {self._target} do not fit each other: {error}") from None
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}
