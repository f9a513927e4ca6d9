"""The experts that were chosen for each position, kept beside the pages of the KV cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runner.drive import plan_of
from tests.tiny_models import tiny_config
from tokserve.models.registry import decoder_spec
from tokserve.protocol.kv_spec import KVLayout
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import NewRow
from tokserve.runner.tables.host_slots import HostSlots
from tokserve.runner.tables.routed import RoutedTable


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16), (512, np.uint16)])
def test_ids_come_back_for_the_positions_of_a_step_and_of_a_prefix(experts: int, dtype: type) -> None:
    hf = tiny_config("qwen3_moe", num_experts=experts, num_experts_per_tok=2, mlp_only_layers=[1])
    table = RoutedTable(decoder_spec(hf), KVLayout((), 4, 4))
    assert table.shape == (3, 2) and table.position_bytes == 3 * 2 * np.dtype(dtype).itemsize
    slots = HostSlots(2, 16, 4)
    new = NewRow(1, "", np.zeros(6, np.int32), 6, SamplingParams(), 0, ())
    slots.assign(new)
    slots.extend(1, 0, [3, 1])
    last = experts - 1
    first = torch.tensor([[last, 0], [1, last], [2, 3], [4, 5], [6, last - 1]], dtype=torch.int32)
    mapping = torch.tensor([12, 13, 14, 15, 4])  # five positions in pages 3 and 1
    table.store(mapping, [first, first.flip(1)])
    results = table.results(plan_of([(1, 3, 2, 1)], new=[new]), slots)  # three positions were found in the cache
    assert results[0].dtype == dtype and results[0].shape == (5, 3, 2)
    assert results[0][:, 0].tolist() == first.tolist() and not results[0][:, 1].any()
    assert results[0][:, 2].tolist() == first.flip(1).tolist()
    later = table.results(plan_of([(1, 4, 1, 1)]), slots)
    assert later[0].tolist() == results[0][4:].tolist()
