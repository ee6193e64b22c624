"""The page at ``/``: one file, without anything from elsewhere."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


def page_bytes() -> bytes:
    """Its HTML."""
    return (resources.files("ml4core.serving") / "assets" / "page.html").read_bytes()


class Page:
    """Read once, at the start."""

    def __init__(self) -> None:
        self._bytes = page_bytes()

    async def get(self, request: Request) -> Response:
        return Response(
            self._bytes,
            media_type="text/html; charset=utf-8",
            headers={
                "cache-control": "no-cache",
                "x-content-type-options": "nosniff",
                "x-frame-options": "DENY",
                "referrer-policy": "no-referrer",
            },
        )
