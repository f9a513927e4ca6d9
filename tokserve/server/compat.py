"""Compatibility tables: the names of OpenAI and of other servers.

A field that a body declares has an effect.  Other known fields are *ignored*, if the answer is the same without them
(the text routes name them in `X-Ignored-Fields`), or *refused*, if it would differ.  Values without an effect are
accepted.  Fields that are not in these tables are unknown.  docs/fields.md shows the tables of the text routes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from tokserve.protocol.params import PARAMS_REFUSED, PARAMS_WITHOUT_EFFECT


class FieldRule(NamedTuple):
    """`no_effect`: values without an effect; null is always one.  `note`: the reason, or what to send instead.

    `strict`: refused with --strict, because the text would differ.
    """

    treatment: Literal["ignored", "refused"]
    no_effect: tuple[Any, ...] = ()
    note: str = ""
    strict: bool = False


def _ignored(*no_effect: Any, note: str = "", strict: bool = False) -> FieldRule:
    return FieldRule("ignored", no_effect, note, strict)


def _refused(*no_effect: Any, note: str = "") -> FieldRule:
    return FieldRule("refused", no_effect, note)


FieldTable = dict[str, FieldRule]

VERBOSITY = _ignored("medium", note="no template reads it", strict=True)
_TAG = "users are not distinguished and nothing is stored"
_CACHE = "the prefix cache needs no hints"
_OUTPUTS = "use structured_outputs"
_TOKENS_ONLY = "use hidden_states of the token route"

# of OpenAI
OPENAI: FieldTable = {
    "audio": _refused(),
    "function_call": _refused("none", "auto", note="use tool_choice"),
    "functions": _refused([], note="use tools"),
    "max_tool_calls": _ignored(note="there are no tools"),
    "metadata": _ignored({}, note=_TAG),
    "modalities": _refused(["text"]),
    "moderation": _refused(note="nothing is moderated"),
    "prompt_cache_key": _ignored(note=_CACHE),
    "prompt_cache_options": _ignored({}, note=_CACHE),
    "prompt_cache_retention": _ignored("in_memory", note=_CACHE),
    "safety_identifier": _ignored(note=_TAG),
    "service_tier": _ignored("auto", "default", note="there is one tier"),
    "store": _ignored(False, note="nothing is stored"),
    "suffix": _refused(""),
    "best_of": _refused(1, note="use n"),
    "tool_choice": _refused("none", "auto"),
    "tools": _refused([]),
    "user": _ignored(note=_TAG),
    "verbosity": VERBOSITY,
    "web_search_options": _refused(),
}
# of other servers and their clients
OTHERS: FieldTable = {
    "bad_words_ids": _refused([], note="use bad_token_sequences"),
    "echo": _refused(False),
    "ec_transfer_params": _refused(),
    "kv_transfer_params": _refused(),
    "length_penalty": _refused(1, 1.0),
    "logits_processors": _refused([]),
    "media_io_kwargs": _refused({}),
    "mm_processor_kwargs": _refused({}),
    "packed_top_logprobs": _refused(False, note="completions have it"),
    "prompt_embeds": _refused(),
    "reasoning": _refused({}, note="chat has reasoning_effort"),
    "session_id": _ignored(note=_TAG),
    "stream_interval": _ignored(note="a delta has all tokens that are ready"),
    "structural_tag": _refused(note=_OUTPUTS),
    "truncate_prompt_tokens": _refused(-1),
    "truncation_side": _ignored(note="nothing is cut"),
    "watermarking": _refused(False, note="outputs are not watermarked"),
    "use_beam_search": _refused(False),
}
_BY_NAME = "use logprobs"
_FILTER = "use top_k, top_p or min_p"
_REPEATS = "use repetition_penalty, presence_penalty or frequency_penalty"
# of SGLang's, llama.cpp's, TGI's, Mistral's and Ollama's chat and completions, in that order
DIALECTS: FieldTable = {
    "custom_logit_processor": _refused("", note="use logit_bias or structured_outputs"),
    "lora_path": _refused("", note="use model"),
    "no_stop_trim": _refused(False, note="use include_stop_str_in_output"),
    "hidden_states": _refused(note=_TOKENS_ONLY),
    "return_hidden_states": _refused(False, note=_TOKENS_ONLY),
    "session_params": _refused({}),
    "stop_regex": _refused("", [], note="use stop, stop_token_ids or structured_outputs"),
    "cache_prompt": _ignored(True, note=_CACHE),
    "dry_multiplier": _refused(0, 0.0, note=_REPEATS),
    "dynatemp_range": _refused(0, 0.0, note="use temperature"),
    "grammar_lazy": _refused(False, note=_OUTPUTS),
    "id_slot": _ignored(-1, note="slots are assigned by the server"),
    "lora": _refused([], note="use model"),
    "mirostat": _refused(0, note=_FILTER),
    "n_keep": _ignored(0, -1, note="nothing is cut"),
    "n_predict": _refused(-1, note="use max_tokens"),
    "n_probs": _refused(0, note=_BY_NAME),
    "reasoning_budget": _refused(-1, note="use max_tokens"),
    "repeat_penalty": _refused(1, 1.0, note="use repetition_penalty"),
    "samplers": _refused(note=_FILTER),
    "top_n_sigma": _refused(-1, -1.0, note=_FILTER),
    "typical_p": _refused(1, 1.0, note=_FILTER),
    "xtc_probability": _refused(0, 0.0, note=_FILTER),
    "decoder_input_details": _refused(False, note="use prompt_logprobs"),
    "details": _refused(False, note=_BY_NAME),
    "do_sample": _refused(True, note="use temperature 0"),
    "max_new_tokens": _refused(note="use max_tokens"),
    "return_full_text": _refused(False, note="use echo of completions"),
    "top_n_tokens": _refused(0, note=_BY_NAME),
    "truncate": _refused(note="nothing is cut"),
    "watermark": _refused(False, note="outputs are not watermarked"),
    "random_seed": _refused(note="use seed"),
    "safe_prompt": _refused(False, note="send a system message"),
    "format": _refused("", note="use response_format"),
    "options": _refused({}, note="send its fields beside messages, under the names of this page"),
    "think": _refused(note="use reasoning_effort or chat_template_kwargs"),
}
TEXT: FieldTable = OPENAI | OTHERS | DIALECTS
# of the pooling routes
POOLING: FieldTable = TEXT | {
    "embed_dtype": _refused("float32", note="values are float32"),
    "endianness": _refused("native", "little", note="values are little-endian"),
    "late_chunking_params": _refused(),
    "normalize": _refused(note="use use_activation"),
    "padding": _refused(False, True, "do_not_pad", "longest", note="nothing is padded"),
}
_AS_IT_IS = "the conversation is not edited"
_BETAS = "betas have no effect"
_NO_LOGPROBS = "a message has no field for it, use chat or the token route"
_STATELESS = "nothing is stored, send the whole conversation in input"
# of /v1/responses: also fields that chat has under other names, and those about the prompt
RESPONSES: FieldTable = TEXT | {
    "access_programs": _ignored(note="there is no such program here"),
    "add_generation_prompt": _refused(True),
    "add_special_tokens": _refused(False),
    "background": _refused(False, note="nothing is stored, wait for the reply"),
    "background_options": _ignored({}, note="there are no background responses"),
    "chat_template": _refused(),
    "context_management": _refused([]),
    "continue_final_message": _refused(False),
    "conversation": _refused(note=_STATELESS),
    "documents": _refused([]),
    "enable_response_messages": _refused(False, note="a response has its items, and return_token_ids the tokens"),
    "image": _refused(),
    "include_reasoning": _refused(True, note="drop its items in the client"),
    "logprobs": _refused(False, note="use include and top_logprobs"),
    "max_completion_tokens": _refused(note="use max_output_tokens"),
    "max_tokens": _refused(note="use max_output_tokens"),
    "messages": _refused(note="use input"),
    "n": _refused(1),
    "previous_response_id": _refused(note=_STATELESS),
    "prompt": _refused(note="nothing is stored, send instructions"),
    "prompt_logprobs": _refused(False),
    "reasoning_effort": _refused(note="use reasoning.effort"),
    "return_entropy": _refused(False, note="a response has no field for it, use chat or the token route"),
    "return_sampling_mask": _refused(False, note="a response has no field for it, use chat or the token route"),
    "response_format": _refused({"type": "text"}, note="use text.format"),
    "tokens": _refused(note="use input"),
    "truncation": _ignored("disabled", note="nothing is cut, and an input that does not fit is refused", strict=True),
}
# of /v1/messages and /v1/messages/count_tokens: Anthropic's fields, and those that chat has under other names
MESSAGES: FieldTable = TEXT | {
    "add_generation_prompt": _refused(True),
    "add_special_tokens": _refused(False),
    "anthropic_beta": _ignored([], note=_BETAS),
    "anthropic_version": _ignored(note="there is one version"),
    "betas": _ignored([], note=_BETAS),
    "billing_policy": _ignored(note="nothing is billed"),
    "cache_control": _ignored(note=_CACHE),
    "chat_template": _refused(),
    "compaction": _ignored(note=_AS_IT_IS),
    "container": _refused(note="nothing is executed here"),
    "context_management": _ignored({}, {"edits": []}, note=_AS_IT_IS),
    "continue_final_message": _refused(note="a final message of the assistant is always continued"),
    "diagnostics": _ignored(note="there are none"),
    "documents": _refused([]),
    "fallback_credit_token": _ignored(note="nothing is billed"),
    "fallbacks": _ignored([], "default", note="another model is not tried"),
    "include_reasoning": _refused(True, note="drop its blocks in the client"),
    "inference_geo": _ignored(note="there is one place"),
    "input": _refused(note="use messages"),
    "instructions": _refused(note="use system"),
    "logprob_token_ids": _refused([], note=_NO_LOGPROBS),
    "logprobs": _refused(False, note=_NO_LOGPROBS),
    "logprobs_mode": _refused(note=_NO_LOGPROBS),
    "max_completion_tokens": _refused(note="use max_tokens"),
    "max_output_tokens": _refused(note="use max_tokens"),
    "max_tool_calls": _refused(note="use tool_choice.disable_parallel_tool_use"),
    "mcp_servers": _refused([], note="this server calls no other servers, send tools"),
    "mm_payload": _ignored("tensors", note="a field of chat's render"),
    "n": _refused(1),
    "parallel_tool_calls": _refused(True, note="use tool_choice.disable_parallel_tool_use"),
    "prompt": _refused(note="use messages"),
    "prompt_logprobs": _refused(False, note=_NO_LOGPROBS),
    "reasoning_effort": _refused(note="use output_config.effort or thinking"),
    "response_format": _refused({"type": "text"}, note="use output_config.format"),
    "return_entropy": _refused(False, note=_NO_LOGPROBS),
    "return_sampling_mask": _refused(False, note=_NO_LOGPROBS),
    "service_tier": _ignored("auto", "standard_only", note="there is one tier"),
    "speed": _ignored("standard", note="there is one speed"),
    "stop": _refused([], note="use stop_sequences"),
    "stream_options": _ignored(note="a stream always reports usage"),
    "thread": _refused(note="nothing is stored, send the whole conversation in messages"),
    "tokens": _refused(note="use messages"),
    "top_logprobs": _refused(0, note=_NO_LOGPROBS),
    "user_profile_id": _ignored(note=_TAG),
    "workspace_id": _ignored(note=_TAG),
}
# fields of objects inside a body, by their path
INNER: FieldTable = {
    "output_config.task_budget": _ignored(note="no template reads it"),
    "stream_options.include_obfuscation": _ignored(False, note="nothing is padded"),
    "text.verbosity": VERBOSITY,
    "thinking.display": _ignored("summarized", note="reasoning is returned as it is"),
}
# sampling parameters of other servers on the token route; what is ignored there has no effect on the tokens
TOKEN_PARAMS: FieldTable = {name: _ignored() for name in PARAMS_WITHOUT_EFFECT} | {
    name: _refused(*neutral) for name, neutral in PARAMS_REFUSED.items()
}
# of SGLang's /generate; blank values have no effect either
SGLANG: FieldTable = {
    "session_id": _ignored(),
    "routing_key": _ignored(),
    "custom_labels": _ignored(),
    "log_metrics": _ignored(),
    "background": _ignored(),
    "modalities": _ignored(),
    "no_logs": _ignored(),
    "received_time": _ignored(),
    "validation_time": _ignored(),
    "conversation_id": _ignored(),
    "http_worker_ipc": _ignored(),
    "external_trace_header": _ignored(),
    "input_embeds": _refused(),
    "image_data": _refused(),
    "video_data": _refused(),
    "audio_data": _refused(),
    "session_params": _refused(),
    "custom_logit_processor": _refused(),
    "return_hidden_states": _refused(False, note=_TOKENS_ONLY),
    "return_indexer_topk": _refused(False),
    "bootstrap_host": _refused(),
    "bootstrap_port": _refused(),
    "bootstrap_room": _refused(),
    "sampling_logprobs_mode": _refused("", note="use return_sampling_mask"),
}
# of its /classify and /encode
SGLANG_POOLING: FieldTable = POOLING | {
    "background": _ignored(),
    "log_metrics": _ignored(),
    "sampling_params": _ignored({}),
    "routing_key": _ignored(),
    "input_embeds": _refused([]),
    "image_data": _refused([], ""),
    "video_data": _refused([], ""),
    "audio_data": _refused([], ""),
    "is_cross_encoder_request": _refused(False),
    "lora_path": _refused("", []),
}
# and of the sampling_params of /generate
SGLANG_PARAMS: FieldTable = {
    "stop_regex": _refused([], "", note="use stop, stop_token_ids or regex"),
    "structural_tag": _refused("", note="use json_schema or regex"),
    "beam_width": _refused(0, 1, note="use_beam_search of chat and completions does this"),
    "watermark": _refused(False, note="outputs are not watermarked"),
}
# names of structured outputs elsewhere, with the values that have no effect (null never has one)
OTHER_NAMES: dict[str, tuple[Any, ...]] = {
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "guided_decoding": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "grammar": ("",),
}
# options inside structured_outputs, likewise
IGNORED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (False,),
    "structural_tag": (),
    "_backend": (),
    "_backend_was_auto": (False,),
}
# metrics that vLLM has, too
VLLM_METRICS = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "iteration_tokens_total",
        "request_num_preemptions",
        "admission_rejections",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "mm_cache_queries",
        "mm_cache_hits",
        "external_prefix_cache_queries",
        "external_prefix_cache_hits",
        "kv_offload_total_bytes",
        "kv_offload_total_time",
    }
)


def has_no_effect(field: FieldRule, value: Any) -> bool:
    return value is None or (type(value), value) in [(type(no_effect), no_effect) for no_effect in field.no_effect]
