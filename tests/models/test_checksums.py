"""Digests of weights: which tensors of a model are found, under which names, and what changes a digest."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokserve.features.weights.checksums import checksums
from tokserve.layers.parameter import Parameter


@dataclass
class Layer:
    weight: Tensor
    more: Any = None


def digest(tensor: Tensor) -> str:
    return checksums(Layer(tensor))["weight"]


def test_tensors_are_named_once_by_their_first_path() -> None:
    one, two, three = torch.zeros(2), torch.ones(2), torch.ones(3)
    shared = Layer(one, {"a": two, "b": [three]})
    loader = Parameter((2,), lambda tensor: None, torch.float32)
    foreign = argparse.Namespace(weight=one)
    actual = checksums([shared, (two, None, 5), shared, loader, foreign])
    assert list(actual) == ["0.weight", "0.more.a", "0.more.b.0"]
    assert actual["0.more.a"] == digest(two) != actual["0.weight"]


def test_a_circle_is_walked_once() -> None:
    layer = Layer(torch.zeros(2))
    layer.more = [layer]
    assert list(checksums(layer)) == ["weight"]


def test_values_shape_and_type_count_and_strides_do_not() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    others = (tensor + 1, tensor.view(3, 2), tensor.view(torch.int32), tensor.double())
    assert len({digest(tensor), *map(digest, others)}) == 5
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
