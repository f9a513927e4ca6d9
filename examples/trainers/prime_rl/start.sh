#!/usr/bin/env bash
# In a checkout of prime-rl; the server is on this machine, or sees this directory at the same path.
#   tokserve serve PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT --rl
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec uv run rl @ "$here/rl.toml" "$@"
