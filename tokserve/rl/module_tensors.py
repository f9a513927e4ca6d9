"""The tensors of a module by their names in a checkpoint: without what wrappers add to names, and with peft's adapters
merged.

Neither peft nor FSDP is imported here: their modules are known by what they have.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor, nn

# what torch.compile, FSDP1, activation checkpointing and Lightning call the module that they wrap
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
CALLS_IT_MODULE = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "AveragedModel"}
ADAPTED = "base_layer"  # what peft calls the layer that an adapter adds to
FLAT = "_flat_param"
Tensors = Generator[tuple[str, Tensor], None, None]


def module_tensors(module: nn.Module) -> Tensors:
    """(name, tensor) of the parameters, one of those that are tied, and of the buffers that a checkpoint has.

    An adapter of peft that is active and not merged is merged layer by layer: a tensor of such a layer is valid until
    the next one is requested.  Afterwards the layer has its old bits.  Raises TypeError for an adapter that no weights
    can stand for, and for what FSDP has sharded.
    """
    return _walk(module, "", set())


def buffer_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the buffers that a checkpoint has: those of the model itself, and none of adapters."""
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            whole = checkpoint_name(f"{prefix}.{name}" if prefix else name)
            if buffer is not None and name not in part._non_persistent_buffers_set and not is_of_adapter(whole):
                yield whole, buffer


def adds_adapters(module: nn.Module) -> bool:
    """Whether peft has wrapped a layer of it."""
    return any(_is_adapted(part) for part in module.modules())


def checkpoint_name(name: str) -> str:
    """A tensor's name in a checkpoint, of its name in a wrapped module."""
    parts = [part for part in name.split(".") if part not in WRAPPED]
    while parts[0] == "module" and len(parts) > 1:
        del parts[0]
    if parts[:2] == ["base_model", "model"]:
        del parts[:2]
    return ".".join(part for part in parts if part != ADAPTED)


def is_of_adapter(name: str) -> bool:
    """Whether a name is that of a part of an adapter, as peft and `PolicyModel` call them."""
    return any(part.startswith(("lora_", "modules_to_save", "trainable_tokens_")) for part in name.split("."))


def _walk(module: Any, prefix: str, seen: set[Tensor]) -> Tensors:
    if hasattr(module, "get_base_model") and hasattr(module, "peft_config"):
        if module.active_peft_config.is_prompt_learning:
            raise TypeError(f"{module.active_peft_config.peft_type} is no change of weights: it cannot be pushed")
        yield from _walk(module.get_base_model(), prefix, seen)
    elif _kinds(module) & CALLS_IT_MODULE:
        yield from _walk(module.module, prefix, seen)
    elif _is_adapted(module):
        yield from _merged(module, prefix, seen)
    elif _has_copies(module):
        yield from _walk(_active_copy(module), prefix, seen)
    else:
        _check_gathered(module, prefix)
        yield from _own(module, prefix, seen)
        for name, child in module.named_children():
            yield from _walk(child, prefix if name in WRAPPED else f"{prefix}{name}.", seen)


def _own(module: nn.Module, prefix: str, seen: set[Tensor]) -> Tensors:
    """What the module itself has."""
    tensors: dict[str, Tensor | None] = dict(module._parameters)
    tensors |= {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for name, tensor in tensors.items():
        if tensor is not None and tensor not in seen:
            seen.add(tensor)
            yield prefix + name, tensor


def _is_adapted(module: nn.Module) -> bool:
    """Whether it is a layer of peft around another one."""
    return all(hasattr(module, name) for name in ("merge", "unmerge", "merged", "get_base_layer", ADAPTED))


def _merged(layer: Any, prefix: str, seen: set[Tensor]) -> Tensors:
    """The tensors of the layer that this one adapts, with what the forward pass adds to them."""
    base = layer.base_layer
    if layer.merged or layer.disable_adapters:
        yield from _walk(base, prefix, seen)
        return
    kept = [(parameter, parameter.detach().clone()) for parameter in base.parameters()]
    layer.merge()
    try:
        yield from _walk(base, prefix, seen)
    finally:
        layer.unmerge()
        for parameter, values in kept:  # unmerging subtracts, which rounds
            parameter.data.copy_(values)


def _has_copies(module: Any) -> bool:
    """Whether it is peft's wrapper of a module that is trained as a whole, or some of whose tokens are."""
    return hasattr(module, "original_module") and hasattr(module, "active_adapters")


def _active_copy(wrapper: Any) -> nn.Module:
    if "token_adapter" in wrapper._modules:
        return wrapper.token_adapter
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    names = [name for name in active if name in wrapper.modules_to_save]
    return wrapper.modules_to_save[names[0]] if names else wrapper.original_module


def _check_gathered(module: Any, prefix: str) -> None:
    """Refuse what FSDP1 has sharded, inside of whose `summon_full_params` it is whole."""
    if FLAT in module._parameters:
        raise TypeError(f"{prefix}{FLAT} is a part of FSDP's: push inside of FSDP.summon_full_params(module)")
    if "FullyShardedDataParallel" in _kinds(module):
        gathered = module.training_state.name == "SUMMON_FULL_PARAMS"
        if module.process_group.size() > 1 and not gathered:
            where = prefix.removesuffix(".") or "the module"
            raise TypeError(f"{where} is sharded by FSDP: push inside of FSDP.summon_full_params(module)")


def _kinds(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}
