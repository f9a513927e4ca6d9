"""Decoding with and without speculation, side by side in one process: `python benchmarks/speculation.py MODEL`.

Every case runs with the method none and with suffix in turns; the output must be equal, and the best time of each
counts, from the first step to the last token.  Random weights write random text at temperature 1, so acceptance is
exactly what a case makes it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from tokserve.config import Config, SpeculativeConfig
from tokserve.config.resolve import resolve
from tokserve.engine.core import EngineCore
from tokserve.executor.inline import InlineExecutor
from tokserve.protocol.messages import EngineRequest, FromEngine, StepOutput, StepStats, Submit
from tokserve.protocol.params import RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, pack_ids

PROMPT = 24  # tokens
QUESTIONS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a fox and a river.",
    "List five things to pack for a week in the mountains.",
    "What is the difference between a list and a tuple?",
)
CODE = """def total(items):
    result = 0
    for item in items:
        if item.price > 0:
            result = result + item.price * item.count
    return result

def mean(items):
    if len(items) == 0:
        return 0
    return total(items) / len(items)
"""
EDITS = tuple(
    f"Repeat this code, with {old} renamed to {new}, and write nothing else:\n```python\n{CODE}```"
    for old, new in (("result", "amount"), ("item", "entry"), ("total", "whole"), ("mean", "average"))
)
Ids = Sequence[int]


def salted(request: EngineRequest, salt: str) -> EngineRequest:
    """The same for another tenant: neither blocks nor earlier outputs are shared."""
    options = msgspec.structs.replace(request.options, cache_salt=salt)
    return msgspec.structs.replace(request, request_id=f"{request.request_id} {salt}", options=options)


def counts(stats: StepStats) -> list[int]:
    """Steps, steps with drafts, drafts, and those accepted; an engine without drafts does not count them."""
    rooms = stats.rooms
    accepted = sum(rooms.get("accepted_by_position", ()))
    return [stats.steps, rooms.get("draft_steps", 0), rooms.get("draft_tokens", 0), accepted]


class Bench:
    """One loaded model, served by an engine per run."""

    def __init__(self, model: str, tokens: int, turns: int, warm: int, **options: Any) -> None:
        sizes = {"max_model_len": 2048, "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 30}
        self._config = resolve(Config.make(model=model, **(sizes | options)))
        self._executor = InlineExecutor(self._config)
        self._facts = self._executor.start()
        self._tokens, self._turns, self._warm = tokens, turns, warm
        self._rng = random.Random(0)
        self.vocab_size = self._facts.vocab_size
        print(f"{model}: {self._facts.facts['kernels']}, {self._facts.facts['threads']} threads")

    def ids(self, count: int) -> list[int]:
        """Random ids."""
        return [self._rng.randrange(self.vocab_size) for _ in range(count)]

    def request(self, index: int, prompt: Ids, drafts: Ids = (), **params: float) -> EngineRequest:
        task = SamplingParams(ignore_eos=True, max_tokens=self._tokens, **params)  # type: ignore[arg-type]
        packed = pack_ids(drafts) if drafts else b""
        return EngineRequest(
            f"r{index}", TokenPrompt(pack_ids(prompt)), task, RequestOptions(stream=True), index, 0.0, packed
        )

    def run(self, on: bool, requests: Sequence[EngineRequest]) -> tuple[dict[str, list[int]], float, list[int]]:
        """Outputs, seconds and counts (`counts`), with speculation or without."""
        outputs: dict[str, list[int]] = {}

        def emit(client: bytes, message: FromEngine) -> None:
            if isinstance(message, StepOutput):
                for request_id, ids, *_ in message.rows():
                    outputs.setdefault(request_id, []).extend(ids)

        speculation = self._config.speculation if on else SpeculativeConfig(spec_method="none")
        config = msgspec.structs.replace(self._config, speculation=speculation)
        core = EngineCore(config, self._executor, self._facts, emit)
        for turn in range(self._warm):
            self._finish(core, [salted(request, f"turn {turn}") for request in requests])
        outputs.clear()
        before = counts(core.scheduler.stats())
        seconds = self._finish(core, requests)
        core.cache.check()
        core.close()
        after = counts(core.scheduler.stats())
        return outputs, seconds, [late - early for late, early in zip(after, before, strict=True)]

    def _finish(self, core: EngineCore, requests: Sequence[EngineRequest]) -> float:
        """Seconds until the requests have ended."""
        for request in requests:
            core.receive(b"A", Submit(7, request.request_id, [request]))
        began = time.perf_counter()
        while core.step():
            pass
        return time.perf_counter() - began

    def compare(self, name: str, requests: Sequence[EngineRequest]) -> None:
        """One line: the rates without and with speculation."""
        best = {False: float("inf"), True: float("inf")}
        expected, numbers = None, [0, 0, 0, 0]
        for _ in range(self._turns):
            for on in best:
                outputs, seconds, numbers = self.run(on, requests)
                best[on] = min(best[on], seconds)
                assert expected in (None, outputs), f"{name}: the output differs"
                expected = outputs
        count = sum(map(len, (expected or {}).values()))
        off, with_drafts = count / best[False], count / best[True]
        steps, draft_steps, drafts, accepted = numbers
        print(
            f"| {name} | {len(requests)} | {off:.1f} | {with_drafts:.1f} | {with_drafts / off:.2f} | {steps} "
            f"| {drafts} | {accepted} | {1 + accepted / max(1, draft_steps):.2f} |",
            flush=True,
        )

    def random_text(self, clients: int) -> None:
        """S1: nothing is ever accepted."""
        self.compare("random text", [self.request(i, self.ids(PROMPT)) for i in range(clients)])

    def predicted(self, name: str, clients: int, change: Callable[[list[int]], list[int]]) -> None:
        """S3: predictions made of the outputs."""
        prompts = [self.ids(PROMPT) for _ in range(clients)]
        outputs, *_ = self.run(False, [self.request(i, prompt) for i, prompt in enumerate(prompts)])
        drafts = [change(outputs[f"r{i}"]) for i in range(clients)]
        self.compare(name, [self.request(i, prompts[i], drafts[i]) for i in range(clients)])

    def repeated(self, clients: int) -> None:
        """A greedy random model repeats itself: its own text is the draft."""
        self.compare("repeats itself", [self.request(i, self.ids(PROMPT), temperature=0.0) for i in range(clients)])

    def texts(self, name: str, clients: int, texts: Sequence[str], **params: float) -> None:
        """Chats with a trained model: S2 and S5."""
        tokenizer = AutoTokenizer.from_pretrained(self._config.model.model)
        chats = [[{"role": "user", "content": text}] for text in texts]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
        self.compare(name, [self.request(i, prompts[i % len(prompts)], **params) for i in range(clients)])

    def prompts(self, clients: int, prompts: Sequence[Ids]) -> None:
        """Prompts of ids, that of one client or of the first few."""
        for name, params in (("greedy", {"temperature": 0.0}), ("temperature 1", {})):
            self.compare(f"text, {name}", [self.request(i, prompts[i], **params) for i in range(clients)])

    def half(self, output: list[int]) -> list[int]:
        """The first half of an output, then others."""
        return output[: len(output) // 2] + self.ids(len(output) - len(output) // 2)

    def edited(self, output: list[int]) -> list[int]:
        """Every tenth token exchanged."""
        return [self.ids(1)[0] if index % 10 == 9 else token for index, token in enumerate(output)]

    def garbage(self, output: list[int]) -> list[int]:
        """Random tokens, as many as the output has."""
        return self.ids(len(output))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=96, help="of an output")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--warm", type=int, default=0, help="rounds with a salt of their own before the timed one")
    parser.add_argument("--dtype")
    parser.add_argument("--kernels", help="the instruction set, avx2 say; by default the best")
    parser.add_argument("--spec-method")
    parser.add_argument("--spec-model")
    parser.add_argument("--spec-tokens", type=int)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lists of ids, for the case prompts")
    parser.add_argument("--cases", nargs="+", default=["right", "half", "edited", "garbage", "random", "repeats"])
    args = parser.parse_args()
    options = {
        "dtype": args.dtype,
        "cpu_kernels": args.kernels,
        "spec_method": args.spec_method,
        "spec_model": args.spec_model,
        "spec_tokens": args.spec_tokens,
    }
    bench = Bench(args.model, args.tokens, args.turns, args.warm, **options)
    print("| case | requests | off, tokens/s | on | ratio | steps | drafts | accepted | tokens a step with drafts |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    changes = {"half": bench.half, "edited": bench.edited, "garbage": bench.garbage, "right": lambda output: output}
    for case in args.cases:
        for clients in args.clients:
            if case in changes:
                bench.predicted(f"prediction: {case}", clients, changes[case])
            elif case == "chat":
                bench.texts("chat, temperature 1", clients, QUESTIONS)
                bench.texts("chat, greedy", clients, QUESTIONS, temperature=0.0)
            elif case == "edit":
                bench.texts("an edit of code, greedy", clients, EDITS, temperature=0.0)
            elif case == "prompts":
                bench.prompts(clients, json.loads(args.prompts.read_text()))
            elif case == "random":
                bench.random_text(clients)
            else:
                bench.repeated(clients)


if __name__ == "__main__":
    main()
