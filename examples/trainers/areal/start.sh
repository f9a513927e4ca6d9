#!/usr/bin/env bash
# AReaL's trainer with a tokserve server that it did not start, weights through the file system.
#   tokserve serve Qwen/Qwen2.5-1.5B-Instruct --rl
# Run it where AReaL and its examples are: start.sh examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo.yaml
set -euo pipefail
export AREAL_LLM_SERVER_ADDRS=${SERVER:-127.0.0.1:8000}
script=${1:?usage: start.sh SCRIPT --config FILE}
shift
exec torchrun --nproc-per-node "${GPUS:-1}" "$script" "$@" actor.weight_update_mode=disk
