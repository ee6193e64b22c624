"""The application: routes, and how errors become answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ml4core import __version__
from ml4core.engine.errors import RequestError
from ml4core.serving.http import body as bodies
from ml4core.serving.http import errors, status, tokens
from ml4core.serving.http.answers import CLIENT_GONE, answer
from ml4core.serving.http.chats import open_chat
from ml4core.serving.http.completions import CompletionRequest, open_completion
from ml4core.serving.http.errors import ApiError, ClientGoneError
from ml4core.serving.http.middleware import Front
from ml4core.serving.http.page import Page
from ml4core.serving.http.requests import make_header
from ml4core.serving.http.service import Service
from ml4core.serving.http.tracing import Tracer
from ml4core.serving.process.inbox import EngineGoneError
from ml4core.serving.protocol import ChatRequest, read_body

BodyT = TypeVar("BodyT", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service, tracer: Tracer | None = None) -> Any:
    """The ASGI application of a service."""
    app = FastAPI(title="ml4core", version=__version__, docs_url=None, redoc_url=None)
    routes = Routes(service)
    for path, method, handler, summary, schema in routes.table():
        extra = None if schema is None else _documented(schema)
        app.add_api_route(
            path,
            handler,
            methods=[method],
            summary=summary,
            openapi_extra=extra,
            response_class=Response,
            response_model=None,
        )
    ours = (ApiError, RequestError, ClientGoneError, EngineGoneError)
    for kind in (*ours, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    return Front(app, service, tracer)


class Routes:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[tuple[str, str, Handler, str, type[BaseModel] | None]]:
        """Path, method, handler, summary and body of each."""
        service = self._service
        states = status.States(service)
        return [
            ("/v1/chat/completions", "POST", self.chat, "The next message of a chat", ChatRequest),
            ("/v1/completions", "POST", self.complete, "Go on with a text", CompletionRequest),
            ("/v1/models", "GET", states.models, "Names that requests may use", None),
            ("/v1/models/{name:path}", "GET", states.model, "One of them", None),
            ("/tokenize", "POST", self.tokenize, "Token ids of a text or a chat", None),
            ("/detokenize", "POST", self.detokenize, "The text of token ids", None),
            ("/health", "GET", states.health, "Whether the server lives", None),
            ("/ready", "GET", states.ready, "Whether it answers: by a step of one token", None),
            ("/version", "GET", states.version, "Versions", None),
            ("/metrics", "GET", states.metrics, "Metrics for Prometheus", None),
            ("/report", "GET", states.report, "What runs where, and why", None),
            ("/", "GET", Page().get, "A page to try the model", None),
        ]

    async def chat(self, request: Request) -> Response:
        body, size = await self._read(request, ChatRequest)
        header = make_header(self._service, body, "chatcmpl", request.scope["ml4core.id"])
        exchange, form = await open_chat(self._service, body, size, header)
        return await answer(request, exchange, form)

    async def complete(self, request: Request) -> Response:
        body, size = await self._read(request, CompletionRequest)
        header = make_header(self._service, body, "cmpl", request.scope["ml4core.id"])
        exchange, form = await open_completion(self._service, body, size, header)
        return await answer(request, exchange, form)

    async def tokenize(self, request: Request) -> Response:
        given, size = await self._decoded(request)
        return await self._service.read(size, lambda: tokens.tokenize(self._service, given))

    async def detokenize(self, request: Request) -> Response:
        given, size = await self._decoded(request)
        return await self._service.read(size, lambda: tokens.detokenize(self._service, given))

    async def _decoded(self, request: Request) -> tuple[Any, int]:
        raw = await bodies.read(request, self._service.server.max_request_bytes)
        return await self._service.read(len(raw), lambda: bodies.decode(raw)), len(raw)

    async def _read(self, request: Request, kind: type[BodyT]) -> tuple[BodyT, int]:
        raw = await bodies.read(request, self._service.server.max_request_bytes)
        read = self._service.read
        return await read(len(raw), lambda: read_body(kind, bodies.decode(raw))), len(raw)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=CLIENT_GONE)
    return errors.answer(error)


def _documented(schema: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}
