"""OpenAI's predicted outputs: the text that an answer may be becomes drafts, which change nothing but its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tokserve.base.errors import RequestError, invalid
from tokserve.client.inputs import GenerateRequest
from tokserve.server.serving import Serving

if TYPE_CHECKING:
    from tokserve.dialects.openai.schemas import TextBody


def with_prediction(serving: Serving, body: TextBody, generate: GenerateRequest) -> GenerateRequest:
    """The request with the body's prediction, if there is one, as ids.  Raises RequestError."""
    prediction = body.prediction
    if prediction is None:
        return generate
    if generate.options.draft_token_ids is not None:
        raise RequestError("prediction and draft_token_ids are mutually exclusive", field="prediction")
    if not serving.text:
        raise invalid("prediction", "needs a tokenizer: send draft_token_ids", code="tokens_only")
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    serving.check_text(text, "prediction")
    ids = serving.tokenizer.encode(text, add_special_tokens=False)[: serving.llm.ready.max_model_len]
    ready = serving.llm.ready.vocab_size
    known = next((index for index, token in enumerate(ids) if token >= ready), len(ids))
    options = msgspec.structs.replace(generate.options, draft_token_ids=ids[:known])
    return msgspec.structs.replace(generate, options=options)
