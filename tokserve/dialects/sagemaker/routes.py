"""SageMaker's route."""

from __future__ import annotations

from tokserve.dialects.sagemaker import invocations
from tokserve.server import reply_types as types
from tokserve.server.endpoint import Endpoint

ENDPOINTS = (
    Endpoint(("POST",), "/invocations", invocations.invocations, invocations.InvocationBody, reply=types.JsonObject),
)
