"""The whole engine on one card: start-up (G9), nano-vllm's benchmark (G5), a long batch (G4), transformers beside it.

Qwen3 shapes with random weights: 0.6B as a checkpoint on disk, as a user would start it; 8B as dummy weights.  Run it
through scripts/gpu_check.sh; G4 takes minutes, so it is asked for: `--only G4`; `--only G9` is about start-up alone.
What may be cut off comes last: the start with nothing compiled.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from tokserve import LLM, SamplingParams
from tokserve.checkpoint import DEMO_DIR

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [path for path in sys.path if path != HERE]  # transformers imports `kernels` where there is one

SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "bos_token_id": None,
}
LARGE = SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
}
CONTEXT, OUTPUT = 1024, 33  # of transformers' own generation


def write_small(directory: Path) -> Any:
    """Write the small checkpoint; returns transformers' model of it, on the card."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SMALL), dtype=torch.bfloat16).eval()
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, directory)
    return model


def transformers_generates(model: Any) -> dict[str, float]:
    """Output tokens per second of transformers' generate, by batch size."""
    import torch

    def seconds(rows: int, new: int) -> float:
        ids = torch.randint(0, SMALL["vocab_size"], (rows, CONTEXT), device="cuda")
        length = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **length)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    rates = {}
    for rows in (1, 64):
        seconds(rows, 2)  # warms up
        prompt = seconds(rows, 2)
        rates[f"tok_s_{rows}"] = rows * OUTPUT / (seconds(rows, 2 + OUTPUT) - prompt)
    return rates


def start_seconds(directory: Path, **environment: str) -> float:
    """The time from the command to the log line that says the server is ready."""
    command = [sys.executable, "-m", "tokserve", "serve", str(directory), "--port", "0", "--tokens-only"]
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--device", "cuda", "--depth", "2"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as server:
        assert server.stderr
        log = []
        for line in server.stderr:
            log.append(line)
            if re.search(r"serving on \S+,", line):
                break
        seconds = time.perf_counter() - began
        server.terminate()
        server.communicate()
    if not log or "serving on" not in log[-1]:
        raise SystemExit("the server did not start:\n" + "".join(log[-20:]))
    return seconds


def batch_seconds(llm: LLM, prompts: list[list[int]], outputs: list[int]) -> float:
    """All at once."""
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count, detokenize=False) for count in outputs]
    began = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert [len(result.outputs[0].token_ids) for result in results] == outputs
    return seconds


def nano_vllm(directory: Path, *, exact: bool) -> dict[str, Any]:
    """nano-vllm's benchmark: 256 prompts and outputs of 100 to 1024 tokens, its seed."""
    random = Random(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    began = time.perf_counter()
    with LLM(
        str(directory),
        device="cuda",
        depth=2,
        exact=exact,
        max_num_seqs=256,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    ) as llm:
        started = time.perf_counter() - began
        batch_seconds(llm, prompts[:2], [8, 8])
        seconds = batch_seconds(llm, prompts, outputs)
    return {"exact": exact, "start_s": started, "seconds": seconds, "tok_s": sum(outputs) / seconds}


def long_batch(*, exact: bool) -> dict[str, Any]:
    """256 requests of 1024 tokens in and out at the shapes of Qwen3-8B."""
    random = Random(1)
    prompts = [[random.randint(0, 10000) for _ in range(1024)] for _ in range(256)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(LARGE))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_DIR / file, directory)
        with LLM(
            name,
            device="cuda",
            depth=2,
            exact=exact,
            load_format="dummy",
            max_num_seqs=256,
            max_model_len=2048,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
        ) as llm:
            batch_seconds(llm, prompts[:2], [8, 8])
            seconds = batch_seconds(llm, prompts, [1024] * 256)
    return {"exact": exact, "seconds": seconds, "tok_s": 256 * 1024 / seconds}


def small(figures: dict[str, Any], write: Any) -> None:
    """What the small checkpoint is good for, in about two minutes."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        model = write_small(directory)
        try:
            figures["transformers"] = transformers_generates(model)
            print("transformers: " + ", ".join(f"{name} {rate:.0f}" for name, rate in figures["transformers"].items()))
        except Exception:  # what is asked of us does not need it
            traceback.print_exc()
        del model
        gc.collect()
        torch.cuda.empty_cache()
        write()
        for exact in (True, False):
            figures.setdefault("G5", []).append(nano_vllm(directory, exact=exact))
            write()
            print(f"G5: {figures['G5'][-1]['tok_s']:.0f} tok/s, {'exact' if exact else 'cuBLAS'}")
        start_up(directory, figures, write)


def start_up(directory: Path, figures: dict[str, Any], write: Any) -> None:
    """Seconds until a server serves the checkpoint, with kernels that are compiled, and without."""
    start_seconds(directory)  # compiles what the library did not ask for
    figures["G9"] = {"warm_s": start_seconds(directory)}
    write()
    print(f"G9: 0.6B serves after {figures['G9']['warm_s']:.1f} s")
    with tempfile.TemporaryDirectory() as empty:
        figures["G9"]["first_s"] = start_seconds(directory, TRITON_CACHE_DIR=empty)
    write()
    print(f"G9: {figures['G9']['first_s']:.1f} s where nothing is compiled")


def main() -> None:
    """Measure, write after each, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", choices=("small", "G4", "G9"), default="small", help="Default: small.")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}

    def write() -> None:
        arguments.out.write_text(json.dumps(figures, indent=1))

    if arguments.only == "small":
        small(figures, write)
        return
    if arguments.only == "G9":
        with tempfile.TemporaryDirectory() as name:
            write_small(Path(name))
            start_up(Path(name), figures, write)
        return
    for exact in (True, False):
        figures.setdefault("G4", []).append(long_batch(exact=exact))
        write()
        print(f"G4: {figures['G4'][-1]['seconds']:.1f} s, {'exact' if exact else 'cuBLAS'}")


if __name__ == "__main__":
    main()
