"""A copy of the package without some of its folders, for processes that import it in the place of the installed one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import tokserve

PACKAGE = Path(tokserve.__file__).parent
# An editable installation finds its modules before PYTHONPATH is asked: in these processes it does not.
CUSTOMIZE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
"""
# A plugin for pytest: its tests are of the copy.
CHECK = """
from pathlib import Path

def pytest_sessionstart(session):
    import tokserve
    home = Path(__file__).parent
    assert Path(tokserve.__file__).is_relative_to(home), f"{tokserve.__file__} is not below {home}"
"""


def partial_package(place: Path, *absent: str) -> dict[str, str]:
    """Copy the package below `place`, but for the folders `absent` ("features/kv"); returns the environment of a
    process that imports it."""
    _link(PACKAGE, place / "tokserve", {PACKAGE / folder for folder in absent})
    for extension in _extensions():
        link = place / "tokserve" / extension.name
        if not link.exists():
            link.symlink_to(extension)
    (place / "sitecustomize.py").write_text(CUSTOMIZE)
    (place / "check_package.py").write_text(CHECK)
    return {**os.environ, "PYTHONPATH": str(place), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _link(source: Path, target: Path, absent: set[Path]) -> None:
    """Directories are made and files are links, so that a folder can be left out."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry in absent or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            _link(entry, target / entry.name, absent)
        elif entry.suffix == ".py":
            shutil.copyfile(entry, target / entry.name)  # a link would be resolved, and lead to the whole package
        else:
            (target / entry.name).symlink_to(entry)


def _extensions() -> list[Path]:
    """The compiled modules, wherever the installation has put them."""
    return [path for folder in tokserve.__path__ for path in Path(folder).glob("_C*.so")]
