"""Rollouts that go on while the weights change under them: pause in keep mode, push, resume, and read the spans.

tokserve serve demo &
python examples/async_rollouts.py [BASE_URL]
"""

import asyncio
import collections
import sys

from safetensors.torch import load_file

from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient

PROMPT = [286, 84, 82, 68, 81, 198, 16, 10, 16, 287, 198, 286, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198]


async def main(url: str) -> None:
    weights = load_file(DEMO_DIR / "model.safetensors")
    async with TokserveClient(url) as client:
        rollouts = asyncio.ensure_future(client.generate([PROMPT] * 8, n=4, max_tokens=600, ignore_eos=True))
        for step in range(1, 4):
            await asyncio.sleep(0.3)  # a trainer's step
            async with client.paused("keep"):
                await client.update_weights(weights.items(), version=f"step-{step}")
        tokens: collections.Counter[str] = collections.Counter()
        for rollout in await rollouts:
            for version, start, end in rollout.weight_versions:
                tokens[version] += end - start
        for version, count in tokens.items():
            print(f"{count} tokens by version {version}")
        print(f"all {tokens.total()} tokens are accounted for; state: {(await client.state())['state']}")


if "--help" in sys.argv:
    print(__doc__)
else:
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
