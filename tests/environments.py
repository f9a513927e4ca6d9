"""Environments of programs that are tested with the server but do not belong to it, each made once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

# No hub, no telemetry, no GPU: what a program needs at run time it finds here.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def environment(requirements: Path, place: Path) -> Path:
    """The interpreter of an environment with these packages, made if it is not there or has others.  The file pins all
    of them: what they depend on is not looked up."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    python, mark = place / "bin" / "python", place / "requirements.sha256"
    if not (mark.exists() and mark.read_text() == digest):
        print(f"{requirements.stem}: installing", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        install = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r", str(requirements)]
        subprocess.run([str(python), "-m", "pip", *install], check=True, env={**os.environ, "PIP_NO_INPUT": "1"})
        mark.write_text(digest)
    return python


def npm_environment(packages: Path, place: Path) -> None:
    """Install the packages of a package.json, which pins them, in a directory that has them if it is not new."""
    digest = hashlib.sha256(packages.read_bytes()).hexdigest()
    mark = place / "packages.sha256"
    if mark.exists() and mark.read_text() == digest:
        return
    print(f"{place.name}: installing", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copy(packages, place)
    install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    subprocess.run(install, cwd=place, check=True)
    mark.write_text(digest)
