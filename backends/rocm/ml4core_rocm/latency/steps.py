"""Which steps go the specialised way. What is asked is the same on all ranks, so they decide
alike without asking each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from ml4core.api import StepShape

ROWS = (1, 2, 4)
"""Requests of a pure decode step for which there is a kernel."""


@dataclass(frozen=True)
class Decision:
    """``mono``: the specialised way. ``why`` says why not, empty if so."""

    mono: bool
    why: str = ""


MONO = Decision(True)


@dataclass(frozen=True)
class StepFacts:
    """What decides beside the shape.

    Attributes:
        caches_unchanged: whether the caches are those that were bound.
        graph: how the step is run: ``none``, ``full`` or ``piecewise``.
    """

    caches_unchanged: bool = True
    graph: str = "none"


def plan(shape: StepShape, window: int | None, facts: StepFacts) -> Decision:
    """``window``: rows of a verify block, None without drafts."""
    if not facts.caches_unchanged:
        return Decision(False, "the caches are others than were bound")
    if facts.graph not in ("none", "full"):
        return Decision(False, f"a {facts.graph} graph would cut a layer")
    if shape.prefill.rows:
        return Decision(False, f"{shape.prefill.rows} rows of prompts are among its rows")
    decode, verify = shape.decode, shape.verify
    if decode.rows and verify.rows:
        return Decision(False, "decodes and verify blocks are mixed")
    if verify.rows:
        if verify.requests != 1:
            return Decision(False, f"{verify.requests} verify blocks; one is served")
        if verify.rows != window:
            return Decision(False, f"a verify block of {verify.rows} rows, not of {window}")
        return MONO
    if decode.rows not in ROWS:
        sizes = ", ".join(map(str, ROWS))
        return Decision(False, f"{decode.rows} decodes; {sizes} are served")
    return MONO
