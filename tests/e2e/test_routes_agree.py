"""Random requests by four ways: whole, as a stream, and through render, generate (whole or as a stream) and derender.

All four must say the same: text, tokens, logprobs, reasons and usage.  The requests come from seeds.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.replies import good

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
QUESTIONS = ["What is 47 + 38?", "Reverse the word planet.", "Sort the letters of banana.", "Hé 🙂", "count e in tree"]
PROMPTS = ["47+38<|im_end|>", "hello wor", "né🙂", [5, 20, 31, 44, 7], [286, 84, 82, 68]]
STOPS = ["e", "al", "an", "5", " ", "n", "85", "ten", "\ufffd"]
FEW = 8


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo.url, timeout=120) as generated:
        yield generated


def maybe(rng: random.Random, share: float, **fields: Any) -> dict[str, Any]:
    return fields if rng.random() < share else {}


def options(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters of all sorts, with a seed."""
    temperature = rng.choice([0.0, 0.7, 1.0, 1.5])
    most = rng.randrange(1, 28)
    return {
        "temperature": temperature,
        "seed": rng.randrange(-(2**40), 2**40),
        "max_tokens": most,
        **maybe(rng, 0.4, n=rng.randrange(1, 4) if temperature else 1),
        **maybe(rng, 0.5, stop=rng.sample(STOPS, rng.randrange(1, 4))),
        **maybe(rng, 0.3, min_tokens=rng.randrange(0, most + 1)),
        **maybe(rng, 0.3, include_stop_str_in_output=True),
        **maybe(rng, 0.3, ignore_eos=True),
        **maybe(rng, 0.3, skip_special_tokens=False),
        **maybe(rng, 0.2, top_k=rng.randrange(1, 30)),
        **maybe(rng, 0.2, top_p=0.8),
        **maybe(rng, 0.2, min_p=0.05),
        **maybe(rng, 0.2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.4),
        **maybe(rng, 0.2, logit_bias={"64": 3.0, "77": 2.5}),
        **maybe(rng, 0.2, bad_words=["n", " a"]),
        **maybe(rng, 0.2, stop_token_ids=[64, 72]),
        **maybe(rng, 0.2, stop_token_sequences=[[77, 64], [68, 77]]),
        **maybe(rng, 0.3, logprob_token_ids=[77, 3, 287]),
        **maybe(rng, 0.3, prompt_logprobs=rng.randrange(0, 4)),
        **maybe(rng, 0.3, logprobs_mode=rng.choice(["temperature", "processed"])),
        **maybe(rng, 0.4, return_token_ids=True),
        **maybe(rng, 0.3, return_tokens_as_token_ids=True),
    }


def chat_request(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    top = {"logprobs": True, "top_logprobs": rng.randrange(0, 5)}
    return {"messages": [{"role": "user", "content": rng.choice(QUESTIONS)}]} | options(rng) | maybe(rng, 0.6, **top)


def completion_request(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    prompts: Any = rng.sample(PROMPTS, rng.randrange(1, 4))
    body = {"prompt": prompts if rng.random() < 0.6 else prompts[0]} | options(rng)
    return body | maybe(rng, 0.6, logprobs=rng.randrange(0, 5)) | maybe(rng, 0.3, echo=True)


def ask(client: httpx.Client, path: str, body: Any) -> Any:
    return good(client.post(path, json=body))


def events(client: httpx.Client, path: str, body: Any) -> list[Any]:
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=request) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.status_code == 200 and lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def append(total: dict[str, Any], delta: dict[str, Any], joined: tuple[str, ...]) -> None:
    """A delta's fields into what there is: those in `joined` are added up, of the others the last counts."""
    for key, value in delta.items():
        if isinstance(value, dict) and isinstance(total.get(key), dict):
            append(total[key], value, joined)
        elif key in joined and total.get(key) is not None and value is not None:
            total[key] = total[key] + value
        elif value is not None or key not in total:
            total[key] = value


JOINED = (
    "content",
    "text",
    "token_ids",
    "text_offset",
    "token_logprobs",
    "tokens",
    "top_logprobs",
    "ranks",
    "top_token_ids",
)

UNASKED = ("token_ids", "prompt_token_ids", "prompt_logprobs")  # null in replies to requests without the field


def joined_events(stream: list[Any]) -> dict[str, Any]:
    """The reply that a stream's events are parts of."""
    reply: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in stream:
        for choice in event.pop("choices"):
            append(choices.setdefault(choice["index"], {}), choice, JOINED)
        append(reply, event, ())
    return reply | {"choices": [choices[index] for index in sorted(choices)]}


def steady(reply: dict[str, Any]) -> dict[str, Any]:
    """What must be equal: not ids and times, nor what the cache knew, nor how a stream says that there is nothing."""
    usage = {key: value for key, value in reply["usage"].items() if key != "prompt_tokens_details"}
    choices = []
    for choice in reply["choices"]:
        message = choice.pop("message", None) or choice.pop("delta", None)
        fields = {key: value for key, value in choice.items() if value is not None or key not in UNASKED}
        choices.append(fields | ({"content": message["content"]} if message else {}))
    kept = {key: reply[key] for key in ("prompt_token_ids", "prompt_logprobs") if reply.get(key) is not None}
    return {"usage": usage, "choices": choices, **kept}


def ways(client: httpx.Client, rendered: Any) -> Iterator[Any]:
    """What the token route makes of a rendered request, whole and joined from a stream, in two formats."""
    for form in ("objects", "arrays"):
        body = rendered | {"logprobs_format": form}
        yield ask(client, GENERATE, body)
        yield joined_events(events(client, GENERATE, body))


def check_chat(client: httpx.Client, seed: int) -> None:
    requested = chat_request(seed)
    expected = steady(ask(client, CHAT, requested))
    assert steady(joined_events(events(client, CHAT, requested))) == expected, requested
    for generated in ways(client, ask(client, CHAT + "/render", requested)):
        body = {"generate_response": generated, "chat_request": requested}
        assert steady(ask(client, CHAT + "/derender", body)) == expected, requested


def check_completions(client: httpx.Client, seed: int) -> None:
    requested = completion_request(seed)
    expected = steady(ask(client, COMPLETIONS, requested))
    assert steady(joined_events(events(client, COMPLETIONS, requested))) == expected, requested
    generated = zip(
        *[ways(client, rendered) for rendered in ask(client, COMPLETIONS + "/render", requested)], strict=True
    )
    for replies in generated:
        body = {"generate_responses": replies, "completion_request": requested}
        assert steady(ask(client, COMPLETIONS + "/derender", body)) == expected, requested


@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(FEW))
def test_chat_by_every_way(client: httpx.Client, seed: int) -> None:
    check_chat(client, seed)


@pytest.mark.some(3)
@pytest.mark.parametrize("seed", range(FEW))
def test_completions_by_every_way(client: httpx.Client, seed: int) -> None:
    check_completions(client, seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("check", [check_chat, check_completions])
def test_many_more_by_every_way(client: httpx.Client, check: Any) -> None:
    for seed in range(FEW, FEW + 250):
        check(client, seed)
