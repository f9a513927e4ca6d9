"""The table of SGLang's routes."""

from __future__ import annotations

from tokserve.server.openapi import Endpoint
from tokserve.server.sglang import control, generate, introspection, reply, weights

POSTED = ("POST", "PUT")
READ = ("GET", "POST")

ENDPOINTS = (
    Endpoint(POSTED, "/generate", generate.generate, generate.SglangGenerateBody, reply=reply.SglangReply),
    Endpoint(POSTED, "/abort_request", control.abort_request, control.AbortRequestBody),
    Endpoint(("GET",), "/health_generate", introspection.health_generate),
    Endpoint(("GET",), "/model_info", introspection.model),
    Endpoint(("GET",), "/get_model_info", introspection.model),
    Endpoint(("GET",), "/server_info", introspection.configuration),
    Endpoint(("GET",), "/get_server_info", introspection.configuration),
    Endpoint(("GET",), "/v1/loads", introspection.loads),
    Endpoint(("GET",), "/get_load", introspection.get_load),
    Endpoint(READ, "/get_weight_version", weights.get_version),
    Endpoint(("GET", *POSTED), "/flush_cache", control.flush_cache, control.FlushBody, control=True),
    *(
        Endpoint(POSTED, path, handler, kind, control=True)
        for path, handler, kind in (
            ("/pause_generation", control.pause_generation, control.PauseGenerationBody),
            ("/continue_generation", control.continue_generation, control.ContinueBody),
            ("/release_memory_occupation", control.release_memory_occupation, control.MemoryBody),
            ("/resume_memory_occupation", control.resume_memory_occupation, control.MemoryBody),
            ("/load_lora_adapter", control.load_lora_adapter, control.LoadAdapterRouteBody),
            ("/unload_lora_adapter", control.unload_lora_adapter, control.UnloadAdapterRouteBody),
            ("/start_profile", control.start_profile, control.ProfileBody),
            ("/stop_profile", control.stop_profile, None),
            ("/weights_checker", control.weights_checker, control.WeightsCheckerBody),
            ("/update_weights_from_disk", weights.from_disk, weights.DiskBody),
            ("/update_weights_from_distributed", weights.from_distributed, weights.DistributedBody),
            ("/update_weights_from_tensor", weights.refuse_pickle, None),
            ("/update_weights_from_ipc", weights.refuse_pickle, None),
            ("/init_weights_update_group", weights.init_group, weights.GroupBody),
            ("/destroy_weights_update_group", weights.destroy_group, weights.DestroyBody),
            ("/begin_weight_update", weights.begin_update, weights.BracketBody),
            ("/end_weight_update", weights.end_update, weights.BracketBody),
            ("/update_weight_version", weights.update_version, weights.SglangVersionBody),
        )
    ),
)
INTROSPECTION = frozenset({
    "/get_server_info", "/model_info", "/get_model_info", "/v1/loads", "/get_load", "/get_weight_version",
})  # fmt: skip
