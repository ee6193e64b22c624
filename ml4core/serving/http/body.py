"""The body of a request: its bytes within a limit, and the JSON in them."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ml4core.models.errors import shown
from ml4core.serving.http.errors import ApiError, ClientGoneError

_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that may be half of a surrogate pair."""


async def read(request: Request, limit: int) -> bytes:
    """Raises ``ApiError`` 413 as soon as it is known to be larger than ``limit``."""
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and len(stated) < 20 and int(stated) > limit:
        raise _too_large(f"{int(stated):,}", limit)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(f"more than {limit:,}", limit)
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return b"".join(parts)


def decode(raw: bytes) -> Any:
    """JSON. NaN and infinities are taken, so that the field they are in can be named. Raises
    ``ApiError`` 400.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {raw[error.start]:#04x}"
        raise _bad(f"not UTF-8: {byte}", "JSON in UTF-8") from error
    if not text.strip():
        raise _bad("empty", "a JSON object")
    try:
        value = json.loads(text, object_pairs_hook=_pairs)
        if _HALF_PAIR.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _bad(f"not JSON: {error.msg} at character {error.pos}", "a JSON object") from error
    except UnicodeEncodeError as error:
        raise _bad("a text in it holds half of a surrogate pair", "whole characters") from error
    except RecursionError as error:
        raise _bad("nested too deep", "a JSON object of fewer levels") from error
    except ValueError as error:
        raise _bad(str(error), "each key once, numbers of fewer digits") from error
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} appears twice")
            seen.add(key)
    return found


def _bad(found: str, works: str) -> ApiError:
    return ApiError(400, f"body: {found} (works: {works})", param="body")


def _too_large(found: str, limit: int) -> ApiError:
    works = f"at most {limit:,} bytes: --max-request-bytes"
    return ApiError(413, f"body: {found} bytes (works: {works})", param="body")
