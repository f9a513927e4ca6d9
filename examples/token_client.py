"""A chat in three steps: render to token ids, generate tokens, derender to text.  Usage: token_client.py [BASE_URL]

The steps may go to different servers: rendering and derendering need the tokenizer, generating needs the model.
"""

import json
import sys
import urllib.request
from typing import Any


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    chat = {
        "messages": [{"role": "user", "content": "What is 47 + 38?"}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    rendered = post(base + "/v1/chat/completions/render", chat)
    print("prompt:", rendered["token_ids"])
    print("sampling:", rendered["sampling_params"])

    generated = post(base + "/inference/v1/generate", rendered)
    choice = generated["choices"][0]
    print("output:", choice["token_ids"], choice["finish_reason"])

    body = {"generate_response": generated, "chat_request": chat, "prompt_tokens": len(rendered["token_ids"])}
    by_hand = post(base + "/v1/chat/completions/derender", body)
    print("text:", by_hand["choices"][0]["message"]["content"])

    at_once = post(base + "/v1/chat/completions", chat)
    print("the same as the chat route:", by_hand["choices"] == at_once["choices"])


if __name__ == "__main__":
    main()
