"""Run a script with the packages of another environment behind our own: `with_packages.py FOLDER SCRIPT ARGUMENTS`."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    sys.path.append(folder)
    runpy.run_path(script, run_name="__main__")
