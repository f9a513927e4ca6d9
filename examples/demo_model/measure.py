"""Asks a running tokserve server the demo model's own tasks and reports how often the answer is exact.

The tasks have one right answer each, so this is an end-to-end check of the whole server: tokenizer, chat
template, batching, attention, sampling and detokenizing all have to be right, under concurrent requests, for
the rates to come out as high as they were after training.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tasks import TASKS, Example

PASS_RATE = 0.95
MAX_ANSWER_TOKENS = 16


def request_json(url: str, body: dict[str, Any] | None = None) -> Any:
    """GET the address, or POST the body to it as JSON, and return the JSON that comes back."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def ask(url: str, model: str, question: str) -> str:
    """The server's greedy answer to one question."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MAX_ANSWER_TOKENS,
    }
    reply = request_json(f"{url}/v1/chat/completions", body)
    content = reply["choices"][0]["message"]["content"]
    return content if isinstance(content, str) else ""


def exact_answers(url: str, examples: list[Example], concurrency: int) -> dict[str, int]:
    """Number of exact answers per task; the tasks are asked in mixed order, several at a time."""
    model = request_json(f"{url}/v1/models")["data"][0]["id"]
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda example: ask(url, model, example.question), examples))
    exact = dict.fromkeys(TASKS, 0)
    for example, answer in zip(examples, answers, strict=True):
        exact[example.task] += answer == example.answer
    return exact


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure the demo model's exact-answer rates through a running tokserve server. "
        f"Exits with status 1 if any task is below {PASS_RATE:.0%}, 2 if the server cannot be asked.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("-n", type=int, default=200, metavar="COUNT", help="questions per task")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight at once")
    parser.add_argument("--seed", type=int, default=20_000_003, help="seed of the questions, not one trained on")
    args = parser.parse_args()
    if args.n < 1 or args.concurrency < 1:
        parser.error("-n and --concurrency must be at least 1")
    return args


def main() -> int:
    args = parse_args()
    rng = random.Random(args.seed)
    examples = [task.example(rng) for task in TASKS.values() for _ in range(args.n)]
    rng.shuffle(examples)
    try:
        exact = exact_answers(args.url.rstrip("/"), examples, args.concurrency)
    except urllib.error.HTTPError as error:
        print(f"the server refused a request: {error}: {error.read().decode(errors='replace')}", file=sys.stderr)
        return 2
    except (OSError, ValueError, LookupError) as error:
        print(f"no usable answer from {args.url}: {error!r}", file=sys.stderr)
        return 2
    print(f"{'task':10}{'exact':>8}{'asked':>8}{'rate':>9}")
    for name, count in exact.items():
        print(f"{name:10}{count:8}{args.n:8}{count / args.n:9.1%}")
    total = sum(exact.values())
    print(f"{'total':10}{total:8}{len(examples):8}{total / len(examples):9.1%}")
    return 0 if min(exact.values()) >= PASS_RATE * args.n else 1


if __name__ == "__main__":
    sys.exit(main())
