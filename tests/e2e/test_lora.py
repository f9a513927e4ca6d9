"""Adapters through a real engine: requests of several in one batch, each as it is alone.  Only `==`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import write_adapter
from tests.e2e.test_exact import columns
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, LoRARequest, SamplingParams
from tokserve.base.errors import Conflict, NotFound, RequestError
from tokserve.client.results import RequestOutput

pytestmark = pytest.mark.usefixtures("engine_threads")

PROMPTS = [[*range(5, 40)], [7, 8, 9], [*range(5, 40)], [*range(5, 40), 3]]
PARAMS = SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=1, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config("qwen3", dtype="bfloat16"), seed=1)


@pytest.fixture(scope="module")
def paths(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(root / name, base, rank=3 + 4 * number, seed=number))
        for number, name in enumerate("abc")
    }


@pytest.fixture(scope="module")
def llm(base: Path, paths: dict[str, str]) -> Iterator[LLM]:
    options: dict[str, Any] = {"tokens_only": True, "max_model_len": 256, "max_num_batched_tokens": 37}
    with LLM(
        base, enable_lora=True, max_loras=3, lora_eviction="none", lora_modules=[f"a={paths['a']}"], depth=2, **options
    ) as engine:
        yield engine


def outcome(output: RequestOutput) -> Any:
    return [(c.token_ids, columns(c.logprobs)) for c in output.outputs], columns(output.prompt_logprobs)


def test_a_batch_of_several_adapters_and_none(llm: LLM, paths: dict[str, str]) -> None:
    llm.load_lora_adapter("b", paths["b"])
    requests = ["a", None, LoRARequest("c", 3, paths["c"]), "b", None, "a", "b", "c"]  # c is loaded by this
    prompts = [PROMPTS[i % 4] for i in range(8)]
    params = [
        SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=1, seed=i, n=1 + i % 2, ignore_eos=True)
        for i in range(8)
    ]
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    assert llm.list_loras() == paths
    for number, output in enumerate(together):
        name = requests[number]
        alone = llm.generate([prompts[number]], [params[number]], use_tqdm=False, lora_request=name)[0]
        assert outcome(alone) == outcome(output)
        label = name.lora_name if isinstance(name, LoRARequest) else name
        version = output.outputs[0].weight_versions[0][0]
        assert version == "0" if label is None else version.startswith(f"0+{label}@")
    llm.call("check")


def test_no_prefix_is_shared_between_adapters_or_generations(llm: LLM, paths: dict[str, str]) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    prompt = [*range(50, 90)]

    def cached(adapter: str | None) -> tuple[int, list[int]]:
        output = llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)[0]
        return output.num_cached_tokens, output.outputs[0].token_ids

    first = {name: cached(name) for name in (None, "a")}
    assert [hits for hits, _ in first.values()] == [0, 0] and first[None][1] != first["a"][1]
    assert all(cached(name)[0] >= 32 and cached(name)[1] == tokens for name, (_, tokens) in first.items())
    llm.load_lora_adapter("a", paths["b"])
    replaced = cached("a")
    assert replaced[0] == 0 and replaced[1] != first["a"][1]
    llm.load_lora_adapter("a", paths["a"])
    assert cached("a") == (0, first["a"][1]) and cached(None)[0] >= 32


def test_what_is_not_there_is_refused_and_nothing_is_served(llm: LLM, paths: dict[str, str]) -> None:
    with pytest.raises(NotFound) as unknown:
        llm.generate([PROMPTS[0], PROMPTS[1]], PARAMS, use_tqdm=False, lora_request=["a", "nobody"])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(RequestError, match="2 prompts and 1 lora requests"):
        llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False, lora_request=["a"])
    with pytest.raises(RequestError) as wrong:
        llm.load_lora_adapter("a", str(Path(paths["a"]).parent))
    assert wrong.value.field == "lora_path"
    for name in set(paths) - set(llm.list_loras()):
        llm.load_lora_adapter(name, paths[name])
    with pytest.raises(Conflict):
        llm.load_lora_adapter("d", paths["a"])
    llm.unload_lora_adapter("c")
    with pytest.raises(NotFound):
        llm.unload_lora_adapter("c")
    assert sorted(llm.list_loras()) == ["a", "b"]
    llm.call("check")


def test_an_adapter_saved_again_in_its_directory_is_never_a_stale_one(
    llm: LLM, base: Path, paths: dict[str, str], tmp_path: Path
) -> None:
    """rl-faults F4: a trainer saves to one directory, and counts the number up or does not."""
    for name in set(llm.list_loras()):
        llm.unload_lora_adapter(name)

    def served(number: int, lora_path: Path | str, prompts: int = 1) -> list[list[int]]:
        request = LoRARequest("p", number, lora_path)
        outputs = llm.generate(PROMPTS[:prompts], PARAMS, use_tqdm=False, lora_request=request)
        return [output.outputs[0].token_ids for output in outputs]

    first, second = served(1, paths["a"]), served(2, paths["b"])
    assert first != second
    directory = tmp_path / "p"
    write_adapter(directory, base, rank=3, seed=0)  # as paths["a"]
    assert served(3, directory) == first
    write_adapter(directory, base, rank=7, seed=1)  # as paths["b"]
    assert served(4, directory) == second
    write_adapter(directory, base, rank=3, seed=0)
    assert served(4, directory) == first
    write_adapter(directory, base, rank=7, seed=1)
    asked_once = llm.list_loras()
    assert served(4, directory) == second and llm.list_loras() == asked_once == {"p": str(directory)}
    both = [LoRARequest("p", 1, paths["a"]), LoRARequest("p", 2, paths["b"])]
    with pytest.raises(RequestError, match="two adapters have the name 'p'"):
        llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False, lora_request=both)
    assert served(1, paths["a"], 2)[:1] == first
