#!/bin/sh
# A router of the field in front of three servers on this machine, which routes by what they have cached.
#
#   examples/router.sh vllm [MODEL]      vllm-router, by the servers' KV events (pip install vllm-router)
#   examples/router.sh sglang [MODEL]    SGLang's gateway, by the prompts that it has sent (pip install sglang-router);
#                                        token ids go to /generate
#
# Clients talk to PORT (8000), the servers listen at the three ports after it.  Ctrl-C ends everything.
# POLICY=round_robin, for comparison, spreads requests blindly.  ROUTER names the router's program, if it is in another
# environment, and SERVER_FLAGS are further flags of the servers.
set -eu
kind=${1:?"vllm or sglang"} model=${2:-demo}
name=$(basename "$model")
base=${PORT:-8000}
pids=
trap 'kill $pids 2>/dev/null; wait' EXIT
trap 'exit 0' INT TERM

[ "$kind" = sglang ] && SERVER_FLAGS="--sglang-api ${SERVER_FLAGS:-}"

for i in 1 2 3; do
    tokserve serve "$model" --port "$((base + i))" --served-model-name "$name" ${SERVER_FLAGS:-} --kv-events-config \
        "{\"enable_kv_cache_events\": true, \"format\": \"array\", \"endpoint\": \"tcp://127.0.0.1:$((base + 10 + i))\",
          \"replay_endpoint\": \"tcp://127.0.0.1:$((base + 20 + i))\"}" &
    pids="$pids $!"
done
urls=
for i in 1 2 3; do
    urls="$urls http://127.0.0.1:$((base + i))"
    until curl -fs "http://127.0.0.1:$((base + i))/ready" >/dev/null; do
        kill -0 $pids
        sleep 1
    done
done

case $kind in
vllm)
    sources=
    for i in 1 2 3; do
        sources="$sources --kv-event-source http://127.0.0.1:$((base + i))=tcp://127.0.0.1:$((base + 10 + i))"
        sources="$sources --kv-event-replay-source http://127.0.0.1:$((base + i))=tcp://127.0.0.1:$((base + 20 + i))"
    done
    policy=${POLICY:-kv_aware}
    [ "$policy" = kv_aware ] || sources=
    "${ROUTER:-vllm-router}" --port "$base" --worker-urls $urls --policy "$policy" ${sources:+$sources} \
        ${sources:+--kv-event-block-size 16 --kv-event-model "$name"} --prometheus-port "$((base + 9))" &
    ;;
sglang)
    "${ROUTER:-sglang-router}" launch --port "$base" --worker-urls $urls --policy "${POLICY:-cache_aware}" \
        --prometheus-port "$((base + 9))" &
    ;;
*)
    echo "$kind: expected vllm or sglang" >&2
    exit 2
    ;;
esac
pids="$pids $!"
wait $!
