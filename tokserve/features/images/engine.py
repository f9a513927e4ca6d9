"""Images as the engine's loop sees them: they are checked when a request is made."""

from __future__ import annotations

from tokserve.base.errors import StartError
from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.request import Request
from tokserve.features.images.vision import check_image
from tokserve.protocol.images import KIND, ImageFormat
from tokserve.protocol.messages import EngineRequest


def make(context: EngineContext) -> EngineFeature | None:
    """The feature of a model that reads images; None for others.  Raises StartError if a step does not hold an image
    beside a token of every running request."""
    images, config = context.facts.images, context.config.scheduler
    if images is None:
        return None
    most = config.rows + images.step_tokens
    if images.step_tokens and config.token_budget < most:
        raise StartError(
            f"option max_num_batched_tokens: {config.token_budget} is less than {most}: this model computes an image's "
            f"{images.step_tokens} tokens in one step, beside those of max_num_seqs {config.rows} requests"
        )
    return CheckedImages(images)


class CheckedImages(EngineFeature):
    """Refuses requests whose images are not what the model reads."""

    def __init__(self, images: ImageFormat) -> None:
        self._images = images

    def attach(self, request: Request, spec: EngineRequest) -> None:
        for feature in request.features:
            if feature.kind == KIND:
                check_image(feature, self._images)
