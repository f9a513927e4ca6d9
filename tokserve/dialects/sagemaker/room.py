"""What SageMaker's dialect adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("dialects.openai", "features.pooling"),
    endpoints="tokserve.dialects.sagemaker.routes:ENDPOINTS",
)
