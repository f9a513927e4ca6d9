"""/v1/completions: the four forms of a prompt, echo, scoring, logprobs in the older shape."""

import base64
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from tests.replies import good
from tests.server.byte_tokenizer import TOKENIZER, ids
from tests.server.scripted_llm import NOWHERE, endless, says
from tests.server.site import Site, site
from tests.text.checkpoints import sentence_piece_json
from tokserve.features.observe.observers import metrics_of
from tokserve.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"


def ask(s: Site, prompt: Any = "ab", **fields: Any) -> Any:
    return good(s.post(COMPLETIONS, {"prompt": prompt} | fields))


def refusal(prompt: Any = "ab", **fields: Any) -> tuple[int, str | None]:
    answer = site().post(COMPLETIONS, {"prompt": prompt} | fields)
    return answer.status_code, answer.json()["error"]["param"]


def test_the_whole_shape() -> None:
    reply = ask(site(says("hello")), request_id="r")
    assert reply["id"] == "cmpl-r" and reply["object"] == "text_completion" and reply["model"] == "tiny"
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "stop_detail": {"kind": "eos"},
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert reply["usage"]["total_tokens"] == 2 + 6


def test_an_empty_model_is_the_served_one() -> None:
    assert ask(site(says("x")), model="")["model"] == "tiny"


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["ab", [5]], [ids("ab"), [5]]),
    ],
)
def test_the_forms_of_a_prompt(prompt: Any, seen: list[list[int]]) -> None:
    s = site(says("x"))
    reply = ask(s, prompt)
    assert [call.prompt for call in s.llm.calls] == seen
    assert reply["usage"]["prompt_tokens"] == sum(map(len, seen)) and len(reply["choices"]) == len(seen)


