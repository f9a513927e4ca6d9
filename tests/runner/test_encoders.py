"""Models that read both ways: transformers' hidden states and logits, and the same bits alone and in any batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from tests.runner.drive import plan_of
from tests.runner.fake_device import FakeDevice
from tests.tiny_models import write_checkpoint
from tokserve.base.errors import StartError
from tokserve.checkpoint.architectures import ENCODERS, ENDINGS
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.protocol.params import PoolingParams
from tokserve.protocol.plan import NewRow
from tokserve.runner import device
from tokserve.runner.runner import Runner
from tokserve.runner.startup import load_runner

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_labels": 3,
}
IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
MODERN = {"local_attention": 16, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
CHANGES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"max_position_embeddings": 302, **IDS},
    "ModernBert": {"classifier_pooling": "mean", **IDS},
    "XLMRoberta": {"max_position_embeddings": 302, "type_vocab_size": 1, "layer_norm_eps": 1e-5, **IDS},
}
PROMPTS = [list(range(start, start + length)) for start, length in ((5, 70), (90, 33), (5, 64), (150, 1), (20, 250))]
SECONDS = [40, -1, 1, -1, 200]  # where the second text of a pair begins

transformers.utils.logging.set_verbosity_error()


def checkpoint(directory: Path, family: str, ending: str, **changes: Any) -> Any:
    """A random model of transformers, saved; norms and biases are not trivial."""
    modern = MODERN if family == "ModernBert" else {}
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, "max_position_embeddings": 300, **modern, **CHANGES[family], **changes}
    )
    torch.manual_seed(1)
    model = getattr(transformers, family + ending)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
            else:
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    return model


def runner_of(directory: Path, target: FakeDevice | None = None, **options: Any) -> Runner:
    """`target`: a device with memory of its own, in place of the one that the test has."""
    defaults = {"model": str(directory), "device": "cpu", "max_num_seqs": 8, "cpu_threads": 1, "dtype": "float32"}
    with pytest.MonkeyPatch.context() as patch:
        if target is not None:
            patch.setattr(device, "use", lambda name: target)
        return load_runner(resolve(Config.make(**(defaults | options))))[0]


def pooled(runner: Runner, prompts: list[int], params: PoolingParams) -> dict[int, NDArray[np.float32]]:
    """The results of these prompts, by number, computed in one step in this order."""
    rows, blocks, used = [], [], 0
    for slot, number in enumerate(prompts):
        ids = PROMPTS[number]
        rows.append(NewRow(slot, "", np.array(ids, np.int32), len(ids), params, 0, (), second=SECONDS[number]))
        count = -(-len(ids) // runner.backend.layout.block_size)
        blocks.append((slot, 0, list(range(used, used + count))))
        used += count
    steps = [(slot, 0, len(PROMPTS[number]), 0) for slot, number in enumerate(prompts)]
    result = runner.execute(plan_of(steps, new=rows, blocks=blocks))
    runner.execute(plan_of([], freed=list(range(len(prompts)))))
    return {number: result.values["pooled"][slot] for slot, number in enumerate(prompts)}


def hidden_states(model: Any, ids: list[int], second: int) -> NDArray[np.float32]:
    """What transformers makes of a prompt: hidden states [tokens, hidden], or logits [labels] or [tokens, labels]."""
    inputs = {"input_ids": torch.tensor([ids])}
    if second >= 0 and getattr(model.config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = (torch.arange(len(ids)) >= second).long()[None]
    with torch.inference_mode():
        output = model(**inputs)
    states: NDArray[np.float32] = (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0].numpy()
    return states


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.some(3)
@pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", ENCODERS)
def test_results_equal_transformers_and_do_not_depend_on_the_batch(tmp_path: Path, family: str, ending: str) -> None:
    model = checkpoint(tmp_path, family, ending)
    expected = [hidden_states(model, ids, second) for ids, second in zip(PROMPTS, SECONDS, strict=True)]
    runner = runner_of(tmp_path)
    classify = ending != "Model"
    kinds = {"Model": ("first", "last", "mean", "all"), "ForTokenClassification": ("all",)}
    for kind in kinds.get(ending, ("mean" if family == "ModernBert" else "first",)):
        params = PoolingParams(kind, normalize=False, classify=classify)  # type: ignore[arg-type]
        alone = {number: pooled(runner, [number], params)[number] for number in range(len(PROMPTS))}
        for number, hidden in enumerate(expected):
            pooling = {"first": hidden[0], "last": hidden[-1], "mean": hidden.mean(0), "all": hidden.reshape(-1)}
            vector = hidden if classify and hidden.ndim == 1 else pooling[kind]
            assert np.allclose(alone[number], vector, atol=1e-4), (kind, number)
        order = list(range(len(PROMPTS)))
        for seed in range(2):
            random.Random(seed).shuffle(order)
            for number, vector in pooled(runner, order, params).items():
                assert vector.tobytes() == alone[number].tobytes(), (kind, number, order)


@pytest.mark.parametrize("family", ENCODERS)
def test_bfloat16_is_near_and_does_not_depend_on_the_batch(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path, family, "Model")
    runner = runner_of(tmp_path, dtype="bfloat16")
    params = PoolingParams("mean", normalize=False)
    together = pooled(runner, [2, 0, 4, 1, 3], params)
    for number, ids in enumerate(PROMPTS):
        assert pooled(runner, [number], params)[number].tobytes() == together[number].tobytes()
        expected = hidden_states(model, ids, SECONDS[number]).mean(0)
        assert np.linalg.norm(together[number] - expected) < 0.05 * np.linalg.norm(expected)


def test_random_checkpoints_have_the_names_that_transformers_reads(tmp_path: Path) -> None:
    for family in ENCODERS:
        config = {**SIZES, "max_position_embeddings": 300, "architectures": [f"{family}Model"], **CHANGES[family]}
        model_type = {"XLMRoberta": "xlm-roberta"}.get(family, family.lower())
        write_checkpoint(tmp_path / family, config | {"model_type": model_type, "dtype": "float32"})
        model = transformers.AutoModel.from_pretrained(tmp_path / family).eval()
        result = pooled(runner_of(tmp_path / family), [1], PoolingParams("all", normalize=False))[1]
        expected = hidden_states(model, PROMPTS[1], -1)
        assert np.allclose(result.reshape(expected.shape), expected, atol=1e-4), family


def test_checkpoints_with_unused_heads_and_older_names(tmp_path: Path) -> None:
    for family in ENCODERS:
        model = checkpoint(tmp_path / family, family, "ForMaskedLM")
        expected = hidden_states(getattr(model, model.base_model_prefix), PROMPTS[1], -1)
        result = pooled(runner_of(tmp_path / family), [1], PoolingParams("all", normalize=False))
        assert np.allclose(result[1].reshape(expected.shape), expected, atol=1e-4)
    assert set(ENDINGS) == {"Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"}


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("Bert", {"is_decoder": True}, "is_decoder"),
        ("Bert", {"hidden_act": "mish"}, "hidden_act"),
        ("ModernBert", {"local_attention": 1}, "local_attention must be an integer of at least 2"),
        ("ModernBert", {"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, family: str, changes: dict[str, Any], field: str) -> None:
    checkpoint(tmp_path, family, "Model")
    with pytest.raises(StartError, match=field):
        runner_of(tmp_path, hf_overrides=changes)


@pytest.mark.parametrize("family", ["Bert", pytest.param("ModernBert", marks=pytest.mark.slow)])
def test_a_device_of_its_own_gives_the_same_vectors(tmp_path: Path, family: str) -> None:
    """Pairs, windows and rows of the last layer included; no graph takes them."""
    checkpoint(tmp_path, family, "Model")
    host, other = (runner_of(tmp_path, target) for target in (None, FakeDevice()))
    for kind in ("first", "all"):
        params = PoolingParams(kind, normalize=False)  # type: ignore[arg-type]
        expected, actual = (pooled(runner, [3, 0, 4, 1], params) for runner in (host, other))
        assert {number: vector.tobytes() for number, vector in actual.items()} == {
            number: vector.tobytes() for number, vector in expected.items()
        }
