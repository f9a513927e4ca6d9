"""tokserve as a Ray Serve application that grows with its load.  Needs Ray (the extra `ray`).

    ray start --head
    python examples/ray_serve.py [MODEL] [--most 3]

The routes of `tokserve serve` are then at http://127.0.0.1:8000.  The same from a configuration file or the command
line: `serve run tokserve.ray.serve:build model=demo cpu_threads=2`.
"""

from __future__ import annotations

import argparse
import time


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="a directory that all nodes have. Default: demo.")
    parser.add_argument("--cpu-threads", type=int, default=1, help="CPUs of each replica. Default: 1.")
    parser.add_argument("--most", type=int, default=3, help="replicas at most. Default: 3.")
    parser.add_argument("--port", type=int, default=8000, help="of Serve's proxy. Default: 8000.")
    args = parser.parse_args()
    import ray
    from ray import serve

    from tokserve.ray.serve import build

    ray.init()  # RAY_ADDRESS, the cluster of this machine, or a new one
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    scaling = {"min_replicas": 1, "max_replicas": args.most, "target_ongoing_requests": 8}
    application = build(
        {
            "model": args.model,
            "cpu_threads": args.cpu_threads,
            "max_num_seqs": 16,
            "deployment": {"autoscaling_config": scaling},
        }
    )
    serve.run(application)
    print(f"serving on http://127.0.0.1:{args.port}; Ctrl-C ends it", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
