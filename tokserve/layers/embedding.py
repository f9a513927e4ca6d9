"""Token embedding and output head.

Both hold a [vocabulary, hidden] weight packed for the linear op, which tied models share: the embedding takes rows
out of it.  Logits are float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import ALONE, Group
from tokserve.layers.parameter import Parameter, StoredWeight, owned_copy
from tokserve.layers.places import MatrixPlace, Place, RowsPlace, TensorPart, VectorPlace
from tokserve.layers.quant import STORED_INTEGERS, pack_rows

ALIGNED = 64  # elements: a packed weight begins where a kernel reads whole vectors


class Embedding:
    """Row lookup.  `multiplier`: of the rows, rounded to their dtype.  `head`: tied to this weight, loaded with it.

    `keeps_stored`: rows that are stored as integers stay so until they are looked up.  A rank of several has its part
    of the rows.
    """

    packed: ops.PackedWeight | ops.PackedWna16  # [vocab, hidden]

    def __init__(
        self,
        vocab: int,
        hidden: int,
        dtype: torch.dtype,
        *,
        multiplier: float = 1.0,
        head: Head | None = None,
        keeps_stored: bool = False,
        group: Group = ALONE,
    ) -> None:
        self.group, self.rows = group, group.rows(vocab)
        self.keeps_stored = keeps_stored
        self.vocab = vocab
        self.hidden = hidden
        self.dtype = dtype
        self.multiplier = float(torch.tensor(multiplier, dtype=dtype))
        self.head = head

    def parameters(self) -> dict[str, Parameter]:
        return {
            "weight": Parameter(
                (self.vocab, self.hidden),
                self.load,
                self.dtype,
                self.load_stored,
                places=self.places,
                share=self.rows.length / self.vocab,
                held=TensorPart(0, (self.rows,)) if self.group.size > 1 else None,
            )
        }

    def places(self) -> list[MatrixPlace]:
        """The weight, and the tied head's if it has one of its own; none if one of them is quantized."""
        if isinstance(self.packed, ops.PackedWna16):
            return []
        places = [MatrixPlace(self.packed)]
        if self.head is not None and self.head.linear.packed is not self.packed:
            others = self.head.linear.places("lm_head")
            return [*places, *others] if others else []
        return places

    def load(self, tensor: Tensor) -> None:
        """Take the weight [vocab, hidden], for the tied head too."""
        if tensor.shape != (self.vocab, self.hidden):
            raise ValueError(f"expected a tensor of shape {[self.vocab, self.hidden]}, found {list(tensor.shape)}")
        part = tensor.narrow(0, *self.rows)
        if self.head is not None and self.head.widens(self.dtype):
            self.head.tie_copy(part.to(self.dtype))
            packed = self.head.linear.packed
            assert isinstance(packed, ops.PackedWeight)
            self.packed = packed
            return
        self.packed = packed = pack_rows(ops.pack_linear, part, self.dtype, len(part))
        if self.head is not None:
            self.head.tie(part, packed)

    def load_stored(self, weight: StoredWeight) -> None:
        """Take the weight as it is stored, for the tied head too."""
        part = weight.narrow(0, *self.rows) if self.keeps_stored else None
        packed = None if part is None or isinstance(part, Tensor) else part.packed_rows()
        if part is None or isinstance(part, Tensor) or packed is None:
            self.load(weight.dense())
            return
        self.packed = packed
        if self.head is not None:
            self.head.tie_stored(part, packed)

    def __call__(self, ids: Tensor) -> Tensor:  # [T] int64 -> [T, hidden]
        if self.group.size == 1:
            return self._look_up(ids)
        rows = ids - self.rows.start
        others = (rows < 0) | (rows >= self.rows.length)
        part = self._look_up(rows.masked_fill(others, 0)).float()
        return self.group.add(part.masked_fill_(others[:, None], 0.0), self.dtype)

    def _look_up(self, ids: Tensor) -> Tensor:
        """Rows of this rank's part."""
        if isinstance(self.packed, ops.PackedWna16):
            rows = ops.embedding_wna16(ids, self.packed, self.dtype)
            return rows if self.multiplier == 1.0 else rows * self.multiplier
        rows = ops.embedding(ids, self.packed, self.multiplier)
        return rows.to(self.dtype)  # they are wider in a head that is tied: a product of two has the same bits then


@dataclass(frozen=True, slots=True)
class PositionsSpec:
    """A table of learned positions: its rows, and which of them is that of position 0."""

    rows: int
    first: int = 0


