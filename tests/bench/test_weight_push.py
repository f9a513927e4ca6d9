"""benchmarks/weight_push.py: what it pushes is a full set of the served model's tensors."""

import pytest

from benchmarks import weight_push


def test_the_tensors_are_a_full_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(weight_push.CONFIG, "vocab_size", 64)
    tensors = weight_push.tensors(2)
    assert tensors["model.embed_tokens.weight"].shape == (64, 1024)
    assert len(tensors) == 2 + 2 * 11  # embedding and norm; of a layer 7 projections and 4 norms
