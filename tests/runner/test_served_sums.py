"""Sums of the weights that serve, computed while a commit may change these."""

from __future__ import annotations

from typing import Any, cast

from tokserve.features.weights.coordinates import Coordinates
from tokserve.features.weights.served_sums import ServedSums
from tokserve.models.decoder import Decoder
from tokserve.rl.sums import Sums


class Model:
    """Stands for the weights; `value`: what they are now."""

    value = 0


def test_sums_are_kept_until_weights_change_and_computed_again_if_they_do_meanwhile() -> None:
    served, model, computed = ServedSums(), Model(), list[int]()
    decoder = cast(Decoder, model)

    class Changed:
        def sums(self) -> Sums:
            computed.append(model.value)
            if len(computed) == 1:
                with served.replacing():
                    model.value = 1
            return {"a": computed[-1]}

    coordinates = cast(Coordinates, Changed())
    assert served.known(decoder) is None
    assert [served.of(decoder, coordinates) for _ in range(2)] == [{"a": 1}] * 2 and computed == [0, 1]
    with served.changing(decoder, {"a": 7}):
        assert served.known(decoder) is None
    assert served.of(decoder, coordinates) == {"a": 7} and served.known(cast(Decoder, Model())) is None
    served.forget()
    assert served.of(decoder, coordinates) == {"a": 1} and computed == [0, 1, 1]


def test_what_is_read_while_weights_change_is_read_again() -> None:
    served, reads = ServedSums(), list[int]()

    def read() -> int:
        reads.append(len(reads))
        if len(reads) < 3:
            served.forget()
        return reads[-1]

    kept: list[Any] = []
    assert served.consistent(read, kept.append) == 2 and kept == [2]
