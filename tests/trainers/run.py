"""`make test-trainers`: the recipes of examples/trainers that run without CUDA, each in an environment of its own.

Environments are made under build/trainers/NAME from tests/trainers/NAME.txt (pinned) and kept until that file changes.
Each recipe runs as its README says, for fewer steps, against a server of its own.  It has to learn: the mean reward of
the last steps is above that of the first ones by a margin; and the difference between the server's logprobs and the
trainer's is within the recipe's bound at every step.  Recipes that cannot run here are replayed by test_replay.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.e2e.server import Server
from tests.environments import OFFLINE, environment
from tokserve.checkpoint import DEMO_DIR

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "trainers"
EXAMPLES = ROOT / "examples" / "trainers"
SECONDS = 900.0
WINDOW = 5  # steps at the beginning and at the end that are compared


INSTALLED_AS_TOLD = ("trl", "trl_async", "verifiers")  # recipes whose environment has what the README's line installs
NOT_TOLD = ("peft", "aiohttp")  # and what these need: for the pieces' tests, and for another recipe


@dataclass(frozen=True)
class Recipe:
    """How a recipe is run, and what has to come of it."""

    folder: str
    environment: str | None  # None: this project's, which has the compiled ops
    arguments: tuple[str, ...] = ()
    server: tuple[str, ...] = ("--dtype", "float32")
    gain: float = 0.06  # of the mean reward
    mismatch: float | None = 1e-3  # largest difference of a logprob at any step; None: not measured
    packages: str | None = None  # an environment whose packages this project's interpreter finds after its own
    repeats: bool = False  # whether the next run is the same one: all that is logged of its steps but their seconds
    proxies: bool = True  # whether the environment names some, which our clients do not use for this machine


RECIPES = {
    "trl": Recipe("trl", "trl", ("--steps", "30"), repeats=True),
    "trl_lora": Recipe("trl", "trl", ("--steps", "45", "--lora"), repeats=True),
    "trl_rollout_function": Recipe("trl", "trl", ("--steps", "30", "--rollout-function"), mismatch=None, repeats=True),
    "trl_exact": Recipe(
        "trl", None, ("--steps", "40", "--exact"), ("--dtype", "bfloat16"), mismatch=0.0, packages="trl", repeats=True
    ),
    "trl_async": Recipe(
        "trl_async",
        "trl",
        ("--steps", "80"),
        ("--rl", "--dtype", "float32", "--served-model-name", str(DEMO_DIR)),
        gain=0.05,
        mismatch=None,
    ),
    "verifiers": Recipe(
        "verifiers", "verifiers", ("--steps", "25"), ("--rl", "--dtype", "float32"), proxies=False
    ),  # its own HTTP client would need a package for them
    "own_loop": Recipe("own_loop", None, ("--steps", "25"), (), mismatch=0.0, repeats=True),
    "own_loop_transformers": Recipe("own_loop", "trl", ("--steps", "25", "--transformers"), repeats=True),
}
PIECES, SHARDED = (
    ("trl_pieces", "trl_runs"),
    "trl_fsdp",
)  # programs that check the pieces for TRL, beyond what the recipes use
NOWHERE = {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}  # not for this machine


def install_line(readme: Path) -> list[Requirement]:
    """What the recipe's README tells a reader to install."""
    line = re.search(r"`pip install ([^`]+)`", readme.read_text())
    assert line is not None, f"{readme} has no line to install what it needs"
    return [Requirement(word) for word in shlex.split(line[1])]


def pins(requirements: Path) -> dict[str, str]:
    """The versions that an environment is made of, by canonical name."""
    pinned = [line.split("==") for line in requirements.read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, version in pinned}


def install_faults(name: str) -> list[str]:
    """What the recipe's environment has that its README's line would not install."""
    recipe = RECIPES[name]
    python = BUILD / str(recipe.environment) / "bin" / "python"
    listed = [requirement.name for requirement in install_line(EXAMPLES / recipe.folder / "README.md")]
    command = [str(python), str(HERE / "closure.py"), str(EXAMPLES / recipe.folder / "train.py")]
    installed, others = (
        set(subprocess.run([*command, *names], capture_output=True, text=True, check=True).stdout.splitlines())
        for names in (listed, [name for name in NOT_TOLD if name not in listed])
    )
    missing = pins(HERE / f"{recipe.environment}.txt").keys() - installed - others
    missing |= {line.removeprefix("import ") for line in installed if line.startswith("import ")}
    return [f"the README does not install {' '.join(sorted(missing))}"] if missing else []


