"""What the layers of a model keep in the KV cache, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

ITEM_BYTES = {"float32": 4, "float8_e4m3fn": 1}  # 2 for other dtypes


def dtype_name(dtype: object) -> str:
    """The name of a torch dtype without `torch.`, as specs and options have it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one attention layer stores per token: K and V of `heads` x `dim` elements of `dtype`; no heads: nothing.

    `window` > 0: attention reads only the last `window` tokens.  `chunk` > 0: it reads only the token's chunk of so
    many tokens, which whole blocks fill.  `kind` says how `shapes` grow: "kv" is pages of keys and values, "latent"
    pages of rows of `dim` elements, from which all heads have both, "hidden" pages of hidden states, which no attention
    reads.
    """

    heads: int
    dim: int
    dtype: str
    window: int = 0
    kind: Literal["kv", "latent", "hidden"] = "kv"
    chunk: int = 0

    def shapes(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        """The shape that one block has in each of the layer's tensors, keys first."""
        if self.kind != "kv":
            return ((block_size, self.dim),)
        if not self.heads:
            return ()
        return ((self.heads, block_size, self.dim),) * 2

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of one layer."""
        return ITEM_BYTES.get(self.dtype, 2) * sum(prod(shape) for shape in self.shapes(block_size))

    def bytes_per_token(self) -> int:
        """Bytes of one token of one layer."""
        return self.block_bytes(1)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one layer with a recurrent state keeps of a request, however long it is.

    A ring of the last inputs of a convolution of `taps`, `entry` elements of `dtype` each, and beside it, if the layer
    has one, a `memory` of this shape in float32.
    """

    taps: int
    entry: int
    dtype: str
    memory: tuple[int, ...] = ()
    kind: Literal["state"] = "state"

    def state_shapes(self, spare_inputs: int) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shapes and dtypes of a state's tensors; the ring holds so many inputs beyond its taps."""
        ring = ((self.taps + spare_inputs, self.entry), self.dtype)
        return (ring, (self.memory, "float32")) if self.memory else (ring,)

    def state_bytes(self, spare_inputs: int) -> int:
        """Bytes of one state of one layer."""
        return sum(ITEM_BYTES.get(dtype, 2) * prod(shape) for shape, dtype in self.state_shapes(spare_inputs))

    def block_bytes(self, block_size: int) -> int:
        """No bytes: nothing is kept in pages."""
        return 0

    def bytes_per_token(self) -> int:
        """No bytes: nothing is kept per token."""
        return 0


LayerSpec = KVSpec | StateSpec


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How many states there are: one for each slot, then `snapshots`, taken every `interval` tokens.  `spare_inputs`:
    of a ring, for the drafts of a step."""

    slots: int
    snapshots: int
    interval: int
    spare_inputs: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The cache a model needs: a spec per layer, and how many pages of how many tokens there are.  `states`: of a model
    some of whose layers have a recurrent state."""

    specs: tuple[LayerSpec, ...]
    num_blocks: int
    block_size: int
    states: StateLayout | None = None

    def bytes(self) -> int:
        """The bytes of all pages."""
        return self.num_blocks * sum(spec.block_bytes(self.block_size) for spec in self.specs)

    def state_bytes(self) -> int:
        states = self.states
        return 0 if states is None else (states.slots + states.snapshots) * one_state(self.specs, states.spare_inputs)


def one_state(specs: tuple[LayerSpec, ...], spare_inputs: int) -> int:
    """Bytes of one state of all layers."""
    return sum(spec.state_bytes(spare_inputs) for spec in specs if isinstance(spec, StateSpec))
