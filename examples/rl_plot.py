"""Plot what rl_loop.py printed: python examples/rl_plot.py log rl_loop.png (needs matplotlib)."""

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt

rows = re.findall(r"reward ([\d.]+)  mean .logprob difference. (\S+)", Path(sys.argv[1]).read_text())
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot([float(reward) for reward, _ in rows])
left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
right.semilogy([float(mismatch) for _, mismatch in rows])
right.set(xlabel="step", ylabel="mean |server - trainer| logprob", ylim=(1e-8, 1e-3))
figure.savefig(sys.argv[2], dpi=80)
