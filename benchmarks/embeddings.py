"""Throughput of embeddings: tokserve beside sentence-transformers and, if it is installed, vLLM, in turns.

    python -m benchmarks.embeddings ckpt/encoder --dtype float32 --threads 2 --texts 256 --rounds 5
    python -m benchmarks.embeddings ckpt/encoder --peer ENV/bin/python --peer OTHER/bin/python:vllm

The checkpoint is made if it is not there: BERT with SmolLM2-135M's width and depth, random weights.  A round embeds the
same prompts, token ids of lengths drawn from 8 to 256, by the mean of all tokens and normalized; peers run in the
environment that is named, pad by length as they do by themselves, and get the same number of threads.  Printed as JSON:
tokens a second of every round, their median, and the largest difference of a vector from tokserve's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
KINDS = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
MODULES = [
    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (path, kind) in enumerate(KINDS)
]
WORDS = 4000  # ids that prompts are made of


def make(directory: Path, dtype: str) -> None:
    """The checkpoint with a tokenizer whose words are numbers, so that peers read the same ids from texts."""
    import tokenizers
    from safetensors.torch import load_file, save_file
    from tokenizers.processors import TemplateProcessing

    from tests.tiny_models import write_checkpoint

    write_checkpoint(directory, CONFIG | {"dtype": dtype})
    weights = directory / "model.safetensors"  # released encoders have names without a prefix, and vLLM reads no others
    save_file({name.removeprefix("bert."): tensor for name, tensor in load_file(weights).items()}, weights)
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3} | {f"w{i}": i for i in range(4, WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": 512})
    )
    (directory / "modules.json").write_text(json.dumps(MODULES))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": CONFIG["hidden_size"], "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def texts_of(count: int) -> list[str]:
    """Texts of 8 to 256 words."""
    rng = random.Random(1)
    return [" ".join(f"w{rng.randrange(4, WORDS)}" for _ in range(rng.randrange(8, 257))) for _ in range(count)]


def embedder(kind: str, directory: str, dtype: str, threads: int) -> Any:
    """A function from texts to vectors."""
    if kind == "tokserve":
        from tokserve import LLM

        llm = LLM(directory, dtype=dtype, cpu_threads=threads)
        return lambda texts: [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)]
    if kind == "vllm":
        from vllm import LLM as Peer

        peer = Peer(directory, dtype=dtype, runner="pooling")
        return lambda texts: [one.outputs.embedding for one in peer.embed(texts, use_tqdm=False)]
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(directory, device="cpu", model_kwargs={"dtype": dtype})
    return lambda texts: model.encode(texts, batch_size=32).tolist()


def work(kind: str, directory: str, dtype: str, threads: int) -> None:
    """Answer each line of stdin, a list of texts, with the seconds that they took and their vectors."""
    sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]  # kernels.py is a library's name too
    embed = embedder(kind, directory, dtype, threads)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        texts = json.loads(line)
        began = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - began
        answers.write("RESULT " + json.dumps([seconds, [list(map(float, vector)) for vector in vectors]]) + "\n")
        answers.flush()


def start(python: str, kind: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [python, __file__, args.checkpoint, "--work", kind, "--dtype", args.dtype, "--threads", str(args.threads)]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads]))
    vllm = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"} | vllm
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def ask(worker: subprocess.Popen[str], texts: list[str]) -> tuple[float, list[list[float]]]:
    assert worker.stdin and worker.stdout
    worker.stdin.write(json.dumps(texts) + "\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("RESULT "):
            seconds, vectors = json.loads(line.removeprefix("RESULT "))
            return seconds, vectors
    raise SystemExit("a worker ended")


def end(worker: subprocess.Popen[str]) -> None:
    """Let it end by itself, which vLLM does not always do."""
    assert worker.stdin
    worker.stdin.close()
    try:
        worker.wait(20)
    except subprocess.TimeoutExpired:
        worker.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--peer", action="append", default=[], help="PYTHON, or PYTHON:vllm; its environment's library")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.checkpoint, args.dtype, args.threads)
        return
    if not (Path(args.checkpoint) / "model.safetensors").exists():
        make(Path(args.checkpoint), args.dtype)
    workers = {"tokserve": start(sys.executable, "tokserve", args)}
    for peer in args.peer:
        python, _, kind = peer.partition(":")
        workers[kind or "sentence-transformers"] = start(python, kind or "sentence-transformers", args)
    texts = texts_of(args.texts)
    num_tokens = sum(len(text.split()) + 2 for text in texts)
    rates: dict[str, list[float]] = {name: [] for name in workers}
    first: dict[str, list[list[float]]] = {}
    for name, worker in workers.items():
        _, first[name] = ask(worker, texts[:32])  # warm
    for _ in range(args.rounds):
        for name, worker in workers.items():
            rates[name].append(num_tokens / ask(worker, texts)[0])
    reference = first["tokserve"]
    for name in workers:
        pairs = zip(reference, first[name], strict=True)
        difference = max(abs(a - b) for expected, other in pairs for a, b in zip(expected, other, strict=True))
        median = statistics.median(rates[name])
        rounds = [round(rate) for rate in rates[name]]
        print(
            json.dumps({"name": name, "tokens_per_second": round(median), "rounds": rounds, "difference": difference}),
            flush=True,
        )
    for worker in workers.values():
        end(worker)


if __name__ == "__main__":
    main()
