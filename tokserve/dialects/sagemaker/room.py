"""What SageMaker's dialect adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    endpoints="tokserve.dialects.sagemaker.routes:ENDPOINTS",
)
