"""What structured outputs are where a request does not say it: options that all routes and the Python API follow."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import msgspec

from tokserve.config import ServerConfig
from tokserve.protocol.params import StructuredOutputs


class FormDefaults(NamedTuple):
    """`closed`: objects have no properties that the schema does not name.  `compact`: JSON has no white space."""

    closed: bool = False
    compact: bool = False

    @classmethod
    def of(cls, server: ServerConfig) -> Self:
        return cls(server.structured_outputs_closed, server.structured_outputs_compact)

    def apply(self, form: StructuredOutputs) -> StructuredOutputs:
        """The form, with what it does not say; applied twice it changes nothing more."""
        changes: dict[str, Any] = {}
        if self.closed and form.json is not None and form.disable_additional_properties is None:
            changes["disable_additional_properties"] = True
        is_json = form.json is not None or form.json_object is True
        if self.compact and is_json and form.disable_any_whitespace is None and form.whitespace_pattern is None:
            changes["disable_any_whitespace"] = True
        return msgspec.structs.replace(form, **changes) if changes else form
