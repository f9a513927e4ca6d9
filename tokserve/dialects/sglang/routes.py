"""The table of SGLang's routes."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType

from tokserve.dialects.openai.chat import ChatReply
from tokserve.dialects.openai.completions import CompletionReply
from tokserve.dialects.openai.schemas import CompletionBody
from tokserve.dialects.openai.tokenize import TokenizeReply
from tokserve.dialects.sglang import (
    adapter_tensors,
    chat,
    completions,
    control,
    generate,
    introspection,
    label_scores,
    parse,
    pooling,
    reply,
    tokenize,
    weights,
)
from tokserve.dialects.sglang.replies import GENERATE, SGLANG
from tokserve.features.label_scores.labels import LabelScoresBody
from tokserve.features.pooling.routes.classify import ClassifyReply
from tokserve.features.pooling.routes.embeddings import EmbeddingBody, EmbeddingReply
from tokserve.server.endpoint import BODY, COMMAND, EMPTY, ENGINE, OCTETS, POOLING, PROMPT, TEXT, Endpoint
from tokserve.server.reply_types import JsonObject

POSTED = ("POST", "PUT")
VECTORS = (pooling.SglangVector, list[pooling.SglangVector])
READ = ("GET", "POST")
GET = ("GET",)

_DECLARED = (
    Endpoint(
        ("POST",),
        "/v1/score",
        label_scores.score_labels,
        LabelScoresBody,
        reply=label_scores.SglangScoresReply,
        runner="generate",
    ),
    Endpoint(
        POSTED,
        "/generate",
        generate.generate,
        generate.SglangGenerateBody,
        reply=(reply.SglangReply, list[reply.SglangReply]),
        runner="generate",
        errors=GENERATE,
    ),
    Endpoint(
        ("POST",),
        "/v1/chat/completions",
        chat.chat_completions,
        chat.SglangChatBody,
        text=True,
        reply=ChatReply,
        runner="generate",
    ),
    Endpoint(
        ("POST",),
        "/v1/completions",
        completions.text_completions,
        CompletionBody,
        reply=CompletionReply,
        runner="generate",
    ),
    *(
        Endpoint(
            ("POST",),
            path,
            tokenize.tokenize_texts,
            tokenize.SglangTokenizeBody,
            text=True,
            raises=PROMPT,
            reply=(TokenizeReply, tokenize.TokenizedTexts),
        )
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        Endpoint(
            ("POST",),
            path,
            tokenize.detokenize,
            tokenize.SglangDetokenizeBody,
            text=True,
            reply=tokenize.SglangText,
            raises=PROMPT,
        )
        for path in ("/detokenize", "/v1/detokenize")
    ),
    Endpoint(
        ("POST",),
        "/parse_function_call",
        parse.parse_function_call,
        parse.ParseCallsBody,
        text=True,
        reply=parse.ParsedCalls,
        raises=PROMPT,
    ),
    Endpoint(
        ("POST",),
        "/separate_reasoning",
        parse.separate_reasoning,
        parse.SeparateReasoningBody,
        text=True,
        reply=parse.SeparatedReasoning,
        raises=PROMPT,
    ),
    Endpoint(
        POSTED,
        "/classify",
        pooling.classify_route,
        pooling.SglangPoolingBody,
        reply=(ClassifyReply, *VECTORS),
        runner="pooling",
        raises=POOLING,
    ),
    Endpoint(
        POSTED, "/encode", pooling.encode, pooling.SglangPoolingBody, reply=VECTORS, runner="pooling", raises=POOLING
    ),
    Endpoint(
        ("POST",),
        "/v1/embeddings",
        pooling.embed,
        EmbeddingBody,
        reply=(EmbeddingReply, OCTETS),
        runner="pooling",
        raises=POOLING,
    ),
    Endpoint(
        POSTED,
        "/abort_request",
        control.abort_request,
        control.AbortRequestBody,
        reply=EMPTY,
        errors=SGLANG,
        raises=BODY,
    ),
    Endpoint(GET, "/health_generate", introspection.health_generate, reply=EMPTY),
    Endpoint(GET, "/model_info", introspection.model, reply=JsonObject, guarded=True),
    Endpoint(GET, "/get_model_info", introspection.model, reply=JsonObject, guarded=True),
    Endpoint(GET, "/server_info", introspection.configuration, reply=JsonObject, guarded=True, raises=ENGINE | {400}),
    Endpoint(
        GET, "/get_server_info", introspection.configuration, reply=JsonObject, guarded=True, raises=ENGINE | {400}
    ),
    Endpoint(GET, "/v1/loads", introspection.loads, reply=JsonObject, guarded=True),
    Endpoint(GET, "/get_load", introspection.get_load, reply=list[JsonObject], guarded=True),
    Endpoint(READ, "/get_weight_version", weights.get_version, reply=JsonObject, guarded=True),
    Endpoint(
        ("GET", *POSTED),
        "/flush_cache",
        control.flush_cache,
        control.FlushBody,
        control=True,
        reply=TEXT,
        also=((400, TEXT),),
        raises=COMMAND,
    ),
    *(
        Endpoint(POSTED, path, handler, kind, control=True, reply=form, errors=SGLANG)
        for path, handler, kind, form in (
            ("/pause_generation", control.pause_generation, control.PauseGenerationBody, JsonObject),
            ("/continue_generation", control.continue_generation, control.ContinueBody, JsonObject),
            ("/release_memory_occupation", control.release_memory_occupation, control.MemoryBody, NoneType),
            ("/resume_memory_occupation", control.resume_memory_occupation, control.MemoryBody, NoneType),
            ("/load_lora_adapter", control.load_lora_adapter, control.LoadAdapterRouteBody, JsonObject),
            (
                "/load_lora_adapter_from_tensors",
                adapter_tensors.load_adapter_tensors,
                adapter_tensors.AdapterTensorsBody,
                JsonObject,
            ),
            ("/unload_lora_adapter", control.unload_lora_adapter, control.UnloadAdapterRouteBody, JsonObject),
            ("/start_profile", control.start_profile, control.ProfileBody, JsonObject),
            ("/stop_profile", control.stop_profile, None, JsonObject),
            ("/weights_checker", control.weights_checker, control.WeightsCheckerBody, JsonObject),
            ("/update_weights_from_disk", weights.from_disk, weights.DiskBody, JsonObject),
            ("/update_weights_from_distributed", weights.from_distributed, weights.DistributedBody, JsonObject),
            ("/update_weights_from_tensor", weights.refuse_pickle, None, None),
            ("/update_weights_from_ipc", weights.refuse_pickle, None, None),
            ("/init_weights_update_group", weights.init_group, weights.GroupBody, JsonObject),
            ("/destroy_weights_update_group", weights.destroy_group, weights.DestroyBody, JsonObject),
            ("/begin_weight_update", weights.begin_update, weights.BracketBody, JsonObject),
            ("/end_weight_update", weights.end_update, weights.BracketBody, JsonObject),
            ("/update_weight_version", weights.update_version, weights.SglangVersionBody, JsonObject),
        )
    ),
)
# what the handlers of this package answer is JSON alone
ENDPOINTS = tuple(
    replace(one, msgpack=False) if one.handler.__module__.startswith(__package__) else one for one in _DECLARED
)
