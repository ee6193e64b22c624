"""A roofline of ``ml4 bench ops`` as SVG: operations a second over operations a byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 900, 560, 80, 60, 50, 30
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


def roofline(facts: Mapping[str, Any]) -> str:
    """The figure. Ops without arithmetic are left out: they have no place on it."""
    rates = facts["rates"]
    lines = [one for one in facts["ops"] if one["flops"] and one["nbytes"]]
    points = [(one["flops"] / one["nbytes"], one["flops"] / one["median"], one) for one in lines]
    ridge = rates["flops"] / rates["bytes"]
    xs = [x for x, _, _ in points] + [ridge / 8, ridge * 8]
    ys = [y for _, y, _ in points] + [rates["flops"]]
    plane = _Plane(min(xs) / 2, max(xs) * 2, min(ys) / 4, max(ys) * 2)
    ops = sorted({one["op"] for one in lines})
    colours = {op: _COLOURS[i % len(_COLOURS)] for i, op in enumerate(ops)}
    where = facts["environment"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(str(where["device"]))}, '
        f"{escape(str(where['backend']))}: {rates['bytes'] / 1e9:,.0f} GB/s, "
        f"{rates['flops'] / 1e12:,.2f} Tflop/s</text>",
        *plane.grid(),
        plane.line(
            [(plane.left, plane.left * rates["bytes"]), (ridge, rates["flops"]),
             (plane.right, rates["flops"])]
        ),
    ]  # fmt: skip
    for x, y, one in points:
        title = f"{one['name']}: {one['median'] * 1e6:,.1f} us, {one['of_floor']:.0%} of the floor"
        place = f'cx="{plane.x(x):.1f}" cy="{plane.y(y):.1f}" r="4.5"'
        parts.append(
            f'<circle {place} fill="{colours[one["op"]]}" fill-opacity="0.8">'
            f"<title>{escape(title)}</title></circle>"
        )
    for i, op in enumerate(ops):
        y = TOP + 14 + 16 * i
        parts.append(f'<circle cx="{LEFT + 14}" cy="{y - 4}" r="4.5" fill="{colours[op]}"/>')
        parts.append(f'<text x="{LEFT + 24}" y="{y}">{escape(op)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Plane:
    """Logarithmic axes."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        self.left, self.right, self.low, self.high = left, right, low, high

    def x(self, value: float) -> float:
        share = math.log(value / self.left) / math.log(self.right / self.left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def line(self, points: list[tuple[float, float]]) -> str:
        text = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline points="{text}" fill="none" stroke="black" stroke-width="1.5"/>'

    def grid(self) -> list[str]:
        found = []
        low, high = HEIGHT - BOTTOM, TOP
        for power in _powers(self.left, self.right):
            x = self.x(10.0**power)
            found += [
                f'<line x1="{x:.1f}" y1="{low}" x2="{x:.1f}" y2="{high}" stroke="#ddd"/>',
                f'<text x="{x:.1f}" y="{low + 18}" text-anchor="middle">1e{power}</text>',
            ]
        for power in _powers(self.low, self.high):
            y = self.y(10.0**power)
            found += [
                f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>',
                f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>',
            ]
        middle = (LEFT + WIDTH - RIGHT) // 2
        found.append(
            f'<text x="{middle}" y="{HEIGHT - 16}" text-anchor="middle">operations a byte</text>'
        )
        found.append(
            f'<text x="20" y="{HEIGHT // 2}" text-anchor="middle" '
            f'transform="rotate(-90 20 {HEIGHT // 2})">operations a second</text>'
        )
        return found


def _powers(low: float, high: float) -> range:
    return range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
