"""A data set of prompts through engines on a Ray cluster, with a progress bar.  Needs Ray (the extra `ray`).

    python examples/ray_data_batch.py prompts.jsonl outputs [--model demo] [--replicas 2]

Each line of the input is an object with `prompt` (text) or `token_ids`, and whatever else it has is kept.
"""

from __future__ import annotations

import argparse


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="JSON lines")
    parser.add_argument("output", help="a directory for JSON lines")
    parser.add_argument("--model", default="demo", help="a directory that all nodes have. Default: demo.")
    parser.add_argument("--replicas", type=int, default=1, help="engines. Default: 1.")
    parser.add_argument("--cpu-threads", type=int, default=1, help="CPUs of each. Default: 1.")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each output. Default: 64.")
    args = parser.parse_args()
    import ray

    from tokserve.ray.batch import generate

    ray.init()  # RAY_ADDRESS, the cluster of this machine, or a new one
    params = {"max_tokens": args.max_tokens, "temperature": 0.7, "seed": 1, "logprobs": 0}
    outputs = generate(
        ray.data.read_json(args.input, lines=True),
        args.model,
        params,
        replicas=args.replicas,
        cpu_threads=args.cpu_threads,
    )
    outputs.write_json(args.output)


if __name__ == "__main__":
    main()
