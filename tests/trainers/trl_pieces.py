"""The pieces of `tokserve.rl.trl` beyond what the recipes use, in TRL's environment: `trl_pieces.py URL MODEL_DIR KEY`.

The server has admin keys, of which KEY is one, and its default logprobs are raw.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from tokserve.rl import Client, TokserveClient, weight_pairs
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
    weight_pairs.PART_BYTES = 100_000
    transfer = pieces.HTTPWeightTransfer(URL, api_key=KEY, recompute_kv=True)
    transfer.init_weight_transfer()
    assert len(messages) == 1 and "--rl" in messages[0]
    transfer.pause()
    policy = model()
    transfer.send_weights(iter(policy.named_parameters()))
    transfer.resume()
    transfer.destroy()
    assert differing(policy.named_parameters()) == []


def adapted(rank: int = 8) -> Any:
    """A peft model whose adapter changes what it computes."""
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model(), LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)).eval()


def logprobs(policy: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        rows = policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def largest_difference(policy: Any, name: str | None = None) -> float:
    """The largest difference of a logprob: the policy's and that of the server's model of this name."""
    ids = list(range(40, 80))
    with Client(URL, api_key=KEY) as client:
        served = torch.tensor(client.score([ids], [1], model=name)[0])
    return float((served - logprobs(policy, ids)).abs().max())


def check_adapter() -> None:
    """Send an adapted model in every way: the server gets its weights, not the base's (rl-faults F1)."""
    pieces.use_tokserve(api_key=KEY)
    policy = adapted()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    walker = vllm_generation.VLLMGeneration(
        model=policy, accelerator=Accelerator(cpu=True), processing_class=None, mode="server", server_base_url=URL
    )
    transfer = pieces.HTTPWeightTransfer(URL, api_key=KEY)
    ways = {
        "server mode": walker.sync_weights,
        "the client's module": lambda: walker.vllm_client.update_model_params(policy),
        "a transfer": lambda: transfer.send_weights(walker._iter_named_params()),
        "the client's push": lambda: Client(URL, api_key=KEY).push(policy, delta=True),
        "a generator": lambda: Client(URL, api_key=KEY).push(walker._iter_named_params()),
    }
    for part_bytes in (100_000, 1 << 28):
        weight_pairs.PART_BYTES = part_bytes
        for way, send in ways.items():
            with policy.disable_adapter():
                Client(URL, api_key=KEY).push(policy)
                assert largest_difference(policy) < 1e-4
            assert largest_difference(policy) > 0.1, "the adapter changes nothing"
            send()
            assert largest_difference(policy) < 1e-4, way
    for name, tensor in policy.state_dict().items():
        assert torch.allclose(tensor, before[name], atol=1e-5), name


def check_rollout_function() -> None:
    """Check that an adapter is pushed as one where the server takes it, and merged where it does not."""
    for rank, name in ((8, pieces.ADAPTER), (64, None)):
        policy = adapted(rank)
        rollouts(policy)
        assert largest_difference(policy, name) < 1e-4, rank
        with policy.disable_adapter():
            assert (largest_difference(policy) < 1e-4) == (name is not None)


def rollouts(policy: Any) -> None:
    """Push as a rollout function does."""
    function = pieces.RolloutFunction(URL, api_key=KEY)
    state = SimpleNamespace(global_step=1)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    args = GRPOConfig(seed=0, use_cpu=True, bf16=False, report_to=[])
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    trainer = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        model=policy,
        state=state,
        args=args,
        max_completion_length=2,
        eos_token_ids=[0],
        processing_class=tokenizer,
        use_vllm=False,
        **sampling,
    )
    function(["Reverse"], trainer)


def check_buffers() -> None:
    """What a router adds is a buffer of the model, and belongs to what the server needs (rl-faults F5)."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes, **heads, **experts))
    walker = vllm_generation.VLLMGeneration(
        model=mixture, accelerator=Accelerator(cpu=True), processing_class=None, mode="server", server_base_url=URL
    )
    names = [name for name, _ in walker._iter_named_params()]
    assert sorted(names) == sorted(set(names)) and set(names) == set(mixture.state_dict())
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names


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
    check_rollout_function()
    check_buffers()
    check_the_key()
