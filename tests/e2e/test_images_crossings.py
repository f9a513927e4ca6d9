"""Images with speculation, adapters, quantization, sleep and weight updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.adapters import weights, write_adapter
from tests.models.pictures import png, write_served
from tokserve import LLM, SamplingParams
from tokserve.base.errors import RequestError
from tokserve.protocol.adapter_choice import LoRARequest

pytestmark = pytest.mark.usefixtures("engine_threads")

PAD, START, END = 288, 290, 291
PARAMS = SamplingParams(max_tokens=12, temperature=0.6, seed=3, logprobs=1, ignore_eos=True)
FAMILIES = ("qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow))


def prompt(seed: int = 0, tail: int = 7) -> dict[str, Any]:
    image = png(40, 32, seed=seed)
    return {"prompt_token_ids": [5, START, PAD, END, 9, tail], "multi_modal_data": {"image": image}}


def outcome(llm: LLM, *prompts: Any, **options: Any) -> list[tuple[list[int], list[float]]]:
    outputs = llm.generate(list(prompts), PARAMS, use_tqdm=False, **options)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs.token_logprobs.tolist()) for one in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("vl"), request.param)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="bfloat16", max_model_len=512, enable_lora=True) as llm:
        yield llm


@pytest.mark.slow
def test_drafts_change_nothing(llm: LLM) -> None:
    """The first run has no history to draft from, the second has its own outputs."""
    prompts = [prompt(0), prompt(1)]
    first = outcome(llm, *prompts)
    drafted = llm.stats.rooms["draft_tokens"]
    assert outcome(llm, *prompts) == first and llm.stats.rooms["draft_tokens"] > drafted
    wrong = prompt(0) | {"draft_token_ids": first[1][0]}
    assert outcome(llm, wrong) == first[:1]


@pytest.mark.slow
def test_adapters_of_the_text(llm: LLM, model: Path, tmp_path: Path) -> None:
    plain = outcome(llm, prompt())
    parts = {name: None for name in adapter_names(model) if "visual" in name}
    adapter = LoRARequest("a", lora_path=str(write_adapter(tmp_path / "a", model, tensors=parts)))
    adapted = outcome(llm, prompt(), lora_request=adapter)
    assert adapted != plain
    assert outcome(llm, prompt(), prompt(), lora_request=[None, adapter]) == plain + adapted
    if any("visual" in name for name in adapter_names(model)):
        vision_adapter = LoRARequest("b", lora_path=str(write_adapter(tmp_path / "b", model)))
        with pytest.raises(RequestError, match="visual"):
            outcome(llm, prompt(), lora_request=vision_adapter)


def adapter_names(model: Path) -> list[str]:
    """What `write_adapter` writes by default, in the text and in the tower."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    modules = [name.removesuffix(".weight") for name in weights(model)]
    return [
        f"base_model.model.{module}.lora_{part}.weight"
        for module in modules
        if module.rpartition(".")[2] in targets
        for part in "AB"
    ]


@pytest.mark.slow
def test_sleep_and_new_weights(llm: LLM, model: Path, tmp_path: Path) -> None:
    before = outcome(llm, prompt())
    llm.sleep(1)
    llm.wake_up()
    assert outcome(llm, prompt()) == before
    generator = torch.Generator().manual_seed(5)
    new = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) if "visual" in name else tensor
        for name, tensor in weights(model).items()
    }
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (other / file.name).write_bytes(file.read_bytes())
    save_file(new, other / "model.safetensors", metadata={"format": "pt"})
    llm.push(new, "v2")
    after = outcome(llm, prompt())
    assert after != before
    with LLM(str(other), dtype="bfloat16", max_model_len=512) as fresh:
        assert outcome(fresh, prompt()) == after
    llm.push(weights(model), "v3")
    assert outcome(llm, prompt()) == before


@pytest.mark.slow
def test_quantized_text(model: Path) -> None:
    with LLM(str(model), dtype="bfloat16", max_model_len=512, quantization="int8") as llm:
        alone = [outcome(llm, one)[0] for one in (prompt(0), prompt(1), prompt(0, tail=8))]
        llm.reset_prefix_cache()
        assert outcome(llm, prompt(0), prompt(1), prompt(0, tail=8)) == alone
