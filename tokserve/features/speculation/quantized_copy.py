"""A served model's own weights once more, quantized: it draws drafts for the model and follows every update of it.

Projections and head are copies.  Embedding, norms and biases are the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.places import MatrixPlace
from tokserve.models.decoder import Decoder
from tokserve.models.in_place import tensors_of
from tokserve.models.load import quant_methods
from tokserve.runner.backend import Draft

GROUP = 64  # inputs that share a scale with int4: drafts of groups of 128 are right less often, at the same cost


@dataclass(slots=True, kw_only=True)
class CopyDraft(Draft):
    """A copy of the served model that draws drafts."""

    copy: QuantizedCopy


class QuantizedCopy:
    """`decoder` draws for `source`.  `quantization`: int8 or int4.  Raises StartError if `source` cannot be copied."""

    def __init__(self, source: Decoder, quantization: str) -> None:
        self._source = source
        quant, head_quant = quant_methods(quantization, GROUP, quantize_lm_head=True)
        if why := _refusal(source):
            raise StartError(f"option speculative_config: the method self needs a copy of the weights, and {why}")
        options = LayerOptions(source.dtype, quant, source.options.group)
        head = LayerOptions(source.head.dtype, head_quant, source.options.group)
        self.decoder = Decoder(
            source.spec, options, head, source.rope_tables, float8_cache=source.float8_cache, has_tower=False
        )
        self._stale: list[str] = []  # projections that are not the source's of now
        for name, linear in _linears(self.decoder).items():
            linear.packed = linear.pack(_dense(_linears(source)[name]))
        self._borrow()

    def num_bytes(self) -> int:
        """The bytes of the copies."""
        return sum(
            tensor.nbytes for linear in _linears(self.decoder).values() for _, tensor in tensors_of(linear.packed)
        )

    def follow(self, source: Decoder) -> None:
        """The source's weights have changed, or another model has taken its place.  `advance` copies them."""
        self._source = source
        self._borrow()
        self._stale = list(_linears(source))

    def rest(self, blank: Decoder) -> None:
        """The source's weights are given up, until `follow`; `blank` is like it, without weights."""
        self._source = blank
        self._borrow()

    def advance(self) -> None:
        """Quantize one projection that has changed, where it is: captured steps read it there.

        A step does this beside its drafts, so an update waits for none of it; until all are done, drafts are drawn
        from a mixture of old and new weights.
        """
        if not self._stale:
            return
        name = self._stale.pop()
        linear = _linears(self.decoder)[name]
        packed = linear.pack(_dense(_linears(self._source)[name]))
        for (_, kept), (_, new) in zip(tensors_of(linear.packed), tensors_of(packed), strict=True):
            kept.copy_(new)

    def _borrow(self) -> None:
        self.decoder.borrow(self._source)
        for name, linear in _linears(self.decoder).items():
            linear.bias = _linears(self._source)[name].bias


def _refusal(source: Decoder) -> str | None:
    if source.quantization is not None:
        return f"those of the model are quantized ({source.quantization}) already"
    if source.implementation != "tokserve":
        return f"this model's implementation is {source.implementation}"
    if source.spec.has_experts:
        return "experts are not copied"
    return None


def _linears(decoder: Decoder) -> dict[str, Linear]:
    return decoder.named_linears() | {"lm_head": decoder.head.linear}


def _dense(linear: Linear) -> Tensor:
    """The layer's weight [outputs, inputs]."""
    assert isinstance(linear.packed, ops.PackedWeight)
    return MatrixPlace(linear.packed).read(0, linear.outputs)
