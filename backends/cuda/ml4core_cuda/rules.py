"""Which provider serves a stage: what was measured, as a table.

A rule covers the step shapes from so many rows on; the last that fits decides. A peer is bound
where a measurement on that architecture put it before our own kernel, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

OURS = "triton"


@dataclass(frozen=True)
class Rule:
    """A choice and its ground.

    Attributes:
        rows: rows of a step from which it holds.
        measured: the figures, in words.
    """

    stage: str
    arch: str
    rows: int
    provider: str
    measured: str


RULES: tuple[Rule, ...] = tuple(
    Rule(stage, arch, 1, OURS, "no measurement of a peer beside it yet")
    for arch in ("sm_90", "sm_100")
    for stage in ("select", "sparse_mla")
)


def rule_for(stage: str, arch: str, rows: int) -> Rule:
    """The rule of a stage, architecture and count of rows. ``KeyError`` where there is none."""
    fits = [r for r in RULES if (r.stage, r.arch) == (stage, arch) and r.rows <= max(1, rows)]
    if not fits:
        raise KeyError(f"no rule for stage {stage!r} on {arch}")
    return max(fits, key=lambda rule: rule.rows)
