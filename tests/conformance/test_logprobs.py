"""Logprobs of output and prompt: every format says the same numbers, warm or cold, decoded or re-scored."""

import base64
import math
import struct
import uuid
from typing import Any

import pytest

from tests.conformance.api import PROMPT, Api

PARAMS = {"temperature": 0.9, "seed": 4, "max_tokens": 10, "ignore_eos": True, "logprobs": 3}
ENTRY = {"token", "token_id", "logprob", "rank", "bytes"}


def floats(raw: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def ints(raw: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


def unpacked(columns: dict[str, Any], decode: Any = base64.b64decode) -> dict[str, Any]:
    """Packed columns as the format "arrays" has them."""
    rows, width = columns["shape"]
    ids, values = ints(decode(columns["top_token_ids"])), floats(decode(columns["top_logprobs"]))
    return {
        "token_logprobs": floats(decode(columns["token_logprobs"])),
        "ranks": ints(decode(columns["ranks"])),
        "top_token_ids": [ids[i * width : (i + 1) * width] for i in range(rows)],
        "top_logprobs": [values[i * width : (i + 1) * width] for i in range(rows)],
        "mode": columns["mode"],
    }


def as_arrays(content: list[Any], k: int) -> dict[str, Any]:
    """Objects as the format "arrays" has them."""
    best = [sorted(e["top_logprobs"], key=lambda t: (t["rank"], t["token_id"]))[:k] for e in content]
    return {
        "token_logprobs": [e["logprob"] for e in content],
        "ranks": [e["rank"] for e in content],
        "top_token_ids": [[t["token_id"] for t in tops] for tops in best],
        "top_logprobs": [[t["logprob"] for t in tops] for tops in best],
        "mode": "raw",
    }


def test_objects_have_both_key_sets_and_one_entry_per_token(api: Api) -> None:
    choice = api.choice(PARAMS)
    content = choice["logprobs"]["content"]
    assert [e["token_id"] for e in content] == choice["token_ids"]
    for e in content:
        assert set(e) == ENTRY | {"top_logprobs"}
        tops = e["top_logprobs"]
        assert tops[0] == {name: e[name] for name in ENTRY}, "the sampled token comes first"
        assert 3 <= len(tops) <= 4 and len({t["token_id"] for t in tops}) == len(tops)
        for t in tops:
            assert set(t) == ENTRY and t["token"] == f"token_id:{t['token_id']}" and t["bytes"] is None
            assert t["rank"] >= 1 and -9999.0 <= t["logprob"] <= 0.0


def test_in_text_mode_objects_say_the_tokens_text(text: Api) -> None:
    params = PARAMS | {"logprob_token_ids": [40]}
    plain, named = text.choice(params), text.choice(params, output_mode="text")
    for by_id, by_name in zip(plain["logprobs"]["content"], named["logprobs"]["content"], strict=True):
        pairs = zip([by_id, *by_id["top_logprobs"]], [by_name, *by_name["top_logprobs"]], strict=True)
        for e, t in pairs:
            assert {n: e[n] for n in ("token_id", "logprob", "rank")} == {
                n: t[n] for n in ("token_id", "logprob", "rank")
            }
            assert t["token"] == text.ok("/detokenize", {"tokens": [t["token_id"]]})["prompt"]
            assert bytes(t["bytes"]).decode(errors="replace") == t["token"]


def test_the_four_formats_are_equal(api: Api) -> None:
    objects = as_arrays(api.choice(PARAMS)["logprobs"]["content"], 3)
    arrays = api.choice(PARAMS, logprobs_format="arrays")["logprobs"]
    assert set(arrays) == {"token_logprobs", "ranks", "top_token_ids", "top_logprobs", "mode"}
    assert arrays == objects
    assert unpacked(api.choice(PARAMS, logprobs_format="base64")["logprobs"]) == arrays
    body = {"token_ids": PROMPT, "sampling_params": PARAMS}
    for name in ("arrays", "base64"):
        [choice] = api.packed(body | {"logprobs_format": name})["choices"]
        assert unpacked(choice["logprobs"], bytes) == arrays
        assert ints(choice["token_ids"]) == api.choice(PARAMS)["token_ids"]
    [choice] = api.packed(body)["choices"]
    assert as_arrays(choice["logprobs"]["content"], 3) == arrays


def test_logprobs_zero_is_the_sampled_token_alone(api: Api) -> None:
    choice = api.choice(PARAMS | {"logprobs": 0})
    expected = [e["logprob"] for e in api.choice(PARAMS)["logprobs"]["content"]]
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == expected
    assert all(len(e["top_logprobs"]) <= 1 for e in choice["logprobs"]["content"])
    arrays = api.choice(PARAMS | {"logprobs": 0}, logprobs_format="arrays")["logprobs"]
    assert arrays["token_logprobs"] == expected and arrays["top_token_ids"] == [[]] * 10


def test_asking_for_logprobs_changes_no_token(api: Api) -> None:
    assert api.choice(PARAMS | {"logprobs": None})["token_ids"] == api.choice(PARAMS)["token_ids"]


def test_the_whole_vocabulary_is_refused_above_max_logprobs(api: Api) -> None:
    limit = api.config["model"]["max_logprobs"]
    if limit == -1 or limit >= api.vocab_size:
        choice = api.choice(PARAMS | {"logprobs": -1}, logprobs_format="arrays")
        assert len(choice["logprobs"]["top_token_ids"][0]) == api.vocab_size
        return
    for name in ("logprobs", "prompt_logprobs"):
        for value in (-1, limit + 1):
            answer = api.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {name: value}})
            api.refused(answer, 400, f"sampling_params.{name}", "--max-logprobs")


