"""Elements of checkpoint tensors read from, and written to, the memory of packed layers: every layer, every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tokserve import ops
from tokserve.families.quantization.methods import METHODS
from tokserve.features.weights.checksums import checksums
from tokserve.layers.embedding import Embedding, Head
from tokserve.layers.linear import GatedLinear, Linear
from tokserve.layers.norm import NormSpec, RMSNorm
from tokserve.layers.options import LayerOptions
from tokserve.layers.places import gather, scatter

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


pytestmark = pytest.mark.usefixtures("kernels")


def layers(dtype: torch.dtype) -> dict[str, Any]:
    options, wide = LayerOptions(dtype), LayerOptions(torch.float32)
    head, other = Head(71, 9, options), Head(71, 9, wide)
    return {
        "linear": Linear(37, {"q": 70, "k": 33, "v": 1}, options, bias=True),
        "gated": GatedLinear(22, {"gate": 45, "up": 45}, "silu", options, bias=True),
        "norm": RMSNorm(13, NormSpec(1e-6), dtype),
        "norm with an offset": RMSNorm(13, NormSpec(1e-6, 1.0), dtype),
        "embedding": Embedding(71, 9, dtype),
        "tied": Embedding(71, 9, dtype, head=head),
        "tied to a wider head": Embedding(71, 9, dtype, head=other),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_are_read_and_written_where_loading_puts_them(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for kind, layer in layers(dtype).items():
        again, tensors = layers(dtype)[kind], {}
        for name, parameter in layer.parameters().items():
            tensors[name] = torch.randn(parameter.shape, generator=generator).to(parameter.source_dtype)
            parameter.load(tensors[name])
        for name, parameter in layer.parameters().items():
            tensor, places = tensors[name], parameter.places()
            rows = len(tensor)
            for first, last in ((0, rows), (0, 1), (rows // 2, rows), (rows // 3, rows // 2 + 1)):
                part = places[0].read(first, last)
                assert part.to(tensor.dtype).equal(tensor[first:last]), (kind, name)
            count = max(1, tensor.numel() // 3)
            indices = torch.randperm(tensor.numel(), generator=generator)[:count].sort().values.numpy()
            positions = places[0].positions(indices)
            assert gather(places[0], positions, tensor.dtype).equal(tensor.view(-1)[indices]), (kind, name)
            values = torch.randn(count, generator=generator).to(tensor.dtype)
            for place in places:
                scatter(place, place.positions(indices), values)
            tensors[name] = tensor.clone()
            tensors[name].view(-1)[indices] = values
        for name, parameter in again.parameters().items():
            parameter.load(tensors[name])
        assert checksums(layer) == checksums(again), kind


def test_quantized_weights_have_no_places() -> None:
    for method in ("int8", "fp8"):
        linear = Linear(32, {"a": 64}, LayerOptions(torch.bfloat16, METHODS[method]), bias=True)
        linear.load("a", torch.randn(64, 32))
        parameters = linear.parameters()
        assert not parameters["a.weight"].places() and len(parameters["a.bias"].places()) == 1
        assert parameters["a.weight"].source_dtype is torch.bfloat16
    head = Head(64, 32, LayerOptions(torch.bfloat16, METHODS["int8"]))
    tied = Embedding(64, 32, torch.bfloat16, head=head)
    tied.load(torch.randn(64, 32))
    assert not tied.places()


def test_large_weights_have_positions_of_64_bits() -> None:
    packed = ops.PackedWeight(1 << 20, 1 << 13, torch.bfloat16, torch.empty(0), panel=64, depth=2)
    rows = np.array([(1 << 20) - 1])
    assert packed.positions(rows, np.array([(1 << 13) - 1])).tolist() == [(1 << 33) - 1]
