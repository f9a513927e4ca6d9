#!/usr/bin/env bash
# The server by hand: tokens, chat, scoring, a stream, an abort.  Usage: curl.sh [BASE_URL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
post() { curl -sS --fail-with-body "$url$1" -H 'Content-Type: application/json' -d "$2"; echo; }

echo "# tokens in, tokens out, with logprobs"
post /inference/v1/generate '{"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 1}}'

echo "# the same as a stream"
post /inference/v1/generate '{"token_ids": [5, 6, 7], "stream": true, "sampling_params": {"max_tokens": 4, "temperature": 0}}'

echo "# scoring: the logprob of every prompt token"
post /inference/v1/generate '{"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}'

echo "# chat"
post /v1/chat/completions '{"temperature": 0, "messages": [{"role": "user", "content": "What is 47 + 38?"}]}'

echo "# abort answers after the fact"
post /abort_requests '{"request_ids": ["nobody"]}'
