"""Plot the logs of recipes, a line each: python plot.py A.jsonl B.jsonl OUT.png (needs matplotlib)."""

import json
import sys
from pathlib import Path

FLOOR = 1e-9  # where a difference of 0.0 is drawn on the logarithmic scale


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    import matplotlib.pyplot as plt

    *logs, out = map(Path, sys.argv[1:])
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.2), layout="constrained")
    for log in logs:
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        axes[0].plot([step["reward"] for step in steps], label=log.stem)
        if steps[0]["mismatch"] is not None:
            axes[1].semilogy([max(step["mismatch"], FLOOR) for step in steps], ".-", label=log.stem)
        axes[2].plot([step["seconds"] for step in steps][1:], label=log.stem)
    for axis, label in zip(axes, ("mean reward", "max |server - trainer| logprob", "seconds per step"), strict=True):
        axis.set(xlabel="step", ylabel=label)
    axes[0].legend()
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    main()
