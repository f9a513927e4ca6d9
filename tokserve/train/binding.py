"""The ops that a policy computes with: bound as a server binds them, and bound again if others were since."""

from __future__ import annotations

from tokserve import ops as bound_ops
from tokserve.ops import devices
from tokserve.ops.arithmetic import FMA, choose_kernels
from tokserve.ops.registry import REFERENCE
from tokserve.train.layers.products import Products

COMPILED = "cpp"
PAGES = {"cpu": 16, "cuda": 64}  # by kind of device, tokens of a block of keys: as a server has them by default


class Binding:
    """`overrides`, `arithmetic` and `kernels` as the server's options ops, cpu_arithmetic and cpu_kernels.  `device`:
    "cpu", or "cuda" for this process's current GPU.  Raises StartError."""

    def __init__(
        self, dtype: str, overrides: dict[str, str] | None, arithmetic: str, kernels: str | None, device: str = "cpu"
    ) -> None:
        self.kind = devices.kind_of(device)
        self._dtype, self._overrides = dtype, overrides
        self._chosen = bound_ops.bind(self.kind, overrides)
        self._kernels: str | None = None
        self.arithmetic: str | None = None
        if COMPILED in self._chosen.values():
            chosen = choose_kernels(dtype, arithmetic, kernels)
            self._kernels, self.arithmetic = chosen.name, chosen.arithmetic
        self.device = bound_ops.torch_device
        self._functions = self._current()

    @property
    def page(self) -> int:
        """Tokens of a block of keys."""
        return PAGES[self.kind]

    @property
    def products(self) -> Products:
        """Which products gradients are made of."""
        grouped = self._chosen["expert_products"] != REFERENCE  # which would compute expert after expert, too
        return Products(native=self.arithmetic not in (None, FMA), grouped=grouped)

    def _current(self) -> list[object]:
        return [vars(bound_ops)[name] for name in self._chosen]

    def activate(self) -> bool:
        """Make these the ops in use; True if weights have to be packed again."""
        changed = self._current() != self._functions
        if changed:
            bound_ops.bind(self.kind, self._overrides)
        if self._kernels is not None:
            choose_kernels(self._dtype, kernels=self._kernels)
        return changed
