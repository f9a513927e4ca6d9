"""The ops that a policy computes with: bound as a server binds them, and bound again if others were since."""

from __future__ import annotations

from tokserve import ops as bound_ops
from tokserve.ops.arithmetic import choose_kernels

COMPILED = "cpp"


class Binding:
    """`overrides`, `arithmetic` and `kernels` as the server's options ops, cpu_arithmetic and cpu_kernels."""

    def __init__(self, dtype: str, overrides: dict[str, str] | None, arithmetic: str, kernels: str | None) -> None:
        self._dtype, self._overrides = dtype, overrides
        self._chosen = bound_ops.bind(bound_ops.torch_device.type, overrides)
        self._kernels: str | None = None
        self.arithmetic: str | None = None
        if COMPILED in self._chosen.values():
            chosen = choose_kernels(dtype, arithmetic, kernels)
            self._kernels, self.arithmetic = chosen.name, chosen.arithmetic
        self._functions = self._current()

    def _current(self) -> list[object]:
        return [vars(bound_ops)[name] for name in self._chosen]

    def activate(self) -> bool:
        """Make these the ops in use; True if weights have to be packed again."""
        changed = self._current() != self._functions
        if changed:
            bound_ops.bind(bound_ops.torch_device.type, self._overrides)
        if self._kernels is not None:
            choose_kernels(self._dtype, kernels=self._kernels)
        return changed
