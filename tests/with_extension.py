"""Runs pytest with the C++ extension of another folder: `python tests/with_extension.py FOLDER [pytest arguments]`.

For the sanitizers' builds (`make test-asan`, `make test-tsan`), so that the one in use stays as it is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest


def use(folder: Path) -> None:
    """Make the extension in `folder` the one that `tokserve._C` names."""
    actual = list(folder.glob("_C.*.so"))
    if len(actual) != 1:
        sys.exit(f"{folder} holds {len(actual)} builds of the extension, not one")
    spec = importlib.util.spec_from_file_location("tokserve._C", actual[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import tokserve

    sys.modules["tokserve._C"] = tokserve._C = module  # type: ignore[attr-defined]


if __name__ == "__main__":
    os.environ["TOKSERVE_SANITIZED"] = "1"
    use(Path(sys.argv[1]))
    sys.exit(pytest.main(sys.argv[2:]))
