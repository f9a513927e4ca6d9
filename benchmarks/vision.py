"""The time from an image to the first token: tokserve over HTTP and transformers in its process, in turns.

    python -m benchmarks.vision ckpt/vl --dtype bfloat16 --threads 2 --rounds 5

The checkpoint is made if it is not there: Qwen2.5-VL-3B's tower cut to 8 layers and its text model to 4, with random
weights.  Each round has another picture, so no cache helps: reading it from a data: URL, decoding, resizing, the tower,
the prompt and one token.  transformers has the picture as bytes, its own processor (PIL) and `logits_to_keep=1`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

TEXT = {
    "model_type": "qwen2_5_vl_text",
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
TOWER = {
    "model_type": "qwen2_5_vl",
    "depth": 8,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "in_channels": 3,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [3, 7],
    "out_hidden_size": 2048,
}
PAD, START, END = 4000, 4001, 4002
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}


def make(directory: Path, dtype: str) -> None:
    from tests.tiny_models import write_checkpoint

    write_checkpoint(
        directory,
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "dtype": dtype,
            "image_token_id": PAD,
            "video_token_id": 4003,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "text_config": TEXT,
            "vision_config": TOWER,
            "tie_word_embeddings": True,
        },
    )
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def picture(width: int, height: int, seed: int) -> bytes:
    """A JPEG file: smooth shapes with noise."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    noisy = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16) + rng.integers(
        -12, 13, (height, width, 1)
    )
    out = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def prompt(images: int = 1) -> list[int]:
    return [5, 6, START, *[PAD] * images, END, *range(10, 26)]


def transformers_worker(model: str, dtype: str, threads: int) -> None:
    """Reads the names of picture files, writes seconds to the first token, and the token."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    torch.set_num_threads(threads)
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    print("ready", flush=True)
    for line in sys.stdin:
        content = Path(line.strip()).read_bytes()
        start = time.perf_counter()
        inputs = processor(images=[Image.open(io.BytesIO(content)).convert("RGB")], return_tensors="pt")
        count = int(inputs["image_grid_thw"].prod()) // 4
        ids = torch.tensor([prompt(count)])
        with torch.inference_mode():
            logits = loaded(
                input_ids=ids,
                mm_token_type_ids=(ids == PAD).int(),
                logits_to_keep=1,
                pixel_values=inputs["pixel_values"].to(loaded.dtype),
                image_grid_thw=inputs["image_grid_thw"],
            ).logits
        token = int(logits[0, -1].argmax())
        print(json.dumps([time.perf_counter() - start, token, count]), flush=True)


def serve(model: str, dtype: str, threads: int) -> tuple[subprocess.Popen[str], str]:
    command = [
        sys.executable,
        "-m",
        "tokserve",
        "serve",
        model,
        "--tokens-only",
        "--port",
        "0",
        "--dtype",
        dtype,
        "--max-model-len",
        "8192",
        "--max-num-batched-tokens",
        "8192",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr
    for line in process.stderr:
        if "serving on " in line:
            return process, line.split("serving on ")[1].split(",")[0]
    raise SystemExit("the server did not start")


def first_token(url: str, content: bytes) -> tuple[float, int]:
    data = "data:image/jpeg;base64," + base64.b64encode(content).decode()
    body = {
        "token_ids": prompt(),
        "content_parts": [{"type": "image_url", "url": data}],
        "sampling_params": {"max_tokens": 1, "temperature": 0},
    }
    start = time.perf_counter()
    reply = httpx.post(url + "/inference/v1/generate", json=body, timeout=600)
    seconds = time.perf_counter() - start
    reply.raise_for_status()
    return seconds, reply.json()["choices"][0]["token_ids"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="448x336,896x672,1344x1008")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return transformers_worker(str(args.model), args.dtype, args.threads)
    if not (args.model / "config.json").exists():
        make(args.model, args.dtype)
    server, url = serve(str(args.model), args.dtype, args.threads)
    command = [sys.executable, __file__, str(args.model), "--worker"]
    command += ["--dtype", args.dtype, "--threads", str(args.threads)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin and peer.stdout and peer.stdout.readline() == "ready\n"
    file = args.model / "picture.jpg"
    print("| picture | tokens | tokserve, ms | transformers, ms | ratio | same token |\n|---|---|---|---|---|---|")
    try:
        for size in args.sizes.split(","):
            width, height = map(int, size.split("x"))
            rows: list[Any] = []
            for number in range(args.rounds + 1):
                content = picture(width, height, number)
                file.write_bytes(content)
                seconds, token = first_token(url, content)
                peer.stdin.write(f"{file}\n")
                peer.stdin.flush()
                rows.append((seconds, token, *json.loads(peer.stdout.readline())))
            own_seconds, _, peer_seconds, _, counts = zip(*rows[1:], strict=True)  # the first round warms up
            mean, peers = statistics.median(own_seconds) * 1000, statistics.median(peer_seconds) * 1000
            same = sum(row[1] == row[3] for row in rows)
            equal = f"{same} of {len(rows)}"
            print(f"| {size} | {counts[0]} | {mean:.0f} | {peers:.0f} | {peers / mean:.2f} | {equal} |", flush=True)
    finally:
        server.terminate()
        peer.kill()


if __name__ == "__main__":
    main()
