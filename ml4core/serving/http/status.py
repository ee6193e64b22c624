"""Endpoints that tell of the server itself."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ml4core import API_VERSION, __version__
from ml4core.serving.http.answers import JsonAnswer
from ml4core.serving.http.errors import ApiError
from ml4core.serving.http.metrics import CONTENT_TYPE
from ml4core.serving.http.service import Service
from ml4core.serving.process.inbox import EngineGoneError


class States:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """200 as long as the engine's process lives and has no fault."""
        if self._service.link.ended is not None:
            raise ApiError(503, self._service.link.ended, code="engine_stopped")
        return JsonAnswer({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 if requests are taken, and a step has been made within the time limit."""
        service = self._service
        if service.trouble is not None:
            code = "engine_stopped" if service.link.ended is not None else "unavailable"
            raise ApiError(503, service.trouble, code=code)
        limit = service.server.ready_timeout_s
        try:
            await service.probe(limit)
        except TimeoutError:
            text = f"no step was made within {limit:g} s: --ready-timeout-s"
            raise ApiError(503, text, code="engine_slow") from None
        except EngineGoneError as error:
            raise ApiError(503, str(error), code="engine_stopped") from error
        return JsonAnswer({"status": "ready"})

    async def version(self, request: Request) -> Response:
        backend = self._service.facts.report["backend"]
        return JsonAnswer(
            {
                "version": __version__,
                "api": API_VERSION,
                "python": platform.python_version(),
                "torch": importlib.metadata.version("torch"),
                "backend": backend,
            }
        )

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=None, headers=_PLAIN)

    async def report(self, request: Request) -> Response:
        return JsonAnswer(self._service.facts.report)

    async def models(self, request: Request) -> Response:
        return JsonAnswer({"object": "list", "data": [self._card(n) for n in self._service.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.check_model(name)
        return JsonAnswer(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "ml4core",
            "root": service.args.model,
            "parent": None,
            "max_model_len": service.facts.max_model_len,
        }


_PLAIN = {"content-type": CONTENT_TYPE}
