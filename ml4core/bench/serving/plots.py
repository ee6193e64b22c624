"""Two charts of runs at several concurrencies, as one SVG file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, MARGIN = 460, 320, 56
COLOURS = ("#1f5fa8", "#c2560c", "#3a7d44", "#7a3b8f")

Point = tuple[float, float, str]
"""Where, and what is written beside it."""


def charts(runs: Sequence[Mapping[str, Any]], devices: int) -> str:
    """Tokens a second of a device against tokens a second of a user, a point for each concurrency;
    and the median and last percentile of TTFT and TPOT over concurrency.

    ``runs``: results, each with its ``max_concurrency``.
    """
    front = [
        (1e3 / r["median_tpot_ms"], r["output_throughput"] / devices, f"{r['max_concurrency']}")
        for r in runs
        if r.get("median_tpot_ms")
    ]
    names = sorted({k for r in runs for k in r if k.startswith("p") and k.endswith("_ttft_ms")})
    last = names[-1].split("_")[0] if names else ""
    lines: dict[str, list[Point]] = {}
    for metric in ("ttft", "tpot"):
        for kind, label in (("median", "p50"), (last, last)):
            key = f"{kind}_{metric}_ms"
            points = [(float(r["max_concurrency"]), r[key], "") for r in runs if r.get(key)]
            if points and label:
                lines[f"{metric.upper()} {label}"] = points
    left = _chart(
        {"": front}, "tokens/s of a user", f"tokens/s of a device ({devices})", 0, log=False
    )
    right = _chart(lines, "requests at once", "milliseconds", WIDTH, log=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="#fff"/>'
        f"\n{left}\n{right}\n</svg>\n"
    )


def _chart(
    lines: Mapping[str, Sequence[Point]], across: str, up: str, offset: int, *, log: bool
) -> str:
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    x, x_ticks = _axis([p[0] for p in points], MARGIN, WIDTH - 16, log=log)
    y, y_ticks = _axis([p[1] for p in points], HEIGHT - MARGIN + 16, 16, log=log)
    floor, parts = HEIGHT - MARGIN + 16, [f'<g transform="translate({offset} 0)">']
    for value in x_ticks:
        parts.append(_text(x(value), floor + 14, _short(value), "middle"))
        parts.append(_line(x(value), floor, x(value), 16))
    for value in y_ticks:
        parts.append(_text(MARGIN - 6, y(value) + 4, _short(value), "end"))
        parts.append(_line(MARGIN, y(value), WIDTH - 16, y(value)))
    for (name, line), colour in zip(lines.items(), COLOURS * 2, strict=False):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b, _ in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for a, b, label in line:
            parts.append(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>')
            if label:
                parts.append(_text(x(a) + 6, y(b) - 6, label, "start"))
        if name:
            a, b, _ = line[-1]
            parts.append(_text(x(a) - 4, y(b) - 7, name, "end", colour))
    parts.append(_text((MARGIN + WIDTH - 16) / 2, HEIGHT - 8, across, "middle"))
    middle = (floor + 16) / 2
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle:.0f})">{escape(up)}</text>'
    )
    return "\n".join([*parts, "</g>"])


def _axis(
    found: Sequence[float], start: float, end: float, *, log: bool
) -> tuple[Callable[[float], float], list[float]]:
    """Where a value stands, and values to write there."""
    if log:
        low, high = min(found), max(found)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [m * 10.0**p for p in powers for m in (1, 2, 5)]
        ticks = [t for t in ticks if low / 2.6 <= t <= high * 2.6]
        first, last = math.log10(min(ticks[0], low)), math.log10(max(ticks[-1], high))
        span = last - first or 1.0
        return lambda v: start + (end - start) * (math.log10(v) - first) / span, ticks
    top = max(found) or 1.0
    step = 10 ** math.floor(math.log10(top))
    step = step / 2 if top / step < 3 else step
    ticks = [step * i for i in range(math.ceil(top / step) + 1)]
    return lambda v: start + (end - start) * v / ticks[-1], ticks


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10000 else f"{value:g}"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#e2e2e2"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
