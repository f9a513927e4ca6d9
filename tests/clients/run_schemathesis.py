"""schemathesis over /openapi.json: whatever the schema allows, and what it does not, the answer is never a 5xx, and its
status, its media type and its body are documented.

Routes that change the server for everybody (aborts, pauses, weights) come last: it may sleep ever after.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from report import Report

CONTROL = r"abort|pause|resume|sleep|wake|reset|update|weight|init_|collective|world_size|release|continue"
EXAMPLES = 40
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


def main() -> None:
    report = Report()
    passed = 0
    for which, share in (("--exclude-path-regex", False), ("--include-path-regex", True)):
        routes = [path for path in report.paths if bool(re.search(CONTROL, path)) is share]
        passed += run(report, f"{len(routes)} {'control' if share else 'other'} routes", which)
    report.done("schemathesis", "hypothesis", passed=passed)


def run(report: Report, what: str, which: str) -> int:
    """How many requests to some of the routes passed the checks, which must be all.

    One worker: in several threads, Python 3.11's ast.parse, which hypothesis calls, raises SystemError.
    """
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        "run",
        f"{report.url}/openapi.json",
        "--checks",
        ",".join(CHECKS),
        which,
        CONTROL,
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        "1",
        "--phases",
        "examples,coverage,fuzzing",
        "--mode",
        "all",
        "--workers",
        "1",
        "--request-timeout",
        "240",
        "--generation-database",
        "none",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-8000:])
    if done.returncode:
        print(done.stderr[-2000:])
    report.check(f"only documented replies, and no 5xx, from {what}", done.returncode == 0)
    sent = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    report.check("all passed", sent and sent[1] == sent[2])
    return int(sent[1]) if sent else 0


if __name__ == "__main__":
    main()
