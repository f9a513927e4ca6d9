"""Which implementation a name stands for after `bind`, and what `bind` refuses."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types

import pytest
import torch

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.ops import registry
from tokserve.ops.registry import OPS


@pytest.fixture(autouse=True)
def nothing_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with references and no compiled extension, and leaves what was bound before."""
    monkeypatch.setitem(registry.EXTENSIONS, "cpu", ("tokserve._absent", "tokserve.ops._absent"))
    for op in OPS.values():
        only = {registry.REFERENCE: op.implementations[registry.REFERENCE]}
        monkeypatch.setattr(op, "implementations", only)
        monkeypatch.setattr(ops, op.name, op.reference)


def shout(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(2, -1)[0] * 0 + 77


def test_names_are_the_references_before_bind() -> None:
    spec = importlib.util.spec_from_file_location("unbound_ops", ops.__file__)
    assert spec is not None and spec.loader is not None
    unbound = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unbound)
    names = [name for name in ops.__all__ if name in OPS]
    assert sorted(names) == sorted(OPS)
    for name in names:
        assert getattr(unbound, name) is OPS[name].reference


def test_bind_without_the_extension_warns_once_and_takes_the_references(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tokserve"):
        assert set(ops.bind("cpu").values()) == {"torch"}
    assert len(caplog.records) == 1 and "tokserve._absent" in caplog.text
    caplog.clear()
    ops.bind("cpu", {"*": "torch"})
    assert not caplog.records  # nothing compiled was asked for


def test_bind_prefers_the_compiled_implementation_and_replaces_the_name() -> None:
    OPS["silu_mul"].implement("cpp", device="cpu")(shout)
    bound = ops.bind("cpu", None)
    assert bound["silu_mul"] == "cpp" and bound["gelu_mul"] == "torch" and set(bound) == set(OPS)
    assert ops.silu_mul is shout
    assert ops.silu_mul(torch.ones(1, 4)).tolist() == [[77.0, 77.0]]
    assert ops.bind("cpu", {"silu_mul": "torch"})["silu_mul"] == "torch"
    assert ops.silu_mul is OPS["silu_mul"].reference


def test_star_names_all_ops_that_have_the_implementation_and_a_name_beats_it() -> None:
    OPS["silu_mul"].implement("cpp", device="cpu")(shout)
    OPS["silu_mul"].implement("slow", device="cpu")(shout)
    OPS["gelu_mul"].implement("slow", device="cpu")(shout)
    bound = ops.bind("cpu", {"*": "slow"})
    assert (bound["silu_mul"], bound["gelu_mul"], bound["rope"]) == ("slow", "slow", "torch")
    bound = ops.bind("cpu", {"*": "torch", "gelu_mul": "slow"})
    assert (bound["silu_mul"], bound["gelu_mul"]) == ("torch", "slow")


def test_an_implementation_for_another_device_is_not_taken() -> None:
    OPS["silu_mul"].implement("cpp", device="cuda")(shout)
    assert set(ops.bind("cpu").values()) == {"torch"}
    with pytest.raises(StartError, match="no implementation 'cpp' here; there are: torch"):
        ops.bind("cpu", {"silu_mul": "cpp"})


def test_a_device_that_references_do_not_run_on_needs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.EXTENSIONS, "cuda", ("tokserve._absent", "tokserve.ops._absent"))
    with pytest.raises(StartError, match=r"cuda needs kernels that are not here: tokserve\._absent"):
        ops.bind("cuda")


def test_inexact_products_use_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "torch_device", ops.torch_device)
    monkeypatch.setattr(registry, "load_extension", lambda device: None)
    products = ("linear", "gated_linear", "linear_float8")
    for name in (
        *products,
        "pack_linear",
        "linear_heads",
        "embedding",
        "pack_gated",
        "pack_linear_float8",
        "pack_gated_float8",
        "pack_scaled_float8",
        "gated_linear_float8",
        "experts",
        "experts_float8",
    ):
        for one in ("triton", "cublas"):
            OPS[name].implement(one, device="cuda")(lambda *_: None)
    assert ops.bind("cuda")["linear"] == "triton" and ops.torch_device.type == "cuda"
    bound = ops.bind("cuda", exact=False)
    assert {bound[name] for name in (*products, "pack_linear", "embedding")} == {"cublas"}
    assert ops.bind("cuda", {"linear": "triton"}, exact=False)["embedding"] == "triton"