def figures(log: Path) -> list[dict[str, Any]]:
    """What a recipe wrote, a dictionary per step."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def verdict(recipe: Recipe, steps: list[dict[str, Any]]) -> tuple[list[str], str]:
    """(what is wrong, a line of figures) of a run."""
    if len(steps) < 2 * WINDOW:
        return [f"only {len(steps)} steps"], ""
    first, last = (mean(step["reward"] for step in part) for part in (steps[:WINDOW], steps[-WINDOW:]))
    seconds = mean(step["seconds"] for step in steps[1:])
    line = f"reward {first:.3f} -> {last:.3f}, {seconds:.2f} s a step"
    wrong = [] if last - first >= recipe.gain else [f"the reward rose by {last - first:.3f}, not {recipe.gain}"]
    if recipe.mismatch is not None:
        largest = max(step["mismatch"] for step in steps)
        line += f", largest difference of a logprob {largest:.1e}"
        if not largest <= recipe.mismatch:
            wrong.append(f"logprobs differ by {largest}, more than {recipe.mismatch}")
    return wrong, line


def interpreter(recipe: Recipe) -> list[str]:
    """The beginning of a recipe's command."""
    if recipe.environment is not None:
        return [str(environment(HERE / f"{recipe.environment}.txt", BUILD / recipe.environment))]
    if recipe.packages is None:
        return [sys.executable]
    python = environment(HERE / f"{recipe.packages}.txt", BUILD / recipe.packages)
    packages = next(python.parents[1].glob("lib/python*/site-packages"))
    return [sys.executable, str(HERE / "with_packages.py"), str(packages)]


def rerun_difference(first: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[str]:
    """What differs between the steps of two runs of the same code: nothing may but the seconds."""
    for before, after in zip(first, again, strict=False):
        if before | {"seconds": 0.0} != after | {"seconds": 0.0}:
            return [f"the next run differs in step {before['step']}: {before} and {after}"]
    return [] if len(again) >= WINDOW else [f"the next run has {len(again)} steps"]


def attempt(name: str, log: Path, arguments: tuple[str, ...] = ()) -> str | None:
    """Run a recipe once, for the figures in `log`; what went wrong.  `arguments` replace earlier ones."""
    recipe = RECIPES[name]
    command = interpreter(recipe)
    log.unlink(missing_ok=True)
    with Server("demo", *recipe.server) as server:
        command += [str(EXAMPLES / recipe.folder / "train.py"), "--url", server.url, "--log", str(log)]
        proxies = NOWHERE if recipe.proxies else {}
        env = {**os.environ, **OFFLINE, **proxies, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # a small model
        try:
            done = subprocess.run(
                [*command, "--model", str(DEMO_DIR), *recipe.arguments, *arguments],
                env=env,
                cwd=BUILD,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"no end after {SECONDS:.0f} s"
        well = server.get("/health?deep=1").status_code == 200
    if done.returncode or not well:
        return f"\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}" + ("" if well else "\nthe server failed")
    return None


def run(name: str) -> bool:
    """Run a recipe, and where it `repeats` its beginning once more; whether it passed."""
    recipe, log, began = RECIPES[name], BUILD / f"{name}.jsonl", time.monotonic()
    failure = attempt(name, log)
    if failure is not None:
        print(f"{name}: FAILED, {failure}")
        return False
    wrong, line = verdict(recipe, figures(log))
    wrong += install_faults(name) if name in INSTALLED_AS_TOLD else []
    if recipe.repeats and not wrong:
        again = BUILD / f"{name}_again.jsonl"
        failure = attempt(name, again, ("--steps", str(WINDOW)))
        wrong = [failure] if failure is not None else rerun_difference(figures(log), figures(again))
    print(
        f"{name}: {'FAILED: ' + '; '.join(wrong) if wrong else 'passed'} ({line}) in {time.monotonic() - began:.0f} s"
    )
    return not wrong


def run_pieces(name: str) -> bool:
    """Run one of `PIECES`; whether it passed."""
    python = environment(HERE / "trl.txt", BUILD / "trl")
    with Server("demo", "--dtype", "float32", "--admin-api-key", "k", "--enable-lora") as server:
        command = [str(python), str(HERE / f"{name}.py"), server.url, str(DEMO_DIR), "k"]
        env = {**os.environ, **OFFLINE, **NOWHERE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    print(f"{name}: {'passed' if not done.returncode else 'FAILED' + chr(10) + done.stderr[-4000:]}", flush=True)
    return not done.returncode


def run_sharded() -> bool:
    """TRL's server mode with FSDP1 in two processes; whether it passed."""
    python = environment(HERE / "trl.txt", BUILD / "trl")
    env = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Server("demo", "--dtype", "float32") as server:
        script = [str(HERE / "trl_fsdp.py"), server.url, str(DEMO_DIR)]
        done = subprocess.run([*command, *script], env=env, capture_output=True, text=True, timeout=SECONDS)
    print(f"{SHARDED}: {'passed' if not done.returncode else 'FAILED' + chr(10) + done.stderr[-4000:]}", flush=True)
    return not done.returncode


PROGRAMS: dict[str, Callable[[], bool]] = {name: partial(run_pieces, name) for name in PIECES} | {SHARDED: run_sharded}


def main() -> int:
    """All recipes, or those that are named."""
    parser = argparse.ArgumentParser(description="Run the recipes of examples/trainers.")
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*RECIPES, *PROGRAMS, []],
        metavar="RECIPE",
        help=f"Of {', '.join([*RECIPES, *PROGRAMS])}. Default: all.",
    )
    names = parser.parse_args().names or [*RECIPES, *PROGRAMS]
    BUILD.mkdir(parents=True, exist_ok=True)
    failed = [name for name in names if not (PROGRAMS[name]() if name in PROGRAMS else run(name))]
    print(f"{len(names) - len(failed)} of {len(names)} recipes passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
