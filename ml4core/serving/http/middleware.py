"""What stands before all routes: ids, keys, the log, and the last guard against errors."""

from __future__ import annotations

import hmac
import logging
import time
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ml4core.serving.http import errors
from ml4core.serving.http.answers import DIRECT
from ml4core.serving.http.errors import ApiError
from ml4core.serving.http.requests import good_id, new_id
from ml4core.serving.http.service import Service
from ml4core.serving.http.tracing import Tracer

OPEN = frozenset({"/", "/health", "/ready", "/version", "/metrics"})
"""Paths that need no key: probes and scrapers have none."""
ID_HEADER = "x-request-id"

_LOG = logging.getLogger("ml4core.serving")


class Front:
    """The outermost application."""

    def __init__(self, app: FastAPI, service: Service, tracer: Tracer | None) -> None:
        self._app: ASGIApp = app
        self._service = service
        self._tracer = tracer
        self._keys = [key.encode() for key in service.server.api_key]
        self._paths: frozenset[str] = frozenset(
            route.path for route in app.routes if hasattr(route, "path")
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.monotonic()
        given = headers.get(ID_HEADER, "")
        scope["ml4core.id"] = own = given if good_id(given) else new_id()
        scope[DIRECT] = send
        status = 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = own
            await send(message)

        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await errors.answer(refusal)(scope, receive, tell)
            else:
                await self._app(scope, receive, tell)
        except Exception as error:
            _LOG.exception("a request failed", extra={"fields": {"id": own}})
            if not status:
                await errors.answer(error)(scope, receive, tell)
        finally:
            self._note(scope, own, status, time.monotonic() - began)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if not self._keys or scope["path"] in OPEN:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        good = [hmac.compare_digest(key.strip().encode(), one) for one in self._keys]
        if scheme.lower() == "bearer" and any(good):
            return None
        found = "a key that is not known" if key else "missing"
        return ApiError(
            401,
            f"Authorization: {found} (works: Bearer and a key of --api-key)",
            param="Authorization",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _note(self, scope: Scope, own: str, status: int, seconds: float) -> None:
        path = scope["path"]
        known = path if path in self._paths else "other"
        self._service.metrics.requests.labels(known, str(status)).inc()
        facts: dict[str, Any] = scope.get("state", {}).get("ml4core", {})
        if self._tracer is not None:
            self._tracer.request(scope, own, status, seconds, facts)
        if status < 400 and path in OPEN:  # probes would fill the log
            return
        fields = {
            "id": own,
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 4),
        } | facts
        _LOG.info("request", extra={"fields": fields})
