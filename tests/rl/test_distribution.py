"""tokserve-client: built from this tree, installed by itself, and tested without torch and without the server."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tokserve
import tokserve.testing
from tests import needs
from tests.rl.script import reply

HERE = Path(__file__).parent
SOURCE = Path(tokserve.__file__).parent / "rl"
WITHOUT_SERVER = [
    "distribution.py",
    "scripted_http.py",
    "script.py",
    "test_client.py",
    "test_turns.py",
    "test_blocking.py",
    "test_scripted.py",
    "test_pools.py",
    "test_plain.py",
    "test_step_seeds.py",
    "test_trl_settings.py",
]


def declared() -> list[str]:
    """Names of the dependencies that pyproject.toml declares."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    return [Requirement(requirement).name for requirement in project["dependencies"]]


def with_dependencies(names: list[str]) -> set[str]:
    """Distributions that these need, themselves included."""
    todo, complete = list(names), set()
    while todo:
        name = todo.pop()
        if name not in complete:
            complete.add(name)
            for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    todo.append(requirement.name)
    return complete


def copy_distribution(name: str, site: Path) -> None:
    """The installed files of a distribution, linked."""
    for file in importlib.metadata.files(name) or ():
        if ".." not in file.parts and file.suffix != ".pyc" and (source := Path(str(file.locate()))).is_file():
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(source)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs.HATCHLING.or_skip()
    directory = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(directory)!r}))"
    before = sorted(SOURCE.iterdir())
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(SOURCE.iterdir()) == before, "the build leaves files in the tree"
    return directory / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of an environment with the wheel, its dependencies and pytest; offline."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False)
    python = root / "bin" / "python"
    site = next(root.glob("lib/python*/site-packages"))
    for name in with_dependencies([*declared(), "pytest", "pytest-timeout"]):
        copy_distribution(name, site)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    yield python
    shutil.rmtree(root)


@pytest.mark.slow
def test_the_wheel_is_of_the_servers_version_and_has_its_modules(wheel: Path) -> None:
    assert wheel.name == f"tokserve_client-{tokserve.__version__}-py3-none-any.whl"
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tokserve_client/")}
    assert names == {path.name for path in SOURCE.glob("*.py")} | {"py.typed"}


@pytest.mark.slow
def test_the_clients_tests_without_torch_and_without_the_server(environment: Path, tmp_path: Path) -> None:
    copies = tmp_path / "tests" / "rl"
    copies.mkdir(parents=True)
    for name in WITHOUT_SERVER:
        shutil.copy(HERE / name, copies)
    shutil.copy(HERE.parent / "waiting.py", copies.parent)
    for package in (copies, copies.parent):
        (package / "__init__.py").touch()
    absent = "import importlib.util as u; assert not u.find_spec('torch') and not u.find_spec('tokserve')"
    subprocess.run([environment, "-c", absent], cwd=tmp_path, check=True)
    marks = ["-o", "markers=slow: minutes"]  # pyproject.toml declares it elsewhere
    command = [environment, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *marks, str(copies)]
    with tokserve.testing.scripted_server(reply, tokens_only=True, max_num_seqs=16) as server:
        variables = {**os.environ, "TOKSERVE_TEST_URL": server.url, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_tensors_without_torch_are_refused_by_name(environment: Path) -> None:
    code = "\n".join(
        [
            "from tokserve_client import Client, TorchMissing",
            "with Client('http://127.0.0.1:9') as client:",
            "    try: client.push({})",
            "    except TorchMissing as error: print(error)",
        ]
    )
    done = subprocess.run([environment, "-c", code], capture_output=True, text=True, check=False)
    assert "torch is not installed" in done.stdout, done.stderr


def test_every_public_name_is_there_and_its_methods_say_what_they_do() -> None:
    rl = importlib.import_module("tokserve.rl")
    for name in rl.__all__:
        public = getattr(rl, name)
        if isinstance(public, type):
            methods = [method for key, method in vars(public).items() if not key.startswith("_") and callable(method)]
            assert public.__doc__ and all(method.__doc__ for method in methods), name
