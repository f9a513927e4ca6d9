"""TRL's server mode with FSDP1, one of two processes on the CPU that torchrun starts: `trl_fsdp.py URL MODEL_DIR`.

TRL gathers a part of the weights, hands it out, and frees its memory (rl-faults F1).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from tokserve.rl import Client, weight_pairs
from tokserve.rl import trl as pieces

URL, MODEL_DIR = sys.argv[1:]
IDS = list(range(40, 80))


def main() -> None:
    accelerator = Accelerator(cpu=True)
    policy: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    for parameter in policy.parameters():
        parameter.data.mul_(1.01)
    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(policy.model.layers[0])})
    policy = FullyShardedDataParallel(
        policy, auto_wrap_policy=layers, use_orig_params=True, device_id=torch.device("cpu")
    )
    with torch.no_grad():
        rows = policy(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    weight_pairs.PART_BYTES = 300_000
    pieces.use_tokserve()
    walker = vllm_generation.VLLMGeneration(
        model=policy, accelerator=accelerator, processing_class=None, mode="server", server_base_url=URL
    )
    walker._dist.fsdp_version = 1  # what accelerate finds where there are GPUs
    for _ in range(2):
        walker.sync_weights()
    if accelerator.is_main_process:
        with Client(URL) as client:
            served = torch.tensor(client.score([IDS], [1])[0])
            try:
                client.push(policy)
            except TypeError as error:
                assert "push inside of FSDP.summon_full_params" in str(error), error
            else:
                raise AssertionError("shards were pushed")
        difference = float((served - expected).abs().max())
        assert difference < 1e-4, difference
    with FullyShardedDataParallel.summon_full_params(policy, writeback=False):
        if accelerator.is_main_process:
            with Client(URL) as client:
                client.push(policy, delta=True)
                client.push(policy, delta=True)
                served = torch.tensor(client.score([IDS], [1])[0])
                assert float((served - expected).abs().max()) < 1e-4
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
