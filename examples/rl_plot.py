"""Plot what rl_loop.py printed: python examples/rl_plot.py log rl_loop.png (needs matplotlib).

With --speculate the log has two runs, and the plot shows the engine's steps of both.  A second log, of a run with
--sticky-seeds, adds its own: python examples/rl_plot.py log rl_speculation.png sticky_log
"""

import re
import sys
from pathlib import Path

ROW = r"reward ([\d.]+)  mean .logprob difference. (\S+)  loss \S+  (\d+) engine steps"


def runs(log: str) -> list[list[tuple[float, float, int]]]:
    """Reward, difference and engine steps of each step, by run."""
    parts = Path(log).read_text().split(" -> ")  # a run ends with its summary
    parsed = [[(float(r), float(d), int(s)) for r, d, s in re.findall(ROW, part)] for part in parts]
    return [rows for rows in parsed if rows]


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    import matplotlib.pyplot as plt

    first, *more = runs(sys.argv[1])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot([row[0] for row in first], label="reward")
    left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    if more:
        left.plot([row[0] for row in more[0]], "k:", label="with drafts: the same")
        left.legend()
        right.plot([row[2] for row in first], label="without drafts")
        right.plot([row[2] for row in more[0]], label="drafts, fresh seeds")
        if len(sys.argv) > 3:
            right.plot([row[2] for row in runs(sys.argv[3])[1]], label="drafts, sticky seeds")
        right.set(xlabel="step", ylabel="steps of the engine", ylim=(0, None))
        right.legend()
    else:
        right.semilogy([row[1] for row in first])
        right.set(xlabel="step", ylabel="mean |server - trainer| logprob", ylim=(1e-8, 1e-3))
    figure.savefig(sys.argv[2], dpi=80)


if __name__ == "__main__":
    main()
