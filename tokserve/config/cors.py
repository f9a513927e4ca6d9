"""Options of cross-origin requests: which web pages of other origins may use the server from a browser."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tokserve.config.common import about

ANY = "*"
SEVERAL = {"several": True}


class CorsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cross-origin requests (CORS)."""

    allowed_origins: Annotated[
        list[str] | None,
        about(
            "Origin (http://HOST:PORT) whose web pages may use this server (several may follow one flag; repeatable; "
            "or a JSON list; *: any). Default: none, no CORS headers are sent.",
            extra=SEVERAL,
        ),
    ] = None
    allowed_methods: Annotated[
        list[str] | None, about("Method that these pages may use (likewise). Default: any.", extra=SEVERAL)
    ] = None
    allowed_headers: Annotated[
        list[str] | None, about("Header that these pages may send (likewise). Default: any.", extra=SEVERAL)
    ] = None
    allow_credentials: Annotated[
        bool, about("Let browsers send their cookies and stored logins with requests of these pages.")
    ] = False
