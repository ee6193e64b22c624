"""Errors of the HTTP interface, with bodies as OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ml4core.engine.errors import RequestError
from ml4core.serving.process.inbox import EngineGoneError


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        param: the field at fault, if one is.
        code: a word for programs, e.g. ``model_not_found``.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def of_request(error: RequestError) -> ApiError:
    """A fault of the client, naming field, value and what works."""
    return ApiError(400, str(error), param=error.field)


def of_engine(error: EngineGoneError) -> ApiError:
    return ApiError(503, str(error), code="engine_stopped")


def body(error: ApiError) -> bytes:
    """The JSON of an error."""
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status)
    entry = {
        "message": str(error),
        "type": kind or "invalid_request_error",
        "param": error.param,
        "code": error.code,
    }
    return json.dumps({"error": entry}).encode()  # escapes: half a surrogate pair is no UTF-8


def told(error: Exception) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, RequestError):
        return of_request(error)
    if isinstance(error, EngineGoneError):
        return of_engine(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, ApiError):
        return error
    return ApiError(500, f"{type(error).__name__}: a fault of the server; see its log")


def answer(error: Exception) -> Response:
    """The same, as an answer."""
    found = told(error)
    return Response(body(found), found.status, found.headers, "application/json")
