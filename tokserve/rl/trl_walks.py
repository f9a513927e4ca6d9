"""TRL's walks over the tensors that a server gets, with the buffers that belong to a checkpoint.

TRL walks parameters only, and a router's correction bias is a buffer: an update without it is not complete.  Written
for TRL 1.16.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from trl.generation import vllm_generation

from .module_tensors import buffer_tensors

OF_ASYNCHRONOUS_TRAINERS = (
    "trl.experimental.async_grpo.async_grpo_trainer",
    "trl.experimental.async_distillation.async_distillation_trainer",
)
WALK = "_iter_vllm_named_params"
Walk = Callable[[Any], Iterator[tuple[str, Tensor]]]


def add_buffers() -> None:
    """Have the trainers of TRL that are loaded walk buffers too; a second time does nothing."""
    generation = vllm_generation.VLLMGeneration
    generation._iter_named_params = _with_buffers(generation._iter_named_params, lambda walker: walker.model)
    for name in OF_ASYNCHRONOUS_TRAINERS:
        if name in sys.modules:
            module = vars(sys.modules[name])
            module[WALK] = _with_buffers(module[WALK], lambda model: model)


def _with_buffers(walk: Walk, model_of: Callable[[Any], Any]) -> Walk:
    """`walk` of something that has a model, and then the model's buffers."""
    if hasattr(walk, "with_buffers"):
        return walk

    @functools.wraps(walk)
    def walk_on(walker: Any) -> Iterator[tuple[str, Tensor]]:
        yield from walk(walker)
        yield from buffer_tensors(model_of(walker))

    vars(walk_on)["with_buffers"] = True
    return walk_on
