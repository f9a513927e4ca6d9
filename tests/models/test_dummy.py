from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.driver import prefill, random_ids
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import checkpoint
from tokserve.models import dummy, weights
from tokserve.models.decoder import Decoder
from tokserve.models.load import load_decoder

CALIBRATED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma2", "gemma4_text", "phi3", "olmo2", "smollm3"),
    *("ministral", "ministral3"),
)


def make_decoder(family: str, **changes: object) -> Decoder:
    hf = tiny_config(family, **changes)
    return load_decoder(Path("/nowhere"), hf, dtype="float32", head_dtype="auto", load_format="dummy", seed=0)


def test_values_follow_from_name_and_seed() -> None:
    def value(name: str, seed: int, shape: tuple[int, ...] = (4, 8)) -> torch.Tensor:
        return dummy.values(name, shape, seed, tied=False)

    one = value("model.layers.0.mlp.up_proj.weight", 0)
    assert torch.equal(value("model.layers.0.mlp.up_proj.weight", 0), one)
    assert not torch.equal(value("model.layers.0.mlp.up_proj.weight", 1), one)
    assert not torch.equal(value("model.layers.1.mlp.up_proj.weight", 0), one)
    assert one.dtype == torch.float32
    # known numbers: a change would silently give every dummy model other weights
    torch.testing.assert_close(one[0, :3], torch.tensor([-0.2000853, 0.1420294, -0.0477907]))


@pytest.mark.some(10)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CALIBRATED)
def test_output_is_sharp_varied_and_depends_on_the_context(family: str, tied: bool) -> None:
    decoder = make_decoder(family, tie_word_embeddings=tied)
    ids = random_ids(64, 320)
    logits = prefill(decoder, ids)
    assert 1.5 < logits.std() < 2.5
    likely = logits.argmax(-1)
    assert len(set(likely.tolist())) > 32
    assert (likely == torch.tensor(ids)).sum() < 5  # no echo
    changed = prefill(decoder, [*ids[:50], (ids[50] + 1) % 320, *ids[51:]])
    assert torch.equal(changed[:50], logits[:50])
    assert (changed[51:] - logits[51:]).abs().amax(-1).median() > 0.3
    greedy = ids[:8]
    for _ in range(16):
        greedy = [*greedy, int(prefill(decoder, greedy)[-1].argmax())]
    assert len(set(greedy[8:])) > 6


def test_written_dtype_and_configuration(tmp_path: Path) -> None:
    hf = tiny_config("qwen2", dtype="bfloat16")
    directory = write_checkpoint(tmp_path / "new" / "directory", hf)
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert checkpoint.hf_config(directory) == hf
    actual = weights.catalogue(directory)
    assert {entry.dtype for entry in actual.values()} == {torch.bfloat16}
    parameters = make_decoder("qwen2").parameters_by_name()
    assert {name: entry.shape for name, entry in actual.items()} == {n: p.shape for n, p in parameters.items()}
