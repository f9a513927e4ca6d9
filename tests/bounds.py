"""What `make test-bounds` and `make test-newest` run: the server with each dependency at the lowest version that
pyproject.toml admits, or at the newest that exists.

The environment is build/lowest or build/newest; it has a wheel of this tree, so that the compiled kernels are there,
and a copy of the tests without the tree's package beside them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTING = (
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-rerunfailures>=15",
    "scipy>=1.13",
    "hypothesis>=6.100",
    "peft",
    "openai",
)
TESTS = (
    "tests/rl",
    "tests/server/test_tokens.py",
    "tests/server/test_chat.py",
    "tests/server/test_openapi.py",
    "tests/models/test_parity.py",
    "tests/runner/test_weight_sync.py",
    "tests/e2e/test_tokens.py",
    "tests/e2e/test_structured.py",
    "tests/e2e/test_rl_client.py",
    "tests/testing",
    "tests/hf",
    "tests/client/test_sampling_params.py",
)
# transformers 5.6.2, the oracle at the lower bound, computes these differently from later versions
ORACLE_DIFFERS = "not gemma2 and not granite4-no-rope"


def requirements(end: str) -> list[str]:
    """The dependencies, each pinned to its lower bound ("lowest") or as pyproject.toml has them ("newest")."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if end == "newest":
        return list(project["dependencies"])
    return [requirement.partition(",")[0].replace(">=", "==") for requirement in project["dependencies"]]


def run(*command: str | Path, where: Path = ROOT) -> None:
    """A command that has to succeed."""
    subprocess.run([str(part) for part in command], cwd=where, check=True)


def install(home: Path, end: str) -> Path:
    """Make the environment anew; return its interpreter."""
    shutil.rmtree(home, ignore_errors=True)
    wheels = home / "wheels"
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ".")
    run(sys.executable, "-m", "venv", home / "venv")
    python = home / "venv" / "bin" / "python"
    (wheel,) = wheels.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", wheel, *requirements(end), *TESTING)
    return python


def main(end: str) -> None:
    """Install, show what was installed, and run the tests."""
    home = ROOT / "build" / end
    python = install(home, end)
    run(python, "-m", "pip", "list")
    tree = home / "tree"
    shutil.copytree(ROOT / "tests", tree / "tests")
    shutil.copy(ROOT / "pyproject.toml", tree)
    run(python, "-P", tree / "tests" / "wheel.py", where=tree)
    run(
        python,
        "-m",
        "pytest",
        "-q",
        "-W",
        "default",
        *(["-k", ORACLE_DIFFERS] if end == "lowest" else []),
        *TESTS,
        where=tree,
    )


if __name__ == "__main__":
    if sys.argv[1:] not in (["lowest"], ["newest"]):
        sys.exit("usage: python -m tests.bounds lowest|newest")
    main(sys.argv[1])
