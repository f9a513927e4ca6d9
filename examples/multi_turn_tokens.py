"""A conversation by token ids: every turn appends to the ids that the model has seen and made.

Text that is rendered anew each turn may become other tokens than those that were generated; ids cannot drift, and the
prefix cache finds all earlier turns.  Usage: multi_turn_tokens.py [BASE_URL]
"""

import json
import sys
import urllib.request
from typing import Any

QUESTIONS = ["What is 47 + 38?", "Reverse the word planet.", "Sort the letters of apple.", "What is 90 - 17?"]


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

    def encode(text: str) -> list[int]:
        ids: list[int] = post(base + "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return ids

    ids: list[int] = []  # the whole conversation so far
    for turn, question in enumerate(QUESTIONS):
        # what the chat template puts between the turns; the model has closed its own with <|im_end|>
        between = "\n" if turn else ""
        ids += encode(f"{between}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        body = {"tokens": ids, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        reply = post(base + "/v1/chat/completions/tokens", body)
        choice = reply["choices"][0]
        assert reply["prompt_token_ids"] == ids
        ids = ids + choice["token_ids"]
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        print(f"{question} -> {choice['message']['content']}")
        print(f"  prompt {reply['usage']['prompt_tokens']} tokens, {cached} of them cached")


if __name__ == "__main__":
    main()
