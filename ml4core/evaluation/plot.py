"""Figures of ``ml4 eval`` as one SVG picture: bars, and a grid of what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from ml4core.evaluation.tables import change, weights_name

Facts = Mapping[str, Any]

WIDTH, ROW, LABEL, BAR = 780, 22, 290, 400
_INK, _FILL, _EMPTY = "#24292f", "#3b6ea8", "#dfe5ec"


class Picture:
    """Rows of text, bars and cells below one another. All sizes are pixels."""

    def __init__(self) -> None:
        self._shapes: list[str] = []
        self._y = 8

    def title(self, text: str) -> None:
        self._y += 14
        self._text(8, text, weight="bold")
        self._y += ROW

    def bar(self, label: str, part: float, told: str) -> None:
        """``part``: 0 to 1 of the width."""
        self._text(8, label)
        length = max(1.0, min(1.0, part) * BAR)
        self._box(LABEL, length, _FILL)
        self._text(LABEL + length + 6, told)
        self._y += ROW

    def cells(self, label: str, filled: Sequence[bool], told: str) -> None:
        self._text(8, label)
        width = BAR / max(1, len(filled))
        for place, full in enumerate(filled):
            self._box(LABEL + place * width, width - 3, _FILL if full else _EMPTY)
        self._text(LABEL + BAR + 6, told)
        self._y += ROW

    def svg(self) -> str:
        height = self._y + 8
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">'
        )
        ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
        return "\n".join([head, ground, *self._shapes, "</svg>"]) + "\n"

    def _text(self, x: float, text: str, weight: str = "normal") -> None:
        self._shapes.append(
            f'<text x="{x:.1f}" y="{self._y + 14}" fill="{_INK}" font-weight="{weight}">'
            f"{escape(text)}</text>"
        )

    def _box(self, x: float, width: float, fill: str) -> None:
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{self._y + 2}" width="{width:.1f}" height="{ROW - 6}" '
            f'fill="{fill}"/>'
        )


def plot(facts: Facts) -> str:
    """An SVG document of all parts that were measured."""
    picture = Picture()
    if facts.get("ppl"):
        _perplexity(picture, facts["ppl"])
    if facts.get("retrieval"):
        picture.title("Found again, from the beginning of a prompt to its end")
        for one in facts["retrieval"]:
            told = f"{sum(one['found'])} of {len(one['found'])}"
            picture.cells(f"{one['length']:,} tokens", one["found"], told)
    if facts.get("tools"):
        picture.title("Answers of a form that are right")
        for one in facts["tools"]:
            part = sum(one["right"]) / max(1, len(one["right"]))
            picture.bar(one["kind"], part, f"{part:.0%}")
    if facts.get("draft"):
        picture.title("Tokens a window of drafts gives")
        most = max(1 + len(one["by_position"]) for one in facts["draft"])
        for one in facts["draft"]:
            picture.bar(one["kind"], one["length"] / most, f"{one['length']:.2f}")
    return picture.svg()


def _perplexity(picture: Picture, scores: Sequence[Facts]) -> None:
    """By how much each form is worse than the first; on the mean over texts."""
    first = {score["text"]: score for score in scores if _run(score) == _run(scores[0])}
    changes: dict[tuple[str, str], list[float]] = {}
    for score in scores:
        label = (weights_name(score), score["kv"])
        changes.setdefault(label, []).append(change(score, first[score["text"]]))
    means = {label: sum(some) / len(some) for label, some in changes.items()}
    most = max(max(abs(mean) for mean in means.values()), 1e-4)
    picture.title("Change of perplexity, by weights and cache")
    for (weights, kv), mean in means.items():
        picture.bar(f"{weights}, {kv}", abs(mean) / most * 0.8, f"{mean:+.2%}")


def _run(score: Facts) -> tuple[str, str]:
    return score["weights"], score["kv"]
