"""OpenTelemetry traces, by option: a span for each request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from ml4core import __version__

_NAMES: Mapping[str, str] = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "first_token_s": "gen_ai.latency.time_to_first_token",
}
"""The conventions' names of what is known of a request."""


class Tracer:
    """Sends spans. ``exporter``: where to, in place of OTLP over HTTP."""

    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        """Raises ``ImportError`` without the packages; see ``need_tracing``."""
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
        resource = Resource.create({"service.name": "ml4core", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ml4core", __version__)
        self._extract = extract
        self._model = model

    def request(
        self, scope: Scope, own: str, status: int, seconds: float, facts: Mapping[str, Any]
    ) -> None:
        """A request that has just been answered."""
        if not facts:  # nothing was generated
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        end = time.time_ns()
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._extract(headers),
            start_time=end - int(seconds * 1e9),
        )
        span.set_attribute("gen_ai.request.id", own)
        span.set_attribute("gen_ai.request.model", self._model)
        span.set_attribute("http.response.status_code", status)
        for name, value in facts.items():
            if value is not None and name in _NAMES:
                told = [str(one) for one in value] if isinstance(value, list) else value
                span.set_attribute(_NAMES[name], told)
        span.end(end)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
