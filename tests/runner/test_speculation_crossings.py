"""Speculation crossed at random with all that a server may be asked for, over the real kernels and a trained model.

Two engines serve the same requests, one without speculation; whatever both complete is `==`.  Grammars, adapters,
choices of one request, sampling masks, aborts in mid-draft, pauses, sleep and weight updates come at random, and drafts
from clients, texts, history, draft models and the quantized model itself.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters import write_adapter
from tests.runner.drive import MASKS
from tests.runner.test_speculation import OPTIONS, drafts_for
from tests.runner.test_with_engine import RealEngine
from tests.tiny_models import tiny_config
from tokserve.checkpoint import DEMO_DIR
from tokserve.protocol.messages import FromEngine, StepOutput, Submit
from tokserve.protocol.params import StructuredOutputs
from tokserve.protocol.prompt import pack_ids

VOCAB = 288
TASK = [286, 84, 82, 68, 81, 198, 271, 220, 83, 71, 68, 220, 86, 78, 81, 67, 220, 82, 83, 78, 77, 68, 13, 287, 198, 286]
TASK += [64, 82, 82, 72, 82, 83, 64, 77, 83, 198]  # "Reverse the word stone.", as a chat
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yy"]}},"required":["a","b"]}'
# a form that begins after free text
AFTER_THOUGHTS = f'start: /[^<]{{0,9}}/ "</t>" answer\nanswer: %json {SCHEMA}'
MORE: list[dict[str, Any]] = [
    {"return_sampling_mask": True, "top_k": 7, "temperature": 0.8},
    {"logprobs": 2, "temperature": 1.0},
    {"return_sampling_mask": True, "top_p": 0.9, "temperature": 1.2, "logprobs": 1},
    {"temperature": 1.4, "min_p": 0.05},
    {"structured_outputs": StructuredOutputs(regex="[ab]{3,12}x?"), "temperature": 1.0, "logprobs": 1},
    {"structured_outputs": StructuredOutputs(json=SCHEMA), "temperature": 0.9},
    {"structured_outputs": StructuredOutputs(choice=["stone", "enots", "tones"]), "temperature": 1.1},
    {"structured_outputs": StructuredOutputs(regex="[a-z ]+"), "temperature": 0.7, "frequency_penalty": 0.5},
    {"structured_outputs": StructuredOutputs(grammar=AFTER_THOUGHTS), "temperature": 0.8, "logprobs": 1},
]
SOURCES: list[dict[str, Any]] = [
    {"spec_method": "suffix"},
    {"spec_method": "suffix"},
    {"spec_method": "ngram", "spec_tokens": 3},
    {"spec_method": "prediction"},
    {"spec_method": "self-int8"},
    {"spec_method": "self-int4", "spec_tokens": 5},
    {"spec_model": "demo", "spec_method": None},
    {"spec_model": "small", "spec_method": None},
    {"spec_model": "demo", "spec_method": None, "speculative_config": {"quantization": "int8"}},
]
ENGINES: list[dict[str, Any]] = [
    {},
    {"depth": 2},
    {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    {"kv_cache_memory_bytes": 40 * 1024 * 16},
    {"depth": 2, "kv_cache_memory_bytes": 40 * 1024 * 16, "enable_prefix_caching": False},
    {"enforce_eager": True},
]


class Case(msgspec.Struct):
    """Choices of one submission.  `abort_after`: turns."""

    prompt: list[int]
    params: dict[str, Any]
    seeds: list[int]
    adapter: str
    group: str | None
    salt: str | None
    abort_after: int | None


def cases(rng: random.Random, count: int) -> list[Case]:
    """Submissions of all kinds; some have a prompt, a group or seeds of an earlier one."""
    drawn: list[Case] = []
    for _ in range(count):
        if drawn and rng.random() < 0.5:
            again = rng.choice(drawn)
            prompt, seeds = again.prompt, list(again.seeds)
        else:
            prompt = TASK[: rng.choice([36, 36, 20])] + [rng.randrange(64, 90) for _ in range(rng.choice([0, 1, 12]))]
            seeds = [rng.randrange(99)]
        seeds = seeds + [rng.randrange(99) for _ in range(rng.choice([0, 0, 0, 2]))]
        params = {"max_tokens": rng.randrange(1, 32), "ignore_eos": rng.random() < 0.6}
        params |= rng.choice(MORE) if rng.random() < 0.5 else rng.choice(OPTIONS)
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        if "structured_outputs" in params:
            params["ignore_eos"] = False
        drawn.append(
            Case(
                prompt,
                params,
                seeds,
                rng.choice(["", "", "", "one", "two"]),
                rng.choice([None, None, "a"]),
                rng.choice([None, None, "s"]),
                rng.choice([None] * 7 + [1, 4]),
            )
        )
    return drawn


class Server(RealEngine):
    """An engine with the demo model or other weights of its shape, adapters, and what it was sent of masks."""

    def __init__(self, root: Path, **options: Any) -> None:
        if options.get("spec_model") is not None:
            options["spec_model"] = str(DEMO_DIR if options["spec_model"] == "demo" else root / "small")
        self.masks: dict[str, list[Any]] = {}
        defaults = {
            "model": str(DEMO_DIR),
            "load_format": "auto",
            "eos_token_ids": [287],
            "enable_lora": True,
            "max_loras": 2,
            "lora_modules": [f"one={root / 'one'}", f"two={root / 'two'}"],
        }
        super().__init__(root / "unused", **(defaults | options))

    def _emit(self, identity: bytes, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            for request_id, _, columns, _ in message.rows():
                if MASKS in columns:
                    self.masks.setdefault(request_id, []).append((columns[MASKS].records, columns[MASKS].items))
        super()._emit(identity, message)

    def turn(self) -> None:
        """A step; where others work for it, they get time."""
        if not self.step():
            time.sleep(0.001)

    def settle(self, rids: Sequence[str]) -> None:
        """Until these have ended."""
        for _ in range(100_000):
            if all(rid in self.received and self.received[rid].finish is not None for rid in rids):
                return
            self.turn()
        raise AssertionError("requests do not end")

    def command(self, method: str, **args: Any) -> None:
        """Call, and wait for the reply."""
        known = len(self.replies)
        self.call(method, call_id=77, **args)
        for _ in range(100_000):
            if len(self.replies) > known:
                break
            self.turn()
        reply = self.replies[-1]
        assert reply.call_id == 77 and reply.error is None, reply

    def outcome(self, rid: str) -> Any:
        received = self.received[rid]
        finish = received.finish
        assert finish is not None
        masks = [b"".join(parts) for parts in zip(*self.masks.get(rid, []), strict=True)]
        return (
            received.tokens,
            received.logprobs,
            received.prompt_logprobs,
            masks,
            (finish.reason, finish.detail, finish.stop, finish.message),
        )


def serve(
    server: Server,
    rounds: Sequence[Sequence[Case]],
    drafts: dict[str, list[int]],
    rng: random.Random,
    weights: Sequence[Path],
) -> dict[str, Any]:
    """The rounds one after the other, each with other weights; returns what each choice says."""
    outputs: dict[str, Any] = {}
    for number, submissions in enumerate(rounds):
        aborts: dict[int, list[str]] = {}
        rids: list[str] = []
        for index, case in enumerate(submissions):
            key = f"{number}.{index}"
            choices = [
                msgspec.structs.replace(
                    server.make(
                        f"{key}.{n}",
                        case.prompt,
                        seed=seed,
                        adapter=case.adapter,
                        draft_group=case.group,
                        cache_salt=case.salt,
                        stream=rng.random() < 0.5,
                        **case.params,
                    ),
                    drafts=pack_ids(drafts.get(f"{key}.{n}", [])),
                )
                for n, seed in enumerate(case.seeds)
            ]
            rids += [choice.request_id for choice in choices]
            server.core.receive(b"A", Submit(7, key, choices))
            if case.abort_after is not None:
                aborts.setdefault(index + case.abort_after, []).append(key)
            for _ in range(rng.randrange(6)):
                server.turn()
            for aborted in aborts.pop(index, ()):
                server.command("abort", keys=[aborted])
            if rng.random() < 0.08:
                disturb(server, rng, weights[number])
        server.settle([rid for rid in rids if rid in server.requests])
        outputs |= {rid: server.outcome(rid) for rid in rids}
        server.command("update_weights_from_dir", weight_dir=str(weights[number + 1]))
    server.core.cache.check()
    return outputs


def disturb(server: Server, rng: random.Random, weights: Path) -> None:
    """Something that interrupts requests and changes none."""
    disturbance = rng.choice(["pause", "sleep", "cache", "weights"])
    if disturbance == "cache":
        server.command("reset_prefix_cache", reset_external=rng.random() < 0.5)
    elif disturbance == "weights":
        server.command("update_weights_from_dir", weight_dir=str(weights), recompute_kv=rng.random() < 0.5)
    elif disturbance == "pause":
        server.command("pause", mode="keep", clear_cache=False)
        server.command("resume")
    else:
        server.command("sleep", level=1, mode="keep")
        server.command("wake_up")


def equal(one: Any, other: Any) -> bool:
    """Both completed: the same; one was aborted: it begins as the other does."""
    if "abort" in (one[-1][0], other[-1][0]):
        length = min(len(one[0]), len(other[0]))
        return bool(one[0][:length] == other[0][:length])
    return bool(one == other)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters, a smaller draft model, and other weights."""
    root = tmp_path_factory.mktemp("crossings")
    for seed, name in enumerate(("one", "two")):
        write_adapter(root / name, DEMO_DIR, seed=seed, gain=0.2)
    (root / "small").mkdir()
    small = tiny_config("llama") | {"num_hidden_layers": 1, "vocab_size": VOCAB}
    (root / "small" / "config.json").write_text(json.dumps(small))
    from tokserve.models import load

    model = load.build(load.decoder_spec(small), dtype="float32", head_dtype="auto")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(parameter.shape, generator=generator) * 0.1
        for name, parameter in model.parameters_by_name().items()
    }
    save_file(tensors, root / "small" / "model.safetensors", metadata={"format": "pt"})
    (root / "moved").mkdir()
    moved = {
        name: (tensor.float() * (1 + 0.02 * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in load_file(DEMO_DIR / "model.safetensors").items()
    }
    save_file(moved, root / "moved" / "model.safetensors", metadata={"format": "pt"})
    (root / "moved" / "config.json").write_text((DEMO_DIR / "config.json").read_text())
    return root


def crossed(root: Path, seed: int, count: int, arithmetic: dict[str, Any], source: dict[str, Any]) -> int:
    """Returns how many choices were compared."""
    rng = random.Random(seed)
    rounds = [cases(rng, count // 2), cases(rng, count - count // 2)]
    rounds[1][:3] = rounds[0][:3]  # the next epoch
    weights = [DEMO_DIR, root / "moved", DEMO_DIR]
    plain = Server(root, **arithmetic)
    expected = serve(plain, rounds, {}, random.Random(1), weights)
    drafts = {
        rid: [token % VOCAB for token in drafts_for(actual[0] or [3], rng)]
        for rid, actual in expected.items()
        if rng.random() < 0.5
    }
    options = rng.choice(ENGINES)
    drafting = Server(root, **(options | arithmetic | source))
    actual = serve(drafting, rounds, drafts, random.Random(seed + 1), weights)
    stats = drafting.stats
    for server in (plain, drafting):
        server.core.close()
        server.real.close()
    assert actual.keys() == expected.keys()
    unequal = [rid for rid in actual if not equal(actual[rid], expected[rid])]
    assert not unequal, (options, source, unequal[:3], [(actual[rid], expected[rid]) for rid in unequal[:1]])
    assert "draft_steps" not in plain.stats.rooms
    assert sum(stats.rooms["accepted_by_position"]) > count // 20, "nothing was tested"
    return len(actual)


@pytest.mark.slow
def test_a_few_requests_with_all_kinds_of_drafts(root: Path) -> None:
    assert crossed(root, 3, 12, {"dtype": "bfloat16"}, {"spec_method": "self-int8"}) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(90))
def test_speculation_changes_nothing_whatever_it_is_crossed_with(root: Path, seed: int) -> None:
    """These and the requests of `test_speculation` are more than 10,000."""
    rng = random.Random(seed)
    arithmetic = rng.choice([{"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization": "int8"}])
    sources = [one for one in SOURCES if not ("quantization" in arithmetic and "self" in str(one["spec_method"]))]
    crossed(root, 1000 + seed, 80, arithmetic, rng.choice(sources))
