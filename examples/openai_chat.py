"""The OpenAI SDK against a running server, streamed.  Usage: openai_chat.py [BASE_URL]; needs `pip install openai`."""

import sys


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    from openai import OpenAI

    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=base + "/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is 47 + 38?"}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
