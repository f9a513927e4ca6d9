"""What a start says of memory: weights that cannot fit are refused before they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runner.drive import make_runner
from tests.tiny_models import tiny_config
from tokserve.base.errors import StartError
from tokserve.models import weights
from tokserve.runner import device
from tokserve.runner.device import MemoryBound

GIB = 1 << 30
SHAPES = tiny_config("qwen3", hidden_size=512, intermediate_size=2048, vocab_size=4096)
CONTAINER = ("the container's limit (cgroup)", "a larger limit")


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        ({"dtype": "float32"}, "use --dtype bfloat16, --quantization int8 or int4, a larger limit"),
        ({"dtype": "bfloat16"}, "use --quantization int8 or int4, a larger limit"),
        ({"dtype": "bfloat16", "quantization": "int8"}, "use a larger limit"),
        ({"dtype": "float32", "model_impl": "transformers"}, "use --dtype bfloat16, --quantization int8 or int4, a"),
    ],
)
def test_weights_that_cannot_fit_are_refused_before_they_are_read(
    options: dict[str, Any], remedies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """newcomer-3 D8."""

    def unread(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(device, "memory_bound", lambda: MemoryBound(1 << 20, 3 * GIB, *CONTAINER))
    monkeypatch.setattr(weights, "load_into", unread)
    with pytest.raises(StartError) as refusal:
        make_runner(tmp_path / "model", SHAPES, **options)
    message = str(refusal.value)
    assert message.startswith("weights of ") and remedies in message
    assert "do not fit into 3.0 GiB, the container's limit (cgroup), of which 3.0 GiB are taken" in message


@pytest.mark.some(3)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_not_refused_where_they_fit(
    dtype: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared with the free memory is at most what they take, and nearly all of it where nothing is packed."""
    sizes: list[int] = []
    least = weights.least_bytes
    monkeypatch.setattr(weights, "least_bytes", lambda *args: sizes.append(least(*args)) or sizes[-1])
    _, facts = make_runner(tmp_path / "model", SHAPES, dtype=dtype, quantization=quantization)
    taken = facts.facts["weight_bytes"]
    assert 0 < sizes[0] <= taken
    if quantization is None:
        assert sizes[0] > 0.9 * taken
