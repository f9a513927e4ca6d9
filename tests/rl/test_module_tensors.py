"""Modules of peft as weights: merged as peft merges them, and afterwards as they were, to the bit (rl-faults E2)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.needs import PEFT
from tokserve.rl.weight_pairs import named_tensors, reading

pytestmark = [
    PEFT.skips(),
    pytest.mark.filterwarnings(
        "ignore:.*(unmerged|tied layer|merged).*:UserWarning", "ignore:.*checkpointing.*:FutureWarning"
    ),
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.register_buffer("correction", torch.ones(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(6, 10, bias=False)


def adapted(**config: Any) -> Any:
    peft: Any = importlib.import_module("peft")
    torch.manual_seed(0)
    options = {"r": 3, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | config
    return peft.get_peft_model(Model(), peft.LoraConfig(**options))


def copies(module: nn.Module) -> dict[str, Tensor]:
    with reading(module) as pairs:
        return {name: tensor.clone() for name, tensor in pairs}


def merged(model: Any) -> dict[str, Tensor]:
    """Tensors of the model once peft has merged it for good."""
    return named_tensors(model.merge_and_unload())


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "embedding": {"target_modules": ["embed", "q_proj"]},
    "saved": {"modules_to_save": ["head"]},
    "tokens": {"trainable_token_indices": {"embed": [2, 5]}},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_adapter_is_merged_and_the_model_keeps_its_bits(config: dict[str, Any], dtype: torch.dtype) -> None:
    model = adapted(**config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name or "trainable_tokens_delta" in name:
                parameter.copy_(torch.randn(parameter.shape))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pushed = [copies(model), copies(model)]
    assert_same(dict(model.state_dict()), before)
    assert not any(layer.merged for layer in model.modules() if hasattr(layer, "merged"))
    assert pushed[0].keys() == named_tensors(Model()).keys()
    expected = merged(model)
    for one in pushed:
        assert_same(one, expected)


def test_what_peft_has_merged_or_disabled_is_as_it_is() -> None:
    model = adapted()
    torch.manual_seed(0)
    base = named_tensors(Model())  # as `adapted` draws it
    with model.disable_adapter():
        assert_same(copies(model), base)
    model.merge_adapter()
    merged_by_peft = copies(model)
    assert any(layer.merged for layer in model.modules() if hasattr(layer, "merged"))
    model.unmerge_adapter()
    assert_same(copies(model), merged_by_peft)
    assert not torch.equal(merged_by_peft["layers.0.q_proj.weight"], base["layers.0.q_proj.weight"])


def test_adapters_that_are_active_together_are_merged_together() -> None:
    peft: Any = importlib.import_module("peft")
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    first = copies(model)
    model.base_model.set_adapter(["default", "other"])
    both = copies(model)
    assert torch.equal(first["layers.0.q_proj.weight"], both["layers.0.q_proj.weight"])
    assert not torch.equal(first["layers.0.v_proj.weight"], both["layers.0.v_proj.weight"])
    assert_same(both, merged(model))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: model])
def test_a_reader_that_gives_up_leaves_nothing_merged(wrap: Callable[[Any], nn.Module]) -> None:
    model = adapted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def give_up() -> None:
        with reading(wrap(model)) as pairs:
            while next(pairs)[0] != "layers.1.q_proj.weight":
                pass
            raise KeyError("the server has gone")

    with pytest.raises(KeyError):
        give_up()
    assert_same(dict(model.state_dict()), before)
    assert not any(layer.merged for layer in model.modules() if hasattr(layer, "merged"))


def test_an_adapter_that_is_no_change_of_weights_is_refused() -> None:
    peft: Any = importlib.import_module("peft")
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    )
    with pytest.raises(TypeError, match="PROMPT_TUNING is no change of weights"):
        copies(model)
