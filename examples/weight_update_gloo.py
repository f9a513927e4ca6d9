"""Push weights over a process group (gloo, TCP) while the server generates, and look who made which token.

tokserve serve demo &
python examples/weight_update_gloo.py [BASE_URL]
"""

import asyncio
import socket
import sys

from safetensors.torch import load_file

from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient

PROMPT = [286, 84, 82, 68, 81, 198, 16, 10, 16, 287, 198, 286, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def main(url: str) -> None:
    weights = load_file(DEMO_DIR / "model.safetensors")
    async with TokserveClient(url) as client:
        await client.join("gloo", "127.0.0.1", free_port())
        running = asyncio.ensure_future(client.generate([PROMPT], max_tokens=1500, ignore_eos=True, seeds=[1]))
        done = await client.update_weights(weights.items(), version="pushed")
        print(f"serving version {done['weight_version']}, epoch {done['epoch']}")
        (rollout,) = await client.generate([PROMPT], max_tokens=4, ignore_eos=True, seeds=[1])
        print(f"new request: {len(rollout.token_ids)} tokens by {rollout.weight_versions}")
        (old,) = await running
        print(f"request in flight: {len(old.token_ids)} tokens by {old.weight_versions}")


if "--help" in sys.argv:
    print(__doc__)
else:
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
