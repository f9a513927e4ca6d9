from __future__ import annotations

import pytest
import torch

from tokserve.features.pooling.classifier import HeadSpec
from tokserve.features.pooling.head import Classifier
from tokserve.layers.embedding import Embedding, Head
from tokserve.layers.options import LayerOptions

VOCAB, HIDDEN = 11, 8


def test_lookup_copies_and_converts() -> None:
    embedding = Embedding(VOCAB, HIDDEN, torch.bfloat16)
    weight = torch.randn(VOCAB, HIDDEN)
    expected = weight.bfloat16()
    embedding.parameters()["weight"].load(weight)
    weight.zero_()
    assert torch.equal(embedding(torch.tensor([3, 0, 3])), expected[[3, 0, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_multiplied_by_what_the_multiplier_is_in_their_dtype(dtype: torch.dtype) -> None:
    embedding = Embedding(VOCAB, HIDDEN, dtype, multiplier=48**0.5)
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    embedding.load(weight)
    expected = weight * torch.tensor(48**0.5, dtype=dtype)
    assert torch.equal(embedding(torch.arange(VOCAB)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_uses_the_embedding_and_returns_float32(dtype: torch.dtype, head_dtype: torch.dtype) -> None:
    head = Head(VOCAB, HIDDEN, LayerOptions(head_dtype))
    embedding = Embedding(VOCAB, HIDDEN, dtype, head=head)
    for seed in (0, 1):  # loading again reaches the head too
        weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))
        embedding.load(weight)
        hidden = torch.randn(3, HIDDEN).to(dtype)
        logits = head(hidden)
        assert logits.dtype == torch.float32
        expected = hidden.to(head_dtype).float() @ weight.to(dtype).to(head_dtype).float().T
        torch.testing.assert_close(logits, expected)
    assert (embedding.packed is head.linear.packed) == (head_dtype in (dtype, torch.float32)), "one copy where one does"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_wider_head_have_the_bits_of_an_embedding_of_its_own(dtype: torch.dtype) -> None:
    head = Head(VOCAB, HIDDEN, LayerOptions(torch.float32))
    tied = Embedding(VOCAB, HIDDEN, dtype, head=head, multiplier=11.3)
    alone = Embedding(VOCAB, HIDDEN, dtype, multiplier=11.3)
    weight, ids = torch.randn(VOCAB, HIDDEN), torch.arange(VOCAB)
    tied.load(weight)
    alone.load(weight)
    assert tied(ids).dtype == dtype and torch.equal(tied(ids), alone(ids))
    assert [place.memory.dtype for place in tied.places()] == [torch.float32]


def test_an_untied_float32_head_keeps_the_checkpoints_precision() -> None:
    head = Head(VOCAB, HIDDEN, LayerOptions(torch.float32))
    weight = torch.randn(VOCAB, HIDDEN)
    head.parameters()["lm_head.weight"].load(weight)
    hidden = torch.randn(3, HIDDEN).bfloat16()
    torch.testing.assert_close(head(hidden), hidden.float() @ weight.T)


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected .*\[11, 8\], found \[11, 9\]"):
        Embedding(VOCAB, HIDDEN, torch.float32).load(torch.zeros(VOCAB, 9))


def test_labels_may_be_rows_of_the_head_or_the_difference_of_two() -> None:
    head = Head(VOCAB, HIDDEN, LayerOptions(torch.float32))
    weight, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(3, HIDDEN)
    head.parameters()["lm_head.weight"].load(weight)
    logits = hidden @ weight.T
    torch.testing.assert_close(Classifier(HeadSpec(2, (7, 2)), HIDDEN, head)(hidden), logits[:, [7, 2]])
    difference = Classifier(HeadSpec(1, (7, 2), True), HIDDEN, head)(hidden)
    torch.testing.assert_close(difference, logits[:, 2:3] - logits[:, 7:8])
