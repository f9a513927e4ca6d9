"""A Ray Serve application for tests: `python -m tests.ray.serving PORT ARGS`, where ARGS is JSON for `build`.

Prints "ready", and then for each line of stdin the number of running replicas; ends the application at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import httpx

from tests.ray.cluster import RayCluster


class Application:
    """`with Application(cluster, port, {"model": "demo", "cpu_threads": 1}) as app: app.replicas()`."""

    def __init__(self, cluster: RayCluster, port: int, args: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.ray.serving", str(port), json.dumps(args)]
        pipe = subprocess.PIPE
        env = {**os.environ, **cluster.env}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Application:
        try:
            assert self._answer() == "ready"
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()

    def replicas(self) -> int:
        """How many replicas run."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._answer())

    def until(self, count: int, seconds: float) -> None:
        """Wait until so many replicas run."""
        end = time.monotonic() + seconds
        while (running := self.replicas()) != count:
            assert time.monotonic() < end, f"{running} replicas after {seconds:g} s"
            time.sleep(0.5)

    def post(self, path: str, body: Any) -> httpx.Response:
        """POST JSON."""
        return httpx.post(self.url + path, json=body, timeout=120)

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        assert line, "the application has failed; its stderr says more"
        return line


def main() -> None:
    """The program."""
    port, args = int(sys.argv[1]), json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is not an answer
    import ray
    from ray import serve

    from tokserve.ray.serve import DEPLOYMENT, build

    ray.init(address=os.environ["RAY_ADDRESS"])
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(args))
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        deployment = serve.status().applications["default"].deployments[DEPLOYMENT]
        print(deployment.replica_states.get("RUNNING", 0), file=answers, flush=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
