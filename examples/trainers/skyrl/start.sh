#!/usr/bin/env bash
# SkyRL's trainer with a tokserve server that it did not start. Give further options of SkyRL as arguments.
#   tokserve serve Qwen/Qwen2.5-1.5B-Instruct --rl --enable-lora
set -euo pipefail
server=${SERVER:-http://127.0.0.1:8000}
exec uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \
  trainer.policy.model.path="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" \
  trainer.placement.colocate_all=false \
  generator.inference_engine.run_engines_locally=false \
  generator.inference_engine.external_proxy_url="$server" \
  generator.inference_engine.external_server_urls="['$server']" \
  "$@"
