"""The pieces of `tokserve.rl.trl` beyond what the recipes use, in TRL's environment: `trl_pieces.py URL MODEL_DIR KEY`.

The server has admin keys, of which KEY is one, and its default logprobs are raw.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from tokserve.rl import TokserveClient
from tokserve.rl import trl as pieces

URL, MODEL_DIR, KEY = sys.argv[1:]


def model() -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return loaded


def differing(weights: object) -> list[str]:
    """The names of tensors that are not the server's."""

    async def compare() -> list[str]:
        async with TokserveClient(URL, api_key=KEY) as client:
            return await client.compare_weights(weights)

    return asyncio.run(compare())


def state() -> dict[str, object]:
    async def ask() -> dict[str, object]:
        async with TokserveClient(URL, api_key=KEY) as client:
            return await client.state()

    return asyncio.run(ask())


def metadata(module: torch.nn.Module) -> list[tuple[str, str, list[int]]]:
    named = module.named_parameters()
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named]


def check_the_client() -> None:
    pieces.use_tokserve(api_key=KEY)
    client = vllm_generation.VLLMClient(base_url=URL)
    assert isinstance(client, VLLMClient) and isinstance(client, pieces.TokserveVLLMClient)
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    client.init_communicator(device="cpu")
    policy = model()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    client.update_model_params(policy)
    assert differing(policy.named_parameters()) == []
    with torch.no_grad():
        next(policy.parameters()).mul_(1.01)
    with client.weight_update():
        for name, parameter in policy.named_parameters():
            client.update_named_param(name, parameter.data)
    assert differing(policy.named_parameters()) == []
    check_logprobs(client)
    check_roll_back(client, policy)
    client.reset_prefix_cache()
    client.close_communicator()
    try:
        client.update_model_params(policy)
    except RuntimeError as error:
        assert "init_communicator" in str(error)
    else:
        raise AssertionError("weights without a connection")


def check_logprobs(client: pieces.TokserveVLLMClient) -> None:
    """Check the default logprobs, which are at the temperature, and those of each requested mode."""
    options = {"max_tokens": 6, "temperature": 0.5, "logprobs": 0}
    default = client.generate([[5, 6, 7]], **options, generation_kwargs={"seed": 1})
    named = {
        mode: client.generate([[5, 6, 7]], **options, generation_kwargs={"seed": 1, "logprobs_mode": mode})
        for mode in ("temperature", "raw")
    }
    assert default["completion_ids"] == named["raw"]["completion_ids"]
    assert default["logprobs"] == named["temperature"]["logprobs"] != named["raw"]["logprobs"]


def check_roll_back(client: pieces.TokserveVLLMClient, policy: torch.nn.Module) -> None:
    """An update that fails leaves the old weights, and no update open."""
    epoch = state()["epoch"]

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(policy.named_parameters()):
            if number == 3:
                raise KeyError("gathering failed")
            yield name, tensor * 2

    for pairs, expected in ((broken(), KeyError), (iter([("no.such.weight", torch.ones(3))]), RuntimeError)):
        try:
            client.update_named_params(metadata(policy), pairs)
        except expected:
            pass
        else:
            raise AssertionError(f"no {expected.__name__}")
        assert state()["state"] == "running" and state()["epoch"] == epoch
    assert differing(policy.named_parameters()) == []


def check_transfer() -> None:
    """Check a transfer in small parts, and the warning about the logprobs mode."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    pieces.log.addHandler(handler)
    pieces.PART_BYTES = 100_000
    transfer = pieces.HTTPWeightTransfer(URL, api_key=KEY, recompute_kv=True)
    transfer.init_weight_transfer()
    assert len(messages) == 1 and "--rl" in messages[0]
    transfer.pause()
    policy = model()
    transfer.send_weights(iter(policy.named_parameters()))
    transfer.resume()
    transfer.destroy()
    assert differing(policy.named_parameters()) == []


def check_adapter() -> None:
    """The weights of a peft model are merged, under the names of the checkpoint, and then as they were."""
    base = model()
    names = [name for name, _ in base.named_parameters()]
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    before = {name: tensor.detach().clone() for name, tensor in adapted.named_parameters()}
    with pieces.whole_weights(adapted) as pairs:
        merged = {name: tensor.detach().clone() for name, tensor in pairs}
    assert list(merged) == names
    assert not torch.equal(merged["model.layers.0.self_attn.q_proj.weight"],
                           before["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"])  # fmt: skip
    for name, tensor in adapted.named_parameters():
        assert torch.allclose(tensor, before[name], atol=1e-6)


def check_the_key() -> None:
    try:
        with pieces.WeightUpdates(URL).update():
            raise AssertionError("opened without a key")
    except RuntimeError as error:
        assert "401" in str(error)


if __name__ == "__main__":
    check_the_client()
    check_transfer()
    check_adapter()
    check_the_key()
