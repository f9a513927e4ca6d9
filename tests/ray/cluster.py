"""A Ray cluster for tests: nodes with loopback addresses of their own, which are added, removed and killed by command.

`python -m tests.ray.cluster` prints the address, and then obeys lines of stdin: `add CPUS`, `kill INDEX`.  It ends the
cluster at the end of stdin.  Ray stays out of the test's own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil

OBJECT_STORE = 80 << 20  # bytes of each node: the least that Ray allows


class RayCluster:
    """`with RayCluster(1, 1) as cluster:` has a head without CPUs and two nodes with one each.  `address` is for
    RAY_ADDRESS.  Nodes are counted from 0, without the head; node i has the address 127.0.0.(i + 3)."""

    def __init__(self, *cpus: int) -> None:
        command = [sys.executable, "-m", "tests.ray.cluster"]
        self._mark = {"TOKSERVE_TEST_CLUSTER": str(os.getpid())}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | self._mark
        )
        try:
            self.address = self._answer()
            for count in cpus:
                self.add(count)
        except BaseException:
            self._process.kill()
            raise

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process that joins it."""
        return {"RAY_ADDRESS": self.address} | self._mark

    def has_started(self, process: psutil.Process) -> bool:
        """Whether a process is one of this cluster's, or of those that join it; other tests may run beside this one."""
        return self._mark.items() <= process.environ().items()

    def add(self, cpus: int) -> None:
        """Add a node."""
        self._command(f"add {cpus}")

    def kill(self, index: int) -> None:
        """Kill all processes of a node."""
        self._command(f"kill {index}")

    def _command(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        assert line, "the cluster has failed; its stderr says more"
        return line


def main() -> None:
    """The program."""
    from ray.cluster_utils import Cluster

    options: dict[str, Any] = {"object_store_memory": OBJECT_STORE, "include_dashboard": False}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is not an answer
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.2", **options})
    print(cluster.address, file=answers, flush=True)
    nodes: list[Any] = []
    for line in sys.stdin:
        word, _, number = line.partition(" ")
        if word == "add":
            address = f"127.0.0.{len(nodes) + 3}"
            nodes.append(cluster.add_node(num_cpus=int(number), node_ip_address=address, **options))
        else:
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        print("done", file=answers, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
