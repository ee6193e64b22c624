"""What a replica wants of the next step, and the step in which all have room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ml4core.api import Segment, StepShape


class Wish(NamedTuple):
    """A step of one replica, or the one that all run.

    Attributes:
        shape: its own; or the largest of all, size by size.
        draws: whether a request draws, for which drafts are made then.
    """

    shape: StepShape
    draws: bool


def joined(wishes: Sequence[Wish]) -> Wish:
    """The step in which each of them has room. ``ValueError`` for groups that differ."""
    shapes = [one.shape for one in wishes]
    decode, verify, prefill = (_largest([s[i] for s in map(_segments, shapes)]) for i in range(3))
    pages = shapes[0].pages
    for shape in shapes[1:]:
        pages = tuple(
            (name, max(count, other[1]))
            for (name, count), other in zip(pages, shape.pages, strict=True)
        )
    logits = max(shape.logits for shape in shapes)
    # As in a step of one replica: without chunks logits follow from the segments.
    if not prefill.rows:
        logits = max(logits, decode.requests + verify.rows)
    images = max(shape.images for shape in shapes)
    shape = StepShape(decode, verify, prefill, pages, logits, images)
    return Wish(shape, any(one.draws for one in wishes))


def to_json(wish: Wish) -> list[Any]:
    shape = wish.shape
    segments = [[one.requests, one.rows, one.max_rows] for one in _segments(shape)]
    pages = [list(one) for one in shape.pages]
    return [segments, pages, shape.logits, shape.images, wish.draws]


def from_json(data: Any) -> Wish:
    """Raises ``ValueError`` or ``TypeError`` for what is no wish."""
    segments, pages, logits, images, draws = data
    decode, verify, prefill = (Segment(*map(int, one)) for one in segments)
    groups = tuple((str(name), int(count)) for name, count in pages)
    shape = StepShape(decode, verify, prefill, groups, int(logits), int(images))
    return Wish(shape, bool(draws))


def _segments(shape: StepShape) -> tuple[Segment, Segment, Segment]:
    return shape.decode, shape.verify, shape.prefill


def _largest(segments: Sequence[Segment]) -> Segment:
    return Segment(
        max(one.requests for one in segments),
        max(one.rows for one in segments),
        max(one.max_rows for one in segments),
    )
