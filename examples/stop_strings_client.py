"""Stop strings with a tokens-only server: the client detokenizes the stream and aborts when one appears.

Usage: stop_strings_client.py BASE_URL CHECKPOINT_DIR [STOP]; needs `pip install tokenizers httpx`.
"""

import json
import sys
import uuid
from pathlib import Path

PROMPT = "<|im_start|>user\nReverse the word planet.<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    import httpx
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    base, directory = sys.argv[1], Path(sys.argv[2])
    stop = sys.argv[3] if len(sys.argv) > 3 else "nal"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    decoder = DecodeStream(skip_special_tokens=True)
    request_id = uuid.uuid4().hex
    body = {
        "token_ids": tokenizer.encode(PROMPT, add_special_tokens=False).ids,
        "request_id": request_id,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_tokens": 512, "ignore_eos": True},
    }
    ids: list[int] = []
    text = ""
    outcome = "not_needed"
    with (
        httpx.Client(base_url=base, timeout=60) as client,
        client.stream("POST", "/inference/v1/generate", json=body) as events,
    ):
        events.raise_for_status()
        for line in events.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(chunk["error"]["message"])
            for token in chunk["choices"][0]["token_ids"]:
                if stop not in text:
                    ids.append(token)
                    text += decoder.step(tokenizer, token) or ""  # None: in the middle of a character
            if stop in text:
                reply = client.post("/abort_requests", json={"request_ids": [request_id]}).json()
                outcome = reply["results"][request_id]
                break  # the answer came after the engine had freed the request
    print("text:", text.partition(stop)[0])
    print("tokens up to the stop string:", ids)
    print("abort:", outcome)


if __name__ == "__main__":
    main()
