from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tokserve.layers.mlp import GatedMLP, MLPSpec
from tokserve.layers.options import LayerOptions


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_is_activated_and_multiplied_by_up(activation: str, bias: bool) -> None:
    mlp = GatedMLP(6, MLPSpec(10, activation, bias), LayerOptions(torch.float32))  # type: ignore[arg-type]
    weights = {}
    for name, parameter in mlp.parameters().items():
        weights[name] = torch.randn(parameter.shape)
        parameter.load(weights[name])
    assert sum(name.endswith("bias") for name in weights) == (3 if bias else 0)

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = torch.randn(4, 6)
    gate = project("gate_proj", x)
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(mlp(x), project("down_proj", active * project("up_proj", x)), atol=1e-4, rtol=1e-4)
