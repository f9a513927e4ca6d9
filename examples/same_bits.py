"""Sends one request alone, then while many others run, and compares its tokens and logprobs with `==`.

The exit status is 1 if a bit differs.
"""

import argparse
import json
import random
import threading
import urllib.request
from typing import Any

BODY = {
    "token_ids": [5, 6, 7, 9, 30, 41],
    "sampling_params": {"temperature": 1, "seed": 1, "max_tokens": 40, "ignore_eos": True, "logprobs": 0},
    "logprobs_format": "arrays",
}


def generate(url: str, body: Any) -> tuple[list[int], list[float]]:
    """The token ids and logprobs of a reply."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/inference/v1/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        choice = json.load(response)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def send_others(url: str, seed: int, stop: threading.Event) -> None:
    """One random request after the other, until `stop` is set."""
    numbers = random.Random(seed)
    while not stop.is_set():
        ids = [numbers.randrange(1, 200) for _ in range(numbers.randrange(1, 60))]
        params = {"seed": numbers.randrange(1000), "max_tokens": numbers.randrange(1, 60), "ignore_eos": True}
        generate(url, {**BODY, "token_ids": ids, "sampling_params": {**params, "logprobs": 0}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="of the server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--others", type=int, default=64, help="requests that run at the same time (default: 64)")
    parser.add_argument("--repeats", type=int, default=30, help="how often the request is repeated (default: 30)")
    args = parser.parse_args()
    ids, logprobs = generate(args.url, BODY)
    print(f"alone: {len(ids)} tokens, {ids[:6]}..., the first logprob is {logprobs[0]!r}")
    stop = threading.Event()
    others = [threading.Thread(target=send_others, args=(args.url, seed, stop)) for seed in range(args.others)]
    for thread in others:
        thread.start()
    try:
        equal = sum(generate(args.url, BODY) == (ids, logprobs) for _ in range(args.repeats))
    finally:
        stop.set()
        for thread in others:
            thread.join()
    print(f"beside {args.others} others: the same tokens and logprobs in {equal} of {args.repeats} repetitions")
    if equal != args.repeats:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
