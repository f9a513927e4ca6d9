"""instructor's JSON_SCHEMA mode on a server with --structured-outputs-closed.

It sends schemas as pydantic makes them, without `strict`: other properties are allowed by them unless a class forbids
them, and a weak model writes some up to the limit.
"""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field
from report import Report

MESSAGES = [{"role": "user", "content": "What is 47 + 38?"}]


class Place(BaseModel):
    city: Literal["Oslo", "Rome"]


class Trip(BaseModel):
    first: Place
    others: list[Place] = Field(max_length=2)


def main() -> None:
    report = Report()
    sdk = openai.OpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
    for kind in (Place, Trip):
        common: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "response_model": kind, "max_tokens": 1500}
        for seed in range(8):
            result = client.chat.completions.create(**common, seed=seed, max_retries=0)
            report.check(f"{kind.__name__}, seed {seed}: {result}", isinstance(result, kind))
        parts = list(client.chat.completions.create_partial(**common, seed=1))
        report.check(f"a partial {kind.__name__}", isinstance(parts[-1], BaseModel) and len(parts) > 1)
    schema = {"name": "trip", "schema": Trip.model_json_schema()}
    for strict in (None, True):
        form: Any = {"type": "json_schema", "json_schema": schema | {"strict": strict}}
        answer = sdk.chat.completions.create(model="demo", messages=MESSAGES, response_format=form, max_tokens=1500)
        report.check(f"strict {strict}", Trip.model_validate_json(answer.choices[0].message.content, extra="forbid"))
    report.done("instructor", "openai", "pydantic")


if __name__ == "__main__":
    main()