def test_named_tokens_are_usable_alone(api: Api) -> None:
    params = PARAMS | {"logprobs": None, "logprob_token_ids": [40, 41, 42]}
    arrays = api.choice(params, logprobs_format="arrays")["logprobs"]
    assert arrays["top_token_ids"] == [[40, 41, 42]] * 10
    for e in api.choice(params)["logprobs"]["content"]:
        assert {t["token_id"] for t in e["top_logprobs"]} == {e["token_id"], 40, 41, 42}
    both = api.choice(params | {"logprobs": 3}, logprobs_format="arrays")["logprobs"]
    assert [row[:3] for row in both["top_token_ids"]] == api.choice(PARAMS, logprobs_format="arrays")["logprobs"][
        "top_token_ids"
    ]
    assert [row[3:] for row in both["top_logprobs"]] == arrays["top_logprobs"]


def test_top_logprobs_are_sorted_and_ranks_fit(api: Api) -> None:
    arrays = api.choice(PARAMS | {"logprobs": 20}, logprobs_format="arrays")["logprobs"]
    ids = api.choice(PARAMS)["token_ids"]
    rows = zip(ids, *(arrays[n] for n in ("token_logprobs", "ranks", "top_token_ids", "top_logprobs")), strict=True)
    for token, logprob, rank, tops, values in rows:
        assert values == sorted(values, reverse=True) and len(set(tops)) == len(tops) == min(20, api.vocab_size)
        assert rank == 1 + sum(value > logprob for value in values) or rank > 20
        if token in tops:
            assert values[tops.index(token)] == logprob


@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_every_mode_is_named_and_finite(api: Api, mode: str) -> None:
    arrays = api.choice(PARAMS | {"logprobs_mode": mode, "top_k": 5}, logprobs_format="arrays")["logprobs"]
    assert arrays["mode"] == mode
    assert all(math.isfinite(value) and value <= 0 for value in arrays["token_logprobs"])


def test_processed_logprobs_are_those_of_the_distribution_drawn_from(api: Api) -> None:
    params = PARAMS | {"allowed_token_ids": [40], "logprobs_mode": "processed"}
    assert api.choice(params, logprobs_format="arrays")["logprobs"]["token_logprobs"] == [0.0] * 10


# prompts


