"""`LoRARequest`: what must be loaded before a request is sent, so that an adapter is never a stale one (F4)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tokserve.base.errors import RequestError
from tokserve.features.lora.lora_requests import AdapterLoads, each_adapter
from tokserve.protocol.adapter_choice import LoRARequest
from tokserve.protocol.messages import LoadedAdapter, Status


class Engine:
    """Loads adapters as an engine does: one for each name, with a number for each load."""

    def __init__(self) -> None:
        self.adapters: dict[str, LoadedAdapter] = {}
        self.loads: list[tuple[str, str]] = []

    async def load(self, name: str, path: str) -> None:
        await asyncio.sleep(0)
        self.loads.append((name, path))
        self.adapters[name] = LoadedAdapter(name, path, len(self.loads))

    async def status(self) -> Status:
        return Status(adapters=list(self.adapters.values()))


def write(directory: Path, text: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / name).write_text(text)
        os.utime(directory / name, ns=(len(text), len(text)))
    return directory


def ensure(loads: AdapterLoads, *args: Any, **options: Any) -> bool:
    return asyncio.run(loads.ensure(LoRARequest(*args, **options)))


def test_another_number_another_path_or_other_files_are_another_adapter(tmp_path: Path) -> None:
    engine = Engine()
    loads = AdapterLoads(engine.load, engine.status)
    first, second = write(tmp_path / "a", "1"), write(tmp_path / "b", "1")
    assert ensure(loads, "p", 1, first) and not ensure(loads, "p", 1, str(first))
    assert ensure(loads, "p", 2, first) and not ensure(loads, "p", 2, first)
    assert ensure(loads, "p", 2, second) and not ensure(loads, "p", 2, second)
    write(second, "changed")
    assert ensure(loads, "p", 2, second) and not ensure(loads, "p", 2, second)
    assert ensure(loads, "p", 2, second, load_inplace=True)
    assert ensure(loads, "q", 2, second)
    assert [path for _, path in engine.loads] == [str(first)] * 2 + [str(second)] * 4


def test_what_somebody_else_has_loaded_is_loaded_again(tmp_path: Path) -> None:
    engine = Engine()
    loads, directory = AdapterLoads(engine.load, engine.status), write(tmp_path / "a", "1")
    asyncio.run(engine.load("p", str(directory)))
    assert ensure(loads, "p", 1, directory) and not ensure(loads, "p", 1, directory)
    asyncio.run(engine.load("p", str(directory)))
    assert ensure(loads, "p", 1, directory)
    del engine.adapters["p"]
    assert ensure(loads, "p", 1, directory)


def test_files_of_another_machine_are_loaded_when_the_request_says_something_new() -> None:
    engine = Engine()
    loads = AdapterLoads(engine.load, engine.status)
    asyncio.run(engine.load("p", "/nowhere"))
    assert not ensure(loads, "p", 1, "/nowhere") and ensure(loads, "p", 1, "/elsewhere")
    assert not ensure(loads, "p", 1, "/elsewhere") and ensure(loads, "p", 2, "/elsewhere")


def test_requests_at_the_same_time_load_an_adapter_once(tmp_path: Path) -> None:
    engine = Engine()
    directory = write(tmp_path / "a", "1")

    async def both() -> list[bool]:
        loads = AdapterLoads(engine.load, engine.status)
        return await asyncio.gather(*(loads.ensure(LoRARequest("p", 1, directory)) for _ in range(2)))

    assert asyncio.run(both()) == [True, False] and len(engine.loads) == 1


def test_two_adapters_under_one_name_are_refused_in_one_call() -> None:
    with pytest.raises(
        RequestError, match="two adapters have the name 'a': number 1 in /a and number 2 in /b"
    ) as caught:
        each_adapter([LoRARequest("a", 1, "/a"), LoRARequest("a", 2, "/b")], 2)
    assert caught.value.field == "lora_request"
    with pytest.raises(RequestError, match="two adapters have the name 'a'"):
        each_adapter([LoRARequest("a", 1, "/a"), LoRARequest("a", 2, "/a")], 2)
    same = [LoRARequest("a", 1, "/a"), LoRARequest("a", 1, Path("/a")), "a", None, LoRARequest("b", 2, "/b")]
    assert each_adapter(same, 5) == same


def test_vllms_names_and_order_of_arguments() -> None:
    request = LoRARequest("a", 3, "/a", "base", True)
    assert (request.name, request.adapter_id, request.path, request.load_inplace) == ("a", 3, "/a", True)
