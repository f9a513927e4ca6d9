"""`make install` and `make serve` with a pip that only writes down its words, and the build without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).parent.parent.parent
PIP = """\
printf '%s\\n' "$*" >> {log}
case "$TOKSERVE_NATIVE $*" in
  *OFF*) ;;
  *"-e ."*) mkdir -p {packages}/tokserve && : > {packages}/tokserve/_C.so;;
esac
"""
BUILD, SERVING, TESTS = "-e .", "tokserve[bench]", "tokserve[dev]"


class Checkout:
    """The Makefile and what it depends on, in a directory with an environment whose programs are scripts."""

    def __init__(self, directory: Path, *, compiler: bool = True) -> None:
        self.directory = directory
        for name in ("Makefile", "constraints.txt", "pyproject.toml", "CMakeLists.txt"):
            shutil.copy(ROOT / name, directory)
        self.packages = directory / ".venv/lib/python3.11/site-packages"
        self.calls = directory / "calls"
        log = f"printf 'serve %s\\n' \"$*\" >> {self.calls}"
        self._program(".venv/bin/pip", PIP.format(log=self.calls, packages=self.packages))
        self._program(".venv/bin/tokserve", log)
        self._program(".venv/bin/python", "")
        self._program("bin/python3", f'exec {sys.executable} "$@"')
        for name in ("touch", "mkdir"):
            (directory / "bin" / name).symlink_to(str(shutil.which(name)))
        if compiler:
            self.add_compiler()

    def _program(self, name: str, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def add_compiler(self) -> None:
        self._program("bin/c++", "")

    def make(self, *words: str) -> tuple[int, str, list[str]]:
        """Exit code, output, and the command lines of pip and tokserve."""
        self.calls.unlink(missing_ok=True)
        kept = {
            name: value for name, value in os.environ.items() if name not in ("TOKSERVE_NATIVE", "CXX", "MAKEFLAGS")
        }
        done = subprocess.run(
            [str(shutil.which("make")), *words],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=600,
            env=kept | {"PATH": str(self.directory / "bin")},
        )
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return done.returncode, done.stdout + done.stderr, calls


@needs.MAKE.skips()
@pytest.mark.parametrize("goal", ["install", "serve", "test"])
def test_without_a_compiler_nothing_is_installed_and_the_remedy_is_named(tmp_path: Path, goal: str) -> None:
    checkout = Checkout(tmp_path, compiler=False)
    code, output, calls = checkout.make(goal)
    assert code and not calls
    assert f"no C++ compiler: apt-get install g++; or make TOKSERVE_NATIVE=OFF {goal}" in output
    checkout.add_compiler()
    code, output, calls = checkout.make("install")
    assert code == 0 and [TESTS in call for call in calls] == [False, False, True], output


@needs.MAKE.skips()
def test_the_references_are_an_explicit_choice_and_a_compiler_later_builds(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, compiler=False)
    code, output, calls = checkout.make("TOKSERVE_NATIVE=OFF", "install")
    assert code == 0 and len(calls) == 3, output
    assert checkout.make("TOKSERVE_NATIVE=OFF", "install")[2] == []
    code, output, calls = checkout.make("install")
    assert code and not calls and "no C++ compiler" in output
    checkout.add_compiler()
    assert BUILD in checkout.make("install")[2][0]
    assert checkout.make("install")[2] == []


@needs.MAKE.skips()
def test_serve_installs_what_serving_needs_and_tells_its_steps(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    code, output, calls = checkout.make("serve", "PORT=8123")
    assert code == 0 and BUILD in calls[0] and SERVING in calls[1] and len(calls) == 3, calls
    assert calls[2] == "serve serve demo --port 8123"
    assert [line[:3] for line in output.splitlines() if line[1:2] == "/"] == ["1/3", "2/3", "3/3"]
    assert [call.split()[0] for call in checkout.make("serve")[2]] == ["serve"]
    code, output, calls = checkout.make("install")
    assert code == 0 and len(calls) == 1 and TESTS in calls[0], "it was built for serving"
    assert [call.split()[0] for call in checkout.make("serve")[2]] == ["serve"]


@needs.MAKE.skips()
def test_an_environment_with_the_stamp_of_tests_only_serves_as_it_is(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.make("install")[0] == 0
    (tmp_path / ".venv/.serve").unlink()
    assert checkout.make("install")[2] == []
    assert [call.split()[0] for call in checkout.make("serve")[2]] == ["serve"]


@needs.MAKE.skips()
def test_versions_are_chosen_only_where_no_torch_is_installed(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert "--constraint constraints.txt" in checkout.make("serve")[2][1]
    torch = checkout.packages / "torch/version.py"
    torch.parent.mkdir()
    torch.touch()
    (tmp_path / ".venv/.serve").unlink()
    assert all("constraint" not in call for call in checkout.make("install")[2])


@needs.CMAKE.skips()
def test_the_build_fails_without_a_compiler_and_looks_for_it_again(tmp_path: Path) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "build"
    programs.mkdir()
    for name in ("cmake", "ninja"):
        (programs / name).symlink_to(os.path.realpath(str(shutil.which(name))))
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}

    def configure(option: str) -> tuple[int, str]:
        command = [str(programs / "cmake"), "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), option]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=kept | {"PATH": str(programs)})
        return done.returncode, done.stdout + done.stderr

    for _ in range(2):  # nothing is remembered of the first time
        code, output = configure("-DTOKSERVE_NATIVE=ON")
        assert code and "no C++ compiler" in output and "TOKSERVE_NATIVE=OFF" in output, output
        assert "Looking for a CXX compiler" in output
    assert configure("-DTOKSERVE_NATIVE=OFF")[0] == 0
