"""Packages that the server needs beside those of the core."""

from __future__ import annotations

import importlib


class MissingPackageError(ImportError):
    """A package is not installed; the text has the command that installs it."""


def need(module: str, what: str, extra: str) -> None:
    """Raises ``MissingPackageError`` if ``module`` can't be imported."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{what} needs {module.replace('_', '-')} ({error}); pip install 'ml4core[{extra}]'"
        ) from error


def need_tracing() -> None:
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        need(module, "--otlp-traces-endpoint", "otel")


def need_server() -> None:
    for module in ("fastapi", "uvicorn", "httptools", "prometheus_client"):
        need(module, "ml4 serve", "serve")
