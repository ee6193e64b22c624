"""Errors of what serves text."""

from __future__ import annotations


class EngineClosedError(RuntimeError):
    """The engine was shut down: it takes no requests, and those still open get no answer."""

    def __init__(self, what: str = "the engine") -> None:
        super().__init__(f"{what} is closed; open a new one")
