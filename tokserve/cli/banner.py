"""What the log says when a server is ready: what it serves, its status page, and a first request."""

from __future__ import annotations

import json
import logging
import shlex
from typing import Any

from tokserve.client.async_llm import AsyncLLM
from tokserve.config import Config

logger = logging.getLogger("tokserve.serve")


def log_ready(llm: AsyncLLM, config: Config, url: str, seconds: float) -> None:
    """Log that the server at `url` is ready, `seconds` after its start."""
    ready = llm.ready
    facts = {name: value for name, value in ready.facts.items() if value is not None}
    logger.debug("engine: %s", " ".join(f"{name}={value}" for name, value in facts.items()))
    logger.info("serving on %s, ready after %.1f s: %s", url, seconds, ", ".join(_facts(llm, config, facts)))
    if url.startswith("unix:"):
        return
    if config.server.ui:
        logger.info("status page: %s/", url)
    logger.info("try: %s", first_request(config, url))


def _facts(llm: AsyncLLM, config: Config, facts: dict[str, Any]) -> list[str]:
    ready = llm.ready
    words = [", ".join(config.server.served_model_name or [config.model.model])]
    words += [str(facts[name]) for name in ("dtype", "quantization") if name in facts]  # a script has neither
    if "kernels" in facts:
        words += [f"{facts['threads']} threads", f"kernels: {facts['kernels']}"]
    tokens = ready.num_blocks * ready.block_size
    if tokens:
        words.append(f"KV cache of {tokens:,} tokens")
    words.append(f"contexts up to {ready.max_model_len:,}")
    if not facts.get("exact", True):
        words.append("not exact: bits may depend on the batch")
    return words


def first_request(config: Config, url: str) -> str:
    """A command that sends a request to the server at `url`."""
    key = ' -H "Authorization: Bearer $TOKSERVE_API_KEY"' if config.server.api_key else ""
    name = (config.server.served_model_name or [config.model.model])[0]
    body: dict[str, Any]
    if config.model.runner == "pooling":
        path, body = "/pooling", {"model": name, "input": [[1, 2, 3]]}
    elif config.server.tokens_only:
        path, body = "/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}}
    else:
        path, body = (
            "/v1/chat/completions",
            {"model": name, "messages": [{"role": "user", "content": "What is 47 + 38?"}]},
        )
    return f"curl -s {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