def test_prompt_logprobs_have_the_prompts_own_token_first_with_its_rank(api: Api) -> None:
    scored = api.generate({"prompt_logprobs": 2})["prompt_logprobs"]
    assert scored[0] is None and len(scored) == len(PROMPT)
    for token, entry in zip(PROMPT[1:], scored[1:], strict=True):
        assert next(iter(entry)) == str(token) and 2 <= len(entry) <= 3
        for value in entry.values():
            assert set(value) == {"logprob", "rank", "decoded_token"} and value["rank"] >= 1
            assert value["decoded_token"] is None and -9999.0 <= value["logprob"] <= 0.0


def test_prompt_logprobs_true_is_one_and_false_is_none(api: Api) -> None:
    params = {"prompt_logprobs": 1, "temperature": 0}
    expected = api.generate(params)["prompt_logprobs"]
    assert api.generate(params | {"prompt_logprobs": True})["prompt_logprobs"] == expected
    assert api.generate(params | {"prompt_logprobs": False})["prompt_logprobs"] is None


def test_prompt_logprobs_in_text_mode_name_their_tokens(text: Api) -> None:
    scored = text.generate({"prompt_logprobs": 0}, output_mode="text")["prompt_logprobs"]
    assert all(isinstance(value["decoded_token"], str) for entry in scored[1:] for value in entry.values())


def test_prompt_logprobs_formats_are_equal(api: Api) -> None:
    params = {"prompt_logprobs": 2, "max_tokens": 1}
    arrays = api.generate(params, logprobs_format="arrays")["prompt_logprobs"]
    in_base64 = api.generate(params, logprobs_format="base64")["prompt_logprobs"]
    assert arrays["start"] == in_base64["start"] == 1
    assert unpacked(in_base64) == {name: value for name, value in arrays.items() if name != "start"}
    scored = api.generate(params)["prompt_logprobs"]
    for i, token in enumerate(PROMPT[1:]):
        assert scored[i + 1][str(token)]["logprob"] == arrays["token_logprobs"][i]
        assert scored[i + 1][str(token)]["rank"] == arrays["ranks"][i]


def test_prompt_logprobs_cold_equal_warm(api: Api) -> None:
    prompt, salt = [40 + i % 7 for i in range(100)], uuid.uuid4().hex
    cold, warm = (api.generate({"prompt_logprobs": 3, "seed": 1}, token_ids=prompt, cache_salt=salt) for _ in range(2))
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["prompt_logprobs"] == warm["prompt_logprobs"] and len(warm["prompt_logprobs"]) == 100
    assert cold["choices"] == warm["choices"]


def test_prompt_logprobs_start_leaves_out_what_is_before(api: Api) -> None:
    prompt = [40 + i % 7 for i in range(60)]
    all_entries = api.generate({"prompt_logprobs": 1}, token_ids=prompt)["prompt_logprobs"]
    for start in (0, 1, 2, 17, 59):
        part = api.generate({"prompt_logprobs": 1, "prompt_logprobs_start": start}, token_ids=prompt)["prompt_logprobs"]
        first = max(1, start)
        assert part == [None] * first + all_entries[first:]
        params = {"prompt_logprobs": 1, "prompt_logprobs_start": start}
        arrays = api.generate(params, token_ids=prompt, logprobs_format="arrays")["prompt_logprobs"]
        assert arrays["start"] == first and len(arrays["token_logprobs"]) == 60 - first


def test_a_prompt_of_one_token_has_nothing_to_score(api: Api) -> None:
    assert api.generate({"prompt_logprobs": 1}, token_ids=[5])["prompt_logprobs"] == [None]


def test_rescoring_equals_decoding(api: Api) -> None:
    choice = api.choice(PARAMS | {"max_tokens": 40})
    tokens = choice["token_ids"]
    scored = api.generate({"prompt_logprobs": 0, "max_tokens": 1}, token_ids=PROMPT + tokens)["prompt_logprobs"]
    again = [scored[len(PROMPT) + i][str(token)] for i, token in enumerate(tokens)]
    decoded = choice["logprobs"]["content"]
    assert [(value["logprob"], value["rank"]) for value in again] == [(e["logprob"], e["rank"]) for e in decoded]
