"""Every quantized form through a real server's life: adapters, prefix hits, drafts, refused and whole updates, sleep.

After each of these the replies are, bit for bit, those of a server that was started with the same weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapters import write_adapter
from tests.e2e.server import Server
from tests.models import gguf_models
from tests.models import test_float8 as float8
from tests.models import test_mxfp4 as mxfp4
from tests.models import test_packed as packed
from tests.models.test_load import rewrite, stored
from tests.replies import good
from tests.tiny_models import write_checkpoint
from tokserve.families.gguf.config import model_config
from tokserve.families.gguf.header import read_header
from tokserve.rl import ServerError, TokserveClient, checksums

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Tensors = dict[str, Tensor]
INT4, INT8 = ["--quantization", "int4", "--quantization-group-size", "32"], ["--quantization", "int8"]
ROUNDED = ["--quantization-activations", "int8"]
DENSE, EXPERTS = packed.HF | {"dtype": "bfloat16"}, packed.MIXTURE | {"dtype": "bfloat16"}
FORMS: dict[str, tuple[str, list[str]]] = {  # how the checkpoint is written, options of the server
    "gptq": ("gptq4-g32-asym-act-v1", []),
    "gptq, rounded": ("gptq8-g32-sym-plain-v2", ROUNDED),
    "awq": ("awq", []),
    "packed": ("packed4-act", []),
    "w8a8": ("int8", ROUNDED),
    "float8": ("float8", []),
    "gguf": ("gguf", []),
    "mxfp4": ("mxfp4", []),
    "int4": ("dense", INT4),
    "int4, rounded": ("dense", [*INT4, *ROUNDED]),
    "int8": ("dense", [*INT8, "--quantize-lm-head"]),
    "experts, awq": ("experts awq", []),
    "experts, int4": ("experts dense", INT4),
}
PROMPTS = [[7 * i % 250 + 5 for i in range(60)], [11 * i % 200 + 30 for i in range(33)]]
PARAMS = {"temperature": 0.8, "seed": 3, "max_tokens": 14, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}


def written(directory: Path, form: str, seed: int) -> tuple[Path, Tensors]:
    """A checkpoint, and the tensors of floats that it means."""
    kind = form.removeprefix("experts ")
    if kind == "gguf":
        return _gguf(directory, seed)
    hf = mxfp4.HF if kind == "mxfp4" else EXPERTS if kind != form else DENSE
    write_checkpoint(directory, hf, seed=seed)
    dequantized = stored(directory)
    if kind == "mxfp4":
        dequantized = mxfp4.quantized(directory, seed)
    elif kind == "float8":
        dequantized = float8.quantize(directory, float8.QWEN, "block", "_scale_inv", torch.float32)
    elif kind != "dense":
        dequantized = packed.write(directory, *packed.CASES[kind])
    return directory, {name: tensor.contiguous() for name, tensor in dequantized.items()}


def _gguf(directory: Path, seed: int) -> tuple[Path, Tensors]:
    directory.mkdir()
    dequantized = gguf_models.write(directory / "m.gguf", "qwen3", "Q4_K", value_kind="Q6_K")
    tensors: Tensors = {name: t for name, t in dequantized.state_dict().items() if name != "lm_head.weight"}
    if seed > 1:
        tensors = {name: t * (1 + 0.1 * torch.sin(torch.arange(t.shape[-1]))) for name, t in tensors.items()}
    return directory / "m.gguf", tensors


@dataclass
class Lab:
    """A server of the first weights, and what servers of the first, the second and of the second as floats reply."""

    form: str
    server: Server
    tensors: list[Tensors]  # of the first and second checkpoint, as they are stored; a GGUF file's as floats
    directories: list[Path]
    floats: Tensors  # what the second checkpoint means
    replies: list[Any]
    digests: list[dict[str, str]]

    def in_client(self, scene: Callable[[TokserveClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with TokserveClient(self.server.url) as client:
                return await scene(client)

        return asyncio.run(run())

    def serves(self, number: int) -> bool:
        return outcome(self.server) == self.replies[number]

    def update(self, tensors: Tensors) -> None:
        self.in_client(lambda client: client.update_weights(tensors))


def outcome(server: Server) -> list[Any]:
    """What two prompts get, with and without an adapter: first, then from the prefix cache, then with drafts."""
    results = []
    for model in (None, "one"):
        for ids in PROMPTS:
            body: dict[str, Any] = {"token_ids": ids, "sampling_params": PARAMS, "logprobs_format": "arrays"}
            first = reply(server, body | ({"model": model} if model else {}))
            again = reply(server, body | ({"model": model} if model else {}))
            drafts = {"draft_token_ids": first["choices"][0]["token_ids"]}
            drafted = reply(server, body | drafts | ({"model": model} if model else {}))
            assert part(first) == part(again) == part(drafted)
            results.append(part(first))
    assert results[:2] != results[2:], "the adapter changes nothing"
    return results


def reply(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    return good(server.post("/inference/v1/generate", body))


def part(reply_body: dict[str, Any]) -> Any:
    """What depends on weights alone."""
    choice = reply_body["choices"][0]
    return choice["token_ids"], choice["logprobs"], reply_body["prompt_logprobs"]


def flags(form: str, adapter: Path, *, floats: bool = False) -> list[str]:
    """Options of the server; `floats`: of a checkpoint of floats, which has no integers unless they make some."""
    options = FORMS[form][1]
    if floats and "--quantization" not in options:
        options = []
    common = ["--tokens-only", "--max-model-len", "256", "--max-loras", "1", "--max-logprobs", "8"]
    return [*common, "--enable-lora", "--lora-modules", f"one={adapter}", *options]


def seen(form: str, directory: Path, adapter: Path) -> tuple[Any, dict[str, str]]:
    """What a server of a checkpoint replies, and the checksums that it reports."""
    with Server(str(directory), *flags(form, adapter, floats=directory.name == "plain")) as server:
        answer = server.post("/weight_checker", {"action": "checksum", "names": "checkpoint"})
        assert answer.status_code == 200, answer.text
        return outcome(server), answer.json()["checkpoint"]


@pytest.fixture(params=FORMS)
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    form = request.param
    kind, _ = FORMS[form]
    checkpoints = [written(tmp_path / str(seed), kind, seed) for seed in (1, 2)]
    (first, _), (second, floats) = checkpoints
    base, plain = (
        write_float(tmp_path / name, tensors, first)
        for name, (_, tensors) in zip(("base", "plain"), checkpoints, strict=True)
    )
    directories = [first, plain if kind == "gguf" else second]
    adapter = write_adapter(tmp_path / "adapter", base, seed=1, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    with ThreadPoolExecutor() as pool:
        actual = list(pool.map(lambda directory: seen(form, directory, adapter), [*directories, plain]))
    tensors = [checkpoints[i][1] if kind == "gguf" else stored(directories[i]) for i in range(2)]
    with Server(str(first), *flags(form, adapter), "--allowed-weight-dirs", str(tmp_path)) as server:
        replies, digests = [one for one, _ in actual], [one for _, one in actual]
        assert replies[0] != replies[1]
        yield Lab(form, server, tensors, directories, floats, replies, digests)


def write_float(directory: Path, tensors: Tensors, source: Path) -> Path:
    """A checkpoint of floats with the config of another one."""
    directory.mkdir(exist_ok=True)
    if source.suffix == ".gguf":
        hf = model_config(read_header(source))
    else:
        hf = json.loads((source / "config.json").read_text())
    hf.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(hf))
    rewrite(directory, tensors)
    return directory


def test_replies_follow_the_weights(lab: Lab) -> None:
    """Updates of every kind, and sleeps between them."""
    assert lab.serves(0)
    refusals(lab)
    assert lab.serves(0), "a refused update has changed something"
    lab.server.post("/sleep?level=1", {})
    lab.server.post("/wake_up", {})
    assert lab.serves(0)
    lab.in_client(lambda client: client.load_weights(lab.directories[1]))
    assert lab.serves(1) and digests(lab) == lab.digests[1]
    lab.update(lab.tensors[0])
    if lab.form == "gguf":
        lab.in_client(lambda client: client.load_weights(lab.directories[1]))
    else:
        assert lab.serves(0) and digests(lab).items() >= checksums(lab.tensors[0]).items()
    lab.server.post("/sleep?level=2", {})
    answer = lab.server.post("/wake_up", {})
    assert answer.status_code == 409, answer.text
    lab.server.post("/wake_up?tags=weights", {})
    lab.update(lab.tensors[1])
    lab.server.post("/wake_up", {})
    assert lab.serves(1)
    lab.update(lab.floats)
    assert lab.serves(2), "floats pushed into it"
    for tensors, number in ((lab.tensors[0], 0), (lab.tensors[1], 1), (lab.tensors[1], 1)):
        lab.in_client(lambda client, tensors=tensors: client.push(tensors, delta=True))  # type: ignore[misc]
        if lab.form != "gguf" or number:
            assert lab.serves(number), "pushed as a delta, or as a whole where there can be none"


def test_updates_while_requests_run(lab: Lab) -> None:
    """Each token is one of the weights that the reply names for it."""
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(outcome_of_many, lab.server, seed) for seed in range(4)]
        for number in (1, 0, 1):
            lab.update(lab.tensors[number])
        for one in running:
            one.result()
    assert lab.serves(1)


def outcome_of_many(server: Server, seed: int) -> None:
    params = PARAMS | {"max_tokens": 120, "seed": seed}
    for ids in PROMPTS:
        drafted = reply(server, {"token_ids": ids, "sampling_params": params, "draft_token_ids": list(range(5, 90))})
        choice = drafted["choices"][0]
        assert len(choice["token_ids"]) == 120 and choice["weight_versions"][-1]["end"] == 120


def digests(lab: Lab) -> dict[str, str]:
    checksums: dict[str, str] = lab.in_client(lambda client: client.weight_checksums())
    return checksums


def refusals(lab: Lab) -> None:
    """Updates that do not fit are refused whole, and say which tensor it is."""
    good = lab.tensors[1]
    matrix = next(name for name in good if "layers.1." in name and good[name].ndim >= 2)
    norm = "model.norm.weight"
    bad = {
        norm: {name: tensor for name, tensor in good.items() if name != norm},
        matrix: good | {matrix: good[matrix][:-1].contiguous()},
        f"{matrix}s": {f"{name}s" if name == matrix else name: tensor for name, tensor in good.items()},
        f"{norm} ": good | {norm: torch.zeros(good[norm].shape, dtype=torch.int64)},
        f"{matrix} ": good | {matrix: good[matrix].to(torch.complex64)},
        "": {},
    }
    for name, tensors in bad.items():
        with pytest.raises((ServerError, ValueError, TypeError)) as caught:
            lab.update(tensors)
        if isinstance(caught.value, ServerError):
            module = name.rpartition(".")[0]  # an error may name a part or the weight
            assert 400 <= caught.value.status < 500 and module in caught.value.message, caught.value
    partial = {norm: good[norm]}
    with pytest.raises(ServerError, match="missing"):
        lab.update(partial)
    answer = lab.server.post("/update_weights", {"weight_dir": str(lab.directories[0].parent / "absent")})
    assert 400 <= answer.status_code < 500, answer.text