class Positions:
    """Learned positions, which are added to embeddings; all ranks have them."""

    packed: ops.PackedWeight  # [rows from that of position 0 on, hidden]

    def __init__(self, hidden: int, spec: PositionsSpec, dtype: torch.dtype) -> None:
        self.shape, self.first, self.dtype = (spec.rows, hidden), spec.first, dtype
        self.memory: Tensor | None = None  # with rows before that of position 0: those, then what is packed
        self.start = -(-spec.first * hidden // ALIGNED) * ALIGNED  # of what is packed in `memory`

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": Parameter(self.shape, self.load, self.dtype, places=self.places)}

    def places(self) -> list[Place]:
        """Where the weight lies."""
        if self.memory is None:
            return [MatrixPlace(self.packed)]
        return [RowsPlace(self.memory, self.packed, self.first * self.shape[1], self.start)]

    def load(self, tensor: Tensor) -> None:
        """Take the weight [rows, hidden]."""
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"expected a tensor of shape {list(self.shape)}, found {list(tensor.shape)}")
        used = tensor[self.first :]
        packed = pack_rows(ops.pack_linear, used, self.dtype, len(used))
        if self.first:
            flat = packed.packed.view(-1)
            self.memory = torch.zeros(self.start + len(flat), dtype=flat.dtype, device=flat.device)
            self.memory[: self.first * self.shape[1]] = tensor[: self.first].to(self.dtype).to(flat).view(-1)
            self.memory[self.start :] = flat
            packed = replace(packed, packed=self.memory[self.start :].view(packed.packed.shape))
        self.packed = packed

    def __call__(self, positions: Tensor) -> Tensor:  # [T] int64 -> [T, hidden]
        return ops.embedding(positions, self.packed)


class Table:
    """A few rows that are looked up and added to embeddings: learned positions, types of tokens."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype) -> None:
        self.shape, self.dtype = (rows, hidden), dtype
        self.weight = torch.zeros(self.shape, dtype=dtype, device=ops.torch_device)

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": Parameter(self.shape, self.load, self.dtype, places=self.places)}

    def places(self) -> list[VectorPlace]:
        """Where the weight lies."""
        return [VectorPlace(self.weight.view(-1))]

    def load(self, tensor: Tensor) -> None:
        """Take the weight [rows, hidden]."""
        self.weight = owned_copy(tensor, self.shape, self.dtype)

    def __call__(self, index: Tensor) -> Tensor:  # [T] int64 -> [T, hidden]
        return self.weight.index_select(0, index)


class Head:
    """Hidden rows to float32 logits; the dtype of `options` is that of the product's operands.  `multiplier`: of the
    products; `softcap` > 0: a logit x becomes softcap * tanh(x / softcap) after that."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        options: LayerOptions,
        *,
        multiplier: float = 1.0,
        softcap: float = 0.0,
        bias: bool = False,
    ) -> None:
        self.options = options
        self.multiplier, self.softcap = multiplier, softcap
        self.dtype = options.dtype
        self.vocab, self._group = vocab, options.group
        rows = {"lm_head": [self._group.rows(vocab)]}
        self.linear = Linear(hidden, {"lm_head": vocab}, options, bias=bias, split="column", rows=rows)

    def parameters(self) -> dict[str, Parameter]:
        """`lm_head.weight` and, if there is one, `lm_head.bias`."""
        return self.linear.parameters()

    def tie(self, weight: Tensor, packed: ops.PackedWeight) -> None:
        """Use an embedding's weight, this rank's rows: what it packed, if that is what the head would pack, else the
        same numbers as the head has them."""
        if packed.dtype == self.dtype and self._is_plain:
            self.linear.packed = packed
        elif self.linear.quant.packs_rows:
            self.tie_copy(weight.to(packed.dtype))
        else:
            self.linear.packed = self.linear.pack(weight.to(packed.dtype).to(self.dtype))

    @property
    def _is_plain(self) -> bool:
        """Whether floats are kept as floats."""
        return self.linear.quant.keeps_floats

    def widens(self, dtype: torch.dtype) -> bool:
        """Whether it keeps a tied embedding of that dtype in a wider one, exactly: then one copy serves both."""
        return self._is_plain and self.dtype == torch.float32 != dtype

    def tie_copy(self, weight: Tensor) -> None:
        """Pack a tied embedding's weight, this rank's rows, in the head's dtype."""
        self.linear.packed = pack_rows(self.linear.pack, weight, self.dtype, len(weight))

    def tie_stored(self, weight: StoredWeight, packed: ops.PackedWna16) -> None:
        """The same for a weight in the form in which it is stored."""
        same = self.linear.quant.name == STORED_INTEGERS
        self.linear.packed = packed if same else self.linear.pack(weight.dense().to(self.dtype))

    def __call__(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab] float32; of ranks but the first [n, 0]
        products = self.linear(hidden.to(self.dtype), out_dtype=torch.float32)
        if self.multiplier != 1.0 or self.softcap != 0.0:
            products = ops.cap(products, self.multiplier, self.softcap)
        return products if self._group.size == 1 else self._group.gather(products, self.vocab)
