"""Options of the HTTP server, its TLS and its limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tokserve.config.common import FOR_EVER, GIB, about


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP front end."""

    host: Annotated[str, about("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, about("Port to listen on; 0: any free one.", ge=0, le=65535)] = 8000
    uds: Annotated[str | None, about("Path of a Unix socket to listen on instead of host and port.")] = None
    api_server_count: Annotated[
        int, about("Processes that serve HTTP, on the same address and with one engine.", ge=1, le=64)
    ] = 1
    served_model_name: Annotated[
        list[str] | None,
        about(
            "Names the model answers to (several may follow one flag; repeatable); the first is used in replies. "
            "Default: MODEL as it was given.",
            extra={"several": True},
        ),
    ] = None
    rl: Annotated[
        bool,
        about(
            "Defaults for reinforcement learning: --logprobs-mode processed (the distribution that tokens are drawn "
            "from), --generation-config none (no sampling parameters but the request's), --scheduling-policy "
            "priority. An option that is given wins."
        ),
    ] = False
    tokens_only: Annotated[
        bool, about("Serve the token routes only: no tokenizer is loaded, text routes are absent.")
    ] = False
    sglang_api: Annotated[
        bool,
        about(
            "Serve SGLang's routes as well (/generate, /pause_generation, /update_weights_from_disk, ...), for "
            "trainers and routers that speak to SGLang; where a route has the same name, SGLang's is served."
        ),
    ] = False
    api_key: Annotated[
        list[str] | None,
        about(
            "Key clients must send, as bearer token or x-api-key (several may follow one flag; repeatable; or "
            "TOKSERVE_API_KEY or VLLM_API_KEY). Default: none.",
            extra={"several": True},
        ),
    ] = None
    admin_api_key: Annotated[
        list[str] | None,
        about("Key for the control routes (repeatable); with one, api_key does not open them. Default: api_key does."),
    ] = None
    allow_remote_control: Annotated[
        bool, about("Without any keys, answer control routes to other machines too: they can change the weights.")
    ] = False
    allowed_hosts: Annotated[
        list[str] | None,
        about(
            "Name in the Host header that control and introspection routes answer to (repeatable; *: any). Default: "
            "where only this machine can connect, localhost, 127.0.0.1, [::1] and the host itself; else any."
        ),
    ] = None
    reject_while_paused: Annotated[
        bool, about("Refuse requests (503) while the engine is paused or asleep; else they wait.")
    ] = False
    liveness_timeout: Annotated[
        float, about("Seconds the engine has to answer GET /liveness and /health?deep=1.", gt=0, le=FOR_EVER)
    ] = 10.0
    chat_template: Annotated[str | None, about("Jinja file, or the template itself, instead of the model's.")] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        about(
            'JSON object of variables of the chat template, such as {"enable_thinking": false}, for requests that do '
            "not set them (chat_template_kwargs, reasoning_effort)."
        ),
    ] = None
    trust_request_chat_template: Annotated[
        bool, about("Run templates from the chat_template of requests: one can use any amount of time and memory.")
    ] = False
    special_tokens_in_content: Annotated[
        Literal["allow", "text", "refuse"],
        about(
            "What texts in the messages, tools and documents of a chat become that spell special tokens, such as "
            "<|im_end|>: the tokens, as in vLLM (allow), plain text, so that nothing can forge a turn (text), or an "
            "error (refuse)."
        ),
    ] = "allow"
    enable_auto_tool_choice: Annotated[
        bool | None,
        about(
            "Parse tool calls out of the output when tool_choice is auto; default: if the model's format is known "
            "(tool_call_parser)."
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        about(
            "How the model writes tool calls, one of the names in tools.md (hermes, qwen3_coder, llama3_json, "
            "openai ...), or of a plugin; auto: as its chat template writes those of earlier turns, or else as it "
            "describes them."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        about(
            "Return the reasoning of a model separately from the content, one of the names in tools.md (qwen3, "
            "deepseek_r1, openai_gptoss ...), or of a plugin; auto: by the markers in its chat template; none: it "
            "stays in the content."
        ),
    ] = "auto"
    tool_parser_plugin: Annotated[
        str | None,
        about(
            "Name of an entry point tokserve.tool_parsers of an installed package, whose formats of tool calls and "
            "reasoning are used before the built-in ones."
        ),
    ] = None
    client_header: Annotated[
        str | None,
        about(
            "Header that a reverse proxy sets to its client's address (such as X-Forwarded-For, of which the last "
            "address counts), to tell clients without API keys apart; without a proxy any client can set it. "
            "Default: the address of the connection."
        ),
    ] = None
    max_body_mb: Annotated[int, about("Largest request body in MiB.", ge=1)] = 64
    keep_alive: Annotated[
        int, about("Seconds an idle HTTP connection is kept open, and a request's headers may take.", ge=5)
    ] = 75
    stream_stall_timeout: Annotated[
        float,
        about(
            "Seconds after which a client that does not read its reply is disconnected, and its request aborted; 0: "
            "never.",
            ge=0,
            le=FOR_EVER,
        ),
    ] = 300.0
    shutdown_timeout: Annotated[
        float, about("Seconds that running requests may finish in after SIGTERM.", ge=0, le=FOR_EVER)
    ] = 10.0
    strict: Annotated[
        bool, about("Refuse unknown fields on the OpenAI routes too (they are named in X-Ignored-Fields otherwise).")
    ] = False
    structured_outputs_closed: Annotated[
        bool,
        about(
            "Close the objects in JSON schemas of requests that do not say strict: outputs have no properties that "
            "the schema does not name, unless it allows them (additionalProperties), as with strict: true."
        ),
    ] = False
    structured_outputs_compact: Annotated[
        bool,
        about(
            "No white space between the parts of JSON in structured outputs of requests that do not say it "
            "(disable_any_whitespace, whitespace_pattern)."
        ),
    ] = False
    root_path: Annotated[str, about("Path prefix of a proxy; routes are served with and without it.")] = ""
    ui: Annotated[bool | None, about("Serve the status page at /; default: if only this machine can connect.")] = None


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of the HTTP server."""

    ssl_keyfile: Annotated[str | None, about("TLS key file.")] = None
    ssl_certfile: Annotated[str | None, about("TLS certificate file.")] = None
    ssl_ca_certs: Annotated[str | None, about("CA file that client certificates must be signed by.")] = None


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the cost of a request (docs/security.md).  Further limits follow from the model."""

    max_stop_strings: Annotated[
        int, about("Most stop strings of a request, and most of its stop_token_sequences.", ge=0)
    ] = 1024
    max_bad_words: Annotated[int, about("Most bad_words of a request, and most of its bad_token_sequences.", ge=0)] = (
        1024
    )
    max_words_bytes: Annotated[
        int, about("Most bytes of a request's stop strings together, and of its bad_words together.", ge=1)
    ] = 64 << 10
    max_messages: Annotated[int, about("Most messages of a chat, parts of contents and tool calls included.", ge=1)] = (
        1 << 14
    )
    max_body_values: Annotated[
        int,
        about(
            "Most values in a request body, counted before it is decoded: a number or a text is one, a name in an "
            "object two, an object or a list eight.",
            ge=1000,
        ),
    ] = 2_200_000  # 512 prompts of 4,096 ids; a tenth of a second of decoding
    max_body_memory_bytes: Annotated[
        int,
        about(
            "Most bytes of request bodies in memory at once, beyond the first 256 KiB of each; a request that would "
            "exceed it is refused with 503.",
            ge=1 << 20,
        ),
    ] = 512 << 20
    body_timeout: Annotated[
        float,
        about(
            "Longest silence in seconds while a request body arrives, else 408; all of a body may take ten times as "
            "long.",
            gt=0,
            le=FOR_EVER,
        ),
    ] = 30.0
    max_reply_bytes: Annotated[
        int,
        about("Largest reply, as estimated from the choices, tokens and logprobs of a request.", ge=1 << 20),
    ] = GIB
