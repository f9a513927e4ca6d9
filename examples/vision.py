"""An image by chat and by token ids: the same tokens.  Usage: vision.py PICTURE [BASE_URL]; needs openai.

The server runs a model with a vision tower: `tokserve serve path/to/Qwen2.5-VL-3B-Instruct`.
"""

import base64
import sys


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    from openai import OpenAI

    base = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=base + "/v1", api_key="none")
    model = client.models.list().data[0].id
    with open(sys.argv[1], "rb") as file:
        url = "data:image/png;base64," + base64.b64encode(file.read()).decode()
    picture = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": "What is in this picture?"}]}]
    limits = {"max_tokens": 64, "temperature": 0}
    chat = client.chat.completions.create(
        model=model, messages=messages, **limits, extra_body={"return_token_ids": True}
    )
    print(chat.choices[0].message.content)

    # the same request as a trainer sends it: ids, and the patches of the image
    root = client.with_options(base_url=base)
    render = root.post("/v1/chat/completions/render", body={"messages": messages, **limits}, cast_to=dict)
    reply = root.post("/inference/v1/generate", body=render, cast_to=dict)
    [place] = render["features"]["mm_placeholders"]["image"]
    print(f"{len(render['token_ids'])} prompt tokens, {place['length']} of them the image's, at {place['offset']}")
    assert reply["choices"][0]["token_ids"] == chat.choices[0].token_ids


if __name__ == "__main__":
    main()
