"""Checkpoint formats: how stored tensors form weights, and that another format needs no edit elsewhere."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.driver import prefill
from tests.models.test_load import IDS, logits, opened, rewrite, stored
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import ops
from tokserve.base.errors import RequestError
from tokserve.families.quantization.formats import pick
from tokserve.families.quantization.formats.float8 import Float8Format
from tokserve.families.quantization.methods import FLOAT8, METHODS, Float8Weight
from tokserve.features.weights.staging import Staging
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import StoredWeight
from tokserve.layers.quant import UNQUANTIZED, Unquantized
from tokserve.models import load as loading
from tokserve.models.decoder import Decoder
from tokserve.models.formats import DENSE, WHOLE, DenseFormat, Described, Part, group

PACKAGE = Path(loading.__file__).parent.parent
FP8 = torch.float8_e4m3fn
FORMAT = Float8Format((32, 64))
HF = tiny_config("qwen3")


def test_a_weight_and_its_scale_are_one_group() -> None:
    tensors = {
        "a.weight_scale": torch.ones(2, 1),
        "a.weight": torch.ones(64, 64).to(FP8),
        "a.input_scale": torch.ones(1),
        "a.activation_scale": torch.ones(1),
        "b.weight": torch.ones(4, 4),
    }
    assert group(FORMAT, tensors) == {
        "a.weight": {"values": "a.weight", "scales": "a.weight_scale"},
        "b.weight": {WHOLE: "b.weight"},
    }
    assert group(DENSE, tensors) == {name: {WHOLE: name} for name in tensors}


@pytest.mark.parametrize(
    "change",
    [
        {"a.weight": torch.ones(64, 64)},  # not float8
        {"a.weight_scale": torch.ones(3, 3)},  # no shape of a scale
        {"a.weight_scale": torch.ones(1).to(FP8)},  # nor a dtype
        {"a.weight_scale": None},
    ],
)
def test_parts_that_form_no_weight_are_kept_separately(change: dict[str, Tensor | None]) -> None:
    tensors = {"a.weight": torch.ones(64, 64).to(FP8), "a.weight_scale": torch.ones(1)} | change
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert group(FORMAT, present) == {name: {WHOLE: name} for name in present}


def test_a_second_scale_is_kept_separately() -> None:
    tensors = {
        "a.weight": torch.ones(8, 8).to(FP8),
        "a.weight_scale": torch.ones(1),
        "a.weight_scale_inv": torch.ones(1),
    }
    assert group(FORMAT, tensors).keys() == {"a.weight", "a.weight_scale_inv"}


def test_config_json_picks_the_format() -> None:
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 64]}
    assert pick.checkpoint_format({"quantization_config": config}) == FORMAT
    assert pick.checkpoint_format({"compression_config": {"quant_method": "fp8"}}) == Float8Format((128, 128))
    for other in (None, {"quant_method": "gptq"}, [1]):
        assert pick.checkpoint_format({"quantization_config": other}) == DENSE


def test_methods_accept_what_they_can_multiply_with() -> None:
    def weight(groups: int, size: int) -> Float8Weight:
        return Float8Weight(torch.ones(8, groups * size).to(FP8), torch.ones(groups, 8), size)

    assert FLOAT8.accepts(weight(1, 40)) and FLOAT8.accepts(weight(2, ops.FLOAT8_STEP))
    assert not FLOAT8.accepts(weight(2, 40))
    assert not any(method.accepts(weight(1, 40)) for method in (UNQUANTIZED, METHODS["int8"]))


def test_shards_are_joined_only_in_groups_of_one_size() -> None:
    one, other = (Float8Weight(torch.ones(rows, 64).to(FP8), torch.full((2, rows), 2.0), 32) for rows in (3, 5))
    joined = one.joined([other])
    assert joined is not None and torch.equal(joined.dense(), torch.full((8, 64), 2.0))
    assert one.joined([Float8Weight(other.values, other.scales[:1], 64)]) is None


@dataclass(frozen=True)
class Sum:
    """A weight stored as two bfloat16 tensors whose sum it is."""

    high: Tensor
    low: Tensor
    dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape

    def dense(self) -> Tensor:
        return self.high.float() + self.low.float()

    def tensors(self) -> tuple[Tensor, ...]:
        return self.high, self.low

    def clone(self) -> Sum:
        return Sum(self.high.clone(), self.low.clone())

    def narrow(self, dim: int, start: int, length: int) -> Sum:
        return Sum(self.high.narrow(dim, start, length), self.low.narrow(dim, start, length))

    def joined(self, others: Sequence[StoredWeight]) -> Sum | None:
        sums: list[Sum] = [self, *(other for other in others if isinstance(other, Sum))]
        return Sum(torch.cat([one.high for one in sums]), torch.cat([one.low for one in sums]))


@dataclass(frozen=True)
class Sums(DenseFormat):
    """x.high and x.low form x.weight."""

    name: str = "sums"
    needs: frozenset[str] = frozenset(("high", "low"))

    def part(self, name: str, tensor: Described) -> Part:
        stem, _, role = name.rpartition(".")
        return Part(f"{stem}.weight", role) if role in self.needs else Part(name)

    def shape(self, parts: Mapping[str, Described]) -> tuple[int, ...]:
        return tuple(parts["high"].shape)

    def fits(self, role: str, tensor: Described, shape: tuple[int, ...]) -> bool:
        return tuple(tensor.shape) == shape

    def assemble(self, parts: Mapping[str, Tensor]) -> Sum:  # type: ignore[override]
        return Sum(parts["high"], parts["low"])

    def incomplete(self, parts: Mapping[str, Collection[str]]) -> list[tuple[str, list[str]]]:
        return [("of which a half is missing", list(parts))]


class SumMethod(Unquantized):
    """Packs sums as they are stored; counts them."""

    def __init__(self) -> None:
        self.packed = 0

    def accepts(self, stored: StoredWeight) -> bool:
        return isinstance(stored, Sum)

    def pack(self, weight: Tensor | Sum, *rest: Any) -> Any:
        self.packed += isinstance(weight, Sum)
        return super().pack(weight.dense() if isinstance(weight, Sum) else weight, *rest)

    def pack_gated(self, weight: Tensor | Sum, *rest: Any) -> Any:
        self.packed += isinstance(weight, Sum)
        return super().pack_gated(weight.dense() if isinstance(weight, Sum) else weight, *rest)


def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    halves: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            halves[name] = tensor
            continue
        stem = name.removesuffix("weight")
        halves[stem + "low"] = tensor - tensor.bfloat16().float()
        halves[stem + "high"] = tensor.bfloat16()
        halves[stem + "low"] = halves[stem + "low"].bfloat16()
    return halves


def test_a_custom_format_is_loaded_and_kept_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path, HF)
    tensors = stored(directory)
    halves = split(tensors)
    summed = {name: tensor for name, tensor in halves.items() if "_proj" not in name}
    for name in tensors.keys() - summed.keys():
        stem = name.removesuffix("weight")
        summed[name] = halves[stem + "high"].float() + halves[stem + "low"].float()
    rewrite(directory, summed)
    expected = logits(directory)
    rewrite(directory, halves)
    method = SumMethod()
    monkeypatch.setattr("tokserve.models.spec.checkpoint_format", lambda hf: Sums())
    monkeypatch.setitem(METHODS, "sums", method)
    decoder = opened(directory, quantization="sums")
    assert torch.equal(prefill(decoder, IDS), expected)
    assert method.packed == len(decoder.named_linears())
    assert torch.equal(logits(directory), expected)  # a method that does not know the form gets what it means

    def updated(pushed: dict[str, Tensor]) -> Decoder:
        staging = Staging(decoder.blank())
        for name, tensor in pushed.items():
            staging.push(name, tensor)
        return staging.finish()

    assert torch.equal(prefill(updated(dict(reversed(halves.items()))), IDS), expected)
    assert torch.equal(prefill(updated(summed), IDS), expected)
    lost = "model.layers.0.mlp.up_proj.low"
    with pytest.raises(RequestError, match=r"1 of which a half is missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        updated({name: tensor for name, tensor in halves.items() if name != lost})


def test_a_layer_turns_stored_shards_into_floats_where_one_is_floats() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {name: torch.randn(4, 64, generator=generator) for name in ("a", "b")}
    one = Float8Weight(parts["a"].to(FP8), torch.full((1, 4), 0.5), 64)
    packed = []
    for order in (("a", "b"), ("b", "a")):
        layer = Linear(64, {"a": 4, "b": 4}, LayerOptions(torch.float32, FLOAT8))
        for name in order:
            layer.parameters()[f"{name}.weight"].take(one if name == "a" else parts[name])
        packed.append(layer.packed)
    expected = FLOAT8.pack(torch.cat((one.dense(), parts["b"])))
    assert all(torch.equal(matrix.packed, expected.packed) for matrix in packed)


ALLOWED = {  # files that may name float8 or int8
    "ops": "kernels",
    "gpu/candidates.py": "the descriptions of kernels",
    "gpu/compile": "what a card can multiply",
    "gpu/kernels": "kernels",
    "models/formats.py": "formats",
    "families/quantization/formats": "formats",
    "families/quantization/methods.py": "methods",
    "layers/quant.py": "the types of packed weights",
    "families/gguf": "formats",
    "config": "the option",
    "dialects/trainers/routes.py": "options in a message",
    "runner/device.py": "what a device can multiply",
    "protocol/kv_spec.py": "the cache's dtype",
    "runner/kvcache.py": "the cache's dtype",
    "models/kv_scales.py": "the cache's scales",
    "models/load.py": "the cache's scales",
    "families/hf/load.py": "the cache's dtype",
    "rl/deltas.py": "the names of safetensors' dtypes",
    "families/latent/layers.py": "the cache's dtype",
    "features/kv/kv_copies.py": "the cache's dtype",
    "features/speculation/draft_model.py": "the option",
    "features/speculation/quantized_copy.py": "the option",
    "runner/startup.py": "the option",
}
NO_FORMAT = re.compile(  # the cache's dtype, what a device can do, the option's value, torch's name
    r"float8_cache|float8 (KV )?cache|(has|require)_float8|kvcache\.FLOAT8|quantization == \"fp8\"|torch\.\w+|uint8"
    r"|\"F8_E4M3\",$",
    re.MULTILINE,
)


def test_formats_are_named_in_few_files() -> None:
    named = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if not any(name.startswith(allowed) for allowed in ALLOWED):
            text = NO_FORMAT.sub("", path.read_text())
            if re.search(r"float8|fp8|\bint8|F8_E4M3", text, re.IGNORECASE):
                named.add(name)
    assert named == set()
