"""Which release of the backend this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    try:
        return f"version {version('ml4core-tpu')}"
    except PackageNotFoundError:
        return "this checkout"
