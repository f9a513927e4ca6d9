"""Every causal language model that transformers has: it is served with transformers' greedy tokens, alone and in a
batch, or refused at the start with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from tests.hf.tiny_configs import small_config
from tests.runner.test_with_engine import RealEngine
from tokserve.base.errors import StartError
from tokserve.models.registry import ARCHITECTURES

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]

SERVED = """
    afmoe apertus apertus1p5_text aria_text beam bert bert-generation biogpt bitnet codegen cohere2_moe
    ctrl dbrx electra ernie exaone_moe flint gemma3n_text gemma4 gemma4_unified
    gemma4_unified_text gpt-sw3 gpt2 gpt_bigcode gpt_neox gptj granite_swa granitemoe_swa helium hy_v3
    hyperclovax jais2 jetmoe kolibri1 laguna llama4 mellum mimo_v2_flash minimax_m3_vl_text
    modernbert-decoder nanochat opt persimmon phi phimoe vaultgemma
"""
# For these there is no small configuration here: their sizes have names of their own, or are fixed.
UNTRIED = """
    axk1 blt cohere_compass_text dots3_note dots3_note_text gemma3n gemma4_assistant git got_ocr2 longcat_flash moshi
    moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal qwen4_exp qwen4_exp_text reformer zamba
"""
BUILT_IN = {kind for kind, name in NAMES.items() if isinstance(name, str) and name in ARCHITECTURES}
PROMPTS = [[(7 * i * i + 3 * i + number) % 310 + 3 for i in range(size)] for number, size in enumerate((40, 9, 61))]
TOKENS = 16
CLOSE = 2e-3  # a token whose logit is this near to the largest is as good


def written(model_type: str, directory: Path) -> PreTrainedModel:
    """A saved random model whose norms are not the identity and whose biases are not zero."""
    torch.manual_seed(0)
    config = small_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.ndim == 1 else 0.12)
    model.save_pretrained(directory)
    return model


def served_tokens(directory: Path) -> list[list[int]]:
    """Greedy tokens after each prompt, of requests by themselves, then of all together in chunks."""
    hf = json.loads((directory / "config.json").read_text())
    engine = RealEngine(directory, hf=hf, load_format="auto", dtype="float32", max_model_len=256)
    for turn in ("alone", "together"):
        for number, prompt in enumerate(PROMPTS):
            engine.add(f"{turn}{number}", prompt, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            if turn == "alone":
                engine.run(2000)
        engine.run(2000)
    engine.core.close()
    engine.real.close()
    return [engine.tokens(f"{turn}{number}") for turn in ("alone", "together") for number in range(len(PROMPTS))]


@pytest.mark.parametrize("model_type", sorted(NAMES.keys() - BUILT_IN - set(UNTRIED.split())))
def test_it_answers_as_transformers_or_is_refused(model_type: str, tmp_path: Path) -> None:
    model = written(model_type, tmp_path)
    try:
        answers = served_tokens(tmp_path)
    except StartError as error:
        assert model_type not in SERVED.split() and len(str(error)) > 20, error
        return
    assert model_type in SERVED.split()
    for prompt, tokens in zip(PROMPTS * 2, answers, strict=True):
        assert len(tokens) == TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0][len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < CLOSE