def test_choices_are_prompt_major() -> None:
    choices = ask(site(), [[5, 6], [9]], n=2, max_tokens=3, return_token_ids=True)["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    assert [c["prompt_token_ids"] for c in choices] == [[5, 6], [5, 6], [9], [9]]
    assert [c["token_ids"] for c in choices] == [endless(p, i)[:3] for i, p in enumerate([[5, 6], [5, 6], [9], [9]])]


def test_sixteen_tokens_are_the_default() -> None:
    s = site()
    assert ask(s)["usage"]["completion_tokens"] == 16
    assert ask(s, max_tokens=None)["usage"]["completion_tokens"] == 510
    for name in ("max_tokens", "max_completion_tokens"):  # what Open WebUI and LM Studio send
        assert ask(s, **{name: -1})["usage"]["completion_tokens"] == 510


@pytest.mark.parametrize(("body", "width"), [(0, 0), (2, 2), (True, 1)])
def test_logprobs(body: Any, width: int) -> None:
    s = site()
    choice = ask(s, logprobs=body, max_tokens=4)["choices"][0]
    actual = choice["logprobs"]
    assert s.llm.calls[0].params.logprobs == width
    assert "".join(actual["tokens"]) == choice["text"] and actual["text_offset"] == [0, 1, 2, 3]
    for token, logprob, tops in zip(actual["tokens"], actual["token_logprobs"], actual["top_logprobs"], strict=True):
        assert next(iter(tops)) == token and tops[token] == logprob
        assert max(1, width) <= len(tops) <= width + 1


def test_logprobs_floor() -> None:
    assert ask(site(lambda p, i: [NOWHERE, 0]), logprobs=0)["choices"][0]["logprobs"]["token_logprobs"][0] == -9999.0


PACKED = {"packed_top_logprobs": True, "return_tokens_as_token_ids": True, "logprobs": 3}


def unpacked(logprobs: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """The ids and logprobs of each token's alternatives, read as vLLM's documentation shows."""
    packed = logprobs["packed_top_logprobs"]
    assert (packed["token_ids_dtype"], packed["logprobs_dtype"], logprobs["top_logprobs"]) == ("<i4", "<f4", [])
    ids = np.frombuffer(base64.b64decode(packed["token_ids_b64"]), "<i4").reshape(packed["shape"])
    scores = np.frombuffer(base64.b64decode(packed["logprobs_b64"]), "<f4").reshape(packed["shape"])
    return list(zip(ids.tolist(), scores.tolist(), strict=True))


def test_alternatives_can_be_packed() -> None:
    s = site()
    plain = ask(s, max_tokens=4, logprobs=3, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    packed = ask(s, max_tokens=4, **PACKED)["choices"][0]["logprobs"]
    assert all(packed[name] == plain[name] for name in ("tokens", "token_logprobs", "text_offset"))
    rows = unpacked(packed)
    assert len(rows) == 4
    for (token_ids, scores), tops in zip(rows, plain["top_logprobs"], strict=True):
        assert tops.items() >= {f"token_id:{one}": score for one, score in zip(token_ids, scores, strict=True)}.items()
    events = s.events(COMPLETIONS, {"prompt": "ab", "max_tokens": 4, **PACKED})
    shown = [event["choices"][0]["logprobs"] for event in events]
    assert [row for logprobs in shown for row in unpacked(logprobs)] == rows


def test_echo_puts_the_prompt_before_the_answer() -> None:
    assert ask(site(says("cd")), echo=True)["choices"][0]["text"] == "abcd"
    assert ask(site(says("cd")), ids("ab"), echo=True)["choices"][0]["text"] == "abcd"
    assert [c["text"] for c in ask(site(says("!")), ["ab", "x"], n=2, echo=True)["choices"]] == [
        "ab!",
        "ab!",
        "x!",
        "x!",
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_scores_the_prompt_too(n: int) -> None:
    s = site(says("cd"))
    for choice in ask(s, echo=True, logprobs=1, n=n)["choices"]:
        actual = choice["logprobs"]
        assert s.llm.calls[0].params.prompt_logprobs == 1
        assert actual["tokens"] == ["a", "b", "c", "d", "<eos>"] and actual["text_offset"] == [0, 1, 2, 3, 4]
        assert actual["token_logprobs"][0] is None and actual["top_logprobs"][0] is None
        assert all(value <= 0 for value in actual["token_logprobs"][1:])
        assert choice["prompt_logprobs"] is None


def test_echoed_logprobs_have_their_own_width() -> None:
    choice = ask(site(), ids("abc"), echo=True, logprobs=1, prompt_logprobs=3, max_tokens=1)["choices"][0]
    assert all(len(tops) <= 2 for tops in choice["logprobs"]["top_logprobs"][1:])
    assert len(choice["prompt_logprobs"][1]) >= 3


def test_prompt_logprobs_keep_to_their_own_width() -> None:
    body = {"logprobs": 3, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    choice = ask(site(), ids("abc"), echo=True, max_tokens=1, **body)["choices"][0]
    assert all(len(tops) >= 3 for tops in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(tops) <= 2 for tops in choice["prompt_logprobs"][1:])


def logprobs_of(s: Site, prompt: Any, **fields: Any) -> Any:
    """The logprobs of the only choice, by way of a stream, which must not differ."""
    fields |= {"logprobs": 1, "echo": True}
    logprobs = ask(s, prompt, **fields)["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {name: [] for name in logprobs}
    for event in s.events(COMPLETIONS, {"prompt": prompt, "stream": True} | fields):
        for name, values in event["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == logprobs
    return logprobs


def test_a_character_of_several_tokens_is_that_of_the_last() -> None:
    actual = logprobs_of(site(says("aé日b")), "é")
    assert actual["tokens"] == ["", "é", "a", "", "é", "", "", "日", "b", "<eos>"]
    assert actual["text_offset"] == [0, 0, 1, 2, 2, 3, 3, 3, 4, 5]
    assert [next(iter(tops)) for tops in actual["top_logprobs"][1:]] == actual["tokens"][1:]


def test_incomplete_utf8_is_shown_where_the_text_shows_it() -> None:
    """serving-faults F15."""
    broken = [*ids("a"), ids("é")[0], *ids("b"), ids("é")[1], *ids("c"), 0]
    choice = ask(site(lambda p, i: broken), logprobs=0)["choices"][0]
    assert choice["text"] == "a\ufffdb\ufffdc"
    assert choice["logprobs"]["tokens"] == ["a", "", "\ufffdb", "\ufffd", "c", "<eos>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 3, 4, 5]


@pytest.mark.parametrize("end", [[], [0]], ids=["length", "eos"])
@pytest.mark.parametrize(
    "prompt", ["x", ids("é")[:1], [*ids("x"), *ids("é")[:1]]], ids=["whole", "part", "ends-in-part"]
)
def test_tokens_joined_are_the_text_that_ends_within_a_character(prompt: Any, end: list[int]) -> None:
    """serving-faults F15."""
    script = [*ids("é"), *ids("é")[:1], *end]
    fields: dict[str, Any] = {"max_tokens": 3 if not end else 9, "echo": True}
    choice = ask(site(lambda p, i: script), prompt, logprobs=1, **fields)["choices"][0]
    assert choice["text"].endswith("é\ufffd")
    assert "".join(choice["logprobs"]["tokens"]).removesuffix("<eos>") == choice["text"]
    logprobs_of(site(lambda p, i: script), prompt, **fields)


def test_alternatives_that_are_parts_of_characters_have_names_of_their_own() -> None:
    """serving-faults F15: OpenAI names them by their bytes."""
    first, second = ids("é")
    token = 2 * (first // 2 + 5)  # an even one, whose alternatives follow it in steps of one from 11 above
    choice = ask(site(lambda p, i: [token, first, second, 0]), logprobs=20, max_tokens=3)["choices"][0]
    for tops, name in zip(choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"], strict=True):
        assert len(tops) in (20, 21) and next(iter(tops)) == name, tops
        assert any(other.startswith("bytes:\\x") for other in tops)


def test_an_alternative_that_is_also_named_by_the_request_comes_once() -> None:
    choice = ask(site(says("b")), logprobs=3, logprob_token_ids=[*ids("b"), *ids("m")], max_tokens=1)["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 4 and "bytes:" not in str(choice["logprobs"])


@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({}, [0, 1, 4, 5, 6, 6, 7]),
        ({"skip_special_tokens": False}, [0, 1, 4, 5, 6, 9, 10]),
        ({"return_tokens_as_token_ids": True}, [0, 1, 4, 5, 6, 6, 7]),
    ],
)
def test_offsets_are_places_in_the_text(fields: dict[str, Any], offsets: list[int]) -> None:
    script = [*ids("c"), 2, *ids("d"), 0]
    assert logprobs_of(site(lambda p, i: script), "a<x>b", **fields)["text_offset"] == offsets


def test_offsets_of_ids_leave_out_what_the_text_leaves_out() -> None:
    assert logprobs_of(site(says("c")), [*ids("a"), 2, *ids("b")])["text_offset"] == [0, 1, 1, 2, 3]


def test_offsets_of_a_prompt_whose_first_space_is_dropped() -> None:
    """Llama 2's tokenizer drops it; the output's first space stays."""
    tokenizer = Tokenizer(Backend.from_str(sentence_piece_json()))
    prompt = tokenizer.encode("the win", False)
    s = site(lambda p, i: [*prompt, 0], tokenizer=tokenizer)
    reply = ask(s, prompt, echo=True, logprobs=0, max_tokens=len(prompt))["choices"][0]
    text, actual = reply["text"], reply["logprobs"]
    assert text == "the win the win"
    places = zip(actual["tokens"][1:], actual["text_offset"][1:], strict=True)
    assert actual["text_offset"][0] == 0 and all(text.startswith(token, at) for token, at in places)


def test_choices_of_all_prompts_have_a_limit() -> None:
    assert refusal([[5]] * 4096, n=5, max_tokens=1) == (400, "n")
    assert refusal([[5]] * 17, n=1000, max_tokens=1) == (400, "n")
    assert refusal([[5]] * 4097) == (400, "prompt")


def packed(s: Site, route: str, body: dict[str, Any]) -> Any:
    return s.post(route, content=msgspec.msgpack.encode(body), headers={"Content-Type": "application/msgpack"})


def test_msgpack_has_packed_ids_and_numbers_as_keys() -> None:
    s = site()
    raw = array("i", [5, 6]).tobytes()
    body = {"max_tokens": 2, "logit_bias": {7: 1.5, "8": 2}}
    for route, name in ((COMPLETIONS, "prompt"), ("/v1/chat/completions/tokens", "tokens")):
        answer = packed(s, route, body | {name: raw})
        assert answer.status_code == 200, answer.text
        assert s.llm.calls[-1].prompt == [5, 6] and s.llm.calls[-1].params.logit_bias == {7: 1.5, 8: 2.0}
        assert packed(s, route, {name: raw[:5]}).json()["error"]["param"] == name
        assert packed(s, route, {name: b""}).json()["error"]["param"] == name
        wrong = packed(s, route, {name: raw, "logit_bias": {True: 1}})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"].startswith("logit_bias")
    assert packed(s, "/detokenize", {"tokens": raw}).json() == {"prompt": TOKENIZER.decode([5, 6], False)}


def test_max_completion_tokens_is_max_tokens() -> None:
    assert ask(site(), max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    scored = ask(site(), "abc", max_completion_tokens=0, echo=True, logprobs=1)
    assert scored["usage"]["completion_tokens"] == 0 and scored["choices"][0]["text"] == "abc"
    assert refusal(max_completion_tokens=0) == (400, "max_completion_tokens")
    assert refusal(max_completion_tokens=-2) == (400, "max_completion_tokens")
    assert refusal(max_tokens=1, max_completion_tokens=2) == (400, "max_tokens")


def test_max_tokens_zero_only_scores() -> None:
    s = site()
    for stream in (False, True):
        if stream:
            events = s.events(COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1})
            choice, usage = events[0]["choices"][0], None
        else:
            reply = ask(s, "abc", max_tokens=0, echo=True, logprobs=1)
            choice, usage = reply["choices"][0], reply["usage"]["completion_tokens"]
        assert choice["text"] == "abc" and len(choice["logprobs"]["tokens"]) == 3
        assert choice["finish_reason"] == "length" and usage in (0, None)
    assert refusal(max_tokens=0) == (400, "max_tokens")


def test_prompt_logprobs_are_in_the_choice() -> None:
    choices = ask(site(), [[5, 6, 8], [9]], prompt_logprobs=2, max_tokens=1)["choices"]
    assert choices[0]["prompt_logprobs"][0] is None
    assert [next(iter(entry)) for entry in choices[0]["prompt_logprobs"][1:]] == ["6", "8"]
    assert choices[0]["prompt_logprobs"][1]["6"]["decoded_token"] == TOKENIZER.token(6)
    assert choices[1]["prompt_logprobs"] == [None]


def test_generation_config_defaults(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    s = site(says("a"), generation_config=str(tmp_path))
    ask(s)
    ask(s, temperature=1)
    assert [call.params.temperature for call in s.llm.calls] == [0.5, 1.0]


def test_add_special_tokens() -> None:
    s = site(says("x"))
    ask(s, "<bos>a", add_special_tokens=False)
    assert s.llm.calls[0].prompt == [1, *ids("a")]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ("", "prompt"),
        ([""], "prompt[0]"),
        (["a", 5], "prompt[1]"),
        ([[5], []], "prompt[1]"),
        ([5, "a"], "prompt[1]"),
        ([5, True], "prompt[1]"),
        ([[5], [6, "x"]], "prompt[1][1]"),
        ([5, 9999], "prompt"),
        ([[5], [9999]], "prompt[1]"),
        ([[9999]], "prompt[0]"),
        ([["a"]], "prompt[0][0]"),
        ([5.0], "prompt[0]"),
        ("x" * 600, "prompt"),
        (["x"] * 5000, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused_prompts(prompt: Any, param: str, stream: bool) -> None:
    assert refusal(prompt, stream=stream) == (400, param)


def test_a_refused_prompt_refuses_all_prompts_of_the_request() -> None:
    s = site()
    answer = s.post(COMPLETIONS, {"prompt": [[5], [6], [9999]]})
    assert answer.status_code == 400 and not s.llm.num_inflight and not metrics_of(s.app.state.serving).inflight
    assert not s.llm.calls
    assert 'request_aborts_total{cause="abort_disconnect",engine="0",model_name="tiny"} 0.0' in s.get("/metrics").text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        (PACKED | {"logprobs": 0}, "packed_top_logprobs"),
        (PACKED | {"return_tokens_as_token_ids": False}, "packed_top_logprobs"),
        (PACKED | {"echo": True}, "packed_top_logprobs"),
        (PACKED | {"logprob_token_ids": [5]}, "packed_top_logprobs"),
        (PACKED | {"use_beam_search": True}, "packed_top_logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs_start": 1}, "prompt_logprobs_start"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_refused_fields(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields) == (400, param)


@pytest.mark.parametrize(("count", "status"), [(4096, 200), (4097, 400), (100_000, 400)])
def test_the_number_of_parts_of_a_prediction_is_limited(count: int, status: int) -> None:
    prediction = {"type": "content", "content": [{"type": "text", "text": ""}] * count}
    answer = site(says("x")).post(COMPLETIONS, {"prompt": "ab", "prediction": prediction})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["param"].startswith("prediction.content")


def test_ids_without_a_tokenizer() -> None:
    """peer-suites-3 (c): trainers send ids to servers with --skip-tokenizer-init."""
    s = site(endless, tokens_only=True)
    fields: dict[str, Any] = {"return_token_ids": True, "logprobs": 1, "prompt_logprobs": 1, "echo": True, "n": 2}
    reply = ask(s, [5, 6, 8], max_tokens=3, **fields)
    same = ask(site(endless), [5, 6, 8], max_tokens=3, **fields)
    assert reply["usage"] == same["usage"]
    for choice, expected in zip(reply["choices"], same["choices"], strict=True):
        assert choice["text"] == "" and choice["token_ids"] == expected["token_ids"]
        assert choice["prompt_token_ids"] == [5, 6, 8] and choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in [5, 6, 8, *choice["token_ids"]]]
        assert logprobs["token_logprobs"] == expected["logprobs"]["token_logprobs"]
        assert list(choice["prompt_logprobs"][1]) == list(expected["prompt_logprobs"][1])
    events = s.events(COMPLETIONS, {"prompt": [[5], [6]], "max_tokens": 3, "return_token_ids": True})
    ids = [[t for e in events for c in e["choices"] if c["index"] == i for t in c["token_ids"]] for i in (0, 1)]
    assert ids == [c["token_ids"] for c in ask(s, [[5], [6]], max_tokens=3, return_token_ids=True)["choices"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "ab"}, "prompt"),
        ({"prompt": [[5], "ab"]}, "prompt[1]"),
        ({"stop": ["x"]}, "stop"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ],
)
def test_texts_without_a_tokenizer_are_refused(fields: dict[str, Any], param: str) -> None:
    answer = site(tokens_only=True).post(COMPLETIONS, {"prompt": [5]} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