def test_linear_and_its_packing_go_together() -> None:
    OPS["linear"].implement("cpp", device="cpu")(lambda *_: torch.zeros(0))
    OPS["pack_linear"].implement("cpp", device="cpu")(lambda weight: ops.PackedWeight(1, 1, weight.dtype, weight))
    bound = ops.bind("cpu")
    assert bound["linear"] == bound["pack_linear"] == "cpp"
    bound = ops.bind("cpu", {"linear": "torch"})
    assert bound["linear"] == bound["pack_linear"] == "torch"
    with pytest.raises(StartError, match="'linear'"):
        ops.bind("cpu", {"pack_linear": "torch"})


def test_ops_that_read_and_write_pages_have_one_implementation() -> None:
    pages = ("paged_attention", "store_kv", "norm_rope_store")
    for name in pages:
        OPS[name].implement("cpp", device="cpu")(lambda *_: torch.zeros(0))
    bound = ops.bind("cpu", {"paged_attention": "torch"})
    assert [bound[name] for name in pages] == ["torch"] * 3
    for name in pages[1:]:
        with pytest.raises(StartError, match="'paged_attention'"):
            ops.bind("cpu", {name: "cpp"})


@pytest.mark.parametrize(
    ("device", "overrides", "words"),
    [
        ("cpu", {"rms_nrom": "torch"}, ["rms_nrom", "rms_norm", "paged_attention"]),
        ("cpu", {"rms_norm": "tritton"}, ["tritton", "there are: torch"]),
        ("cpu", {"rms_norm": "cpp"}, ["'cpp'", "tokserve._absent"]),
        ("cpu", {"*": "cpp"}, ["'cpp'", "there are: torch", "tokserve._absent"]),
        ("tpu", {}, ["tpu", "cpu"]),
    ],
)
def test_bind_refuses_unknown_names_and_lists_what_exists(
    device: str, overrides: dict[str, str], words: list[str]
) -> None:
    before = ops.rms_norm
    with pytest.raises(StartError) as refusal:
        ops.bind(device, overrides)
    for word in words:
        assert word in str(refusal.value)
    assert ops.rms_norm is before


def test_the_extension_registers_its_implementations_when_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fake_extension", "fake_registrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(registry.EXTENSIONS, "cpu", ("fake_extension", "fake_registrations"))
    assert registry.load_extension("cpu") is None
    monkeypatch.setitem(registry.EXTENSIONS, "cpu", ("fake_extension", "not_there"))
    reason = registry.load_extension("cpu")  # e.g. a torch that lacks what the registrations need
    assert reason and "not_there" in reason


def test_without_kernels_a_warning_says_what_it_costs_and_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(registry.EXTENSIONS, "cpu", ("not_there", "not_there"))
    assert set(registry.choose("cpu", {}).values()) <= {"torch", "cpp"}
    (record,) = caplog.records
    for words in ("a hundred times slower", "apt-get install g++", "make install"):
        assert words in record.getMessage()
    caplog.clear()
    registry.choose("cpu", {"*": "torch"})
    assert not caplog.records, "they were not asked for"


def test_a_name_is_registered_once() -> None:
    OPS["silu_mul"].implement("cpp", device="cpu")(shout)
    with pytest.raises(ValueError, match="cpp"):
        OPS["silu_mul"].implement("cpp", device="cpu")(shout)
    with pytest.raises(ValueError, match="silu_mul"):

        @registry.op(tolerance={})
        def silu_mul(x: torch.Tensor) -> torch.Tensor:
            return x
