"""What `make test-bounds` runs: the server with each dependency at the lowest version that pyproject.toml admits.

The environment is build/bounds; it has a wheel of this tree, so that the compiled kernels are there, and a copy of the
tests without the tree's package beside them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "bounds"
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
# transformers 5.6.2, which is the oracle here, computes these differently from later versions
OTHERS = "not gemma2 and not granite4-no-rope"


def lowest() -> list[str]:
    """The dependencies, each pinned to its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [requirement.partition(",")[0].replace(">=", "==") for requirement in project["dependencies"]]


def run(*command: str | Path, where: Path = ROOT) -> None:
    """A command that has to succeed."""
    subprocess.run([str(part) for part in command], cwd=where, check=True)


def install() -> Path:
    """The environment, made anew; returns its interpreter."""
    shutil.rmtree(HOME, ignore_errors=True)
    wheels = HOME / "wheels"
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ".")
    run(sys.executable, "-m", "venv", HOME / "venv")
    python = HOME / "venv" / "bin" / "python"
    (wheel,) = wheels.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", wheel, *lowest(), *TESTING)
    return python


def main() -> None:
    """Install, show what was installed, and run the tests."""
    python = install()
    run(python, "-m", "pip", "list")
    tree = HOME / "tree"
    shutil.copytree(ROOT / "tests", tree / "tests")
    shutil.copy(ROOT / "pyproject.toml", tree)
    run(python, "-P", tree / "tests" / "wheel.py", where=tree)
    run(python, "-m", "pytest", "-q", "-W", "default", "-k", OTHERS, *TESTS, where=tree)


if __name__ == "__main__":
    main()
