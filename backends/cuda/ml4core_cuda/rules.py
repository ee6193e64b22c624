"""Which provider serves a stage: what was measured, as a table.

A rule covers the step shapes from so many rows on; the last that fits decides. A peer is bound
where a measurement on that device put it before our own kernel, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from ml4core_cuda.tuned import measured

OURS = "triton"


@dataclass(frozen=True)
class Rule:
    """A choice and its ground.

    Attributes:
        rows: rows of a step from which it holds.
        measured: the figures, in words.
    """

    stage: str
    rows: int
    provider: str
    measured: str


def rule_for(stage: str, device_name: str, rows: int, heads: int = 0) -> Rule:
    """The rule of a stage on a device for a count of rows, and of heads where that counts; our own
    kernel where nothing was measured.
    """
    table = measured().get(device_name)
    name = f"{stage}/{heads} heads" if heads else stage
    found = table.rules.get(name, ()) if table is not None else ()
    fits = [Rule(stage, *one) for one in found if one[0] <= max(1, rows)]
    if not fits:
        return Rule(stage, 1, OURS, f"no peer was measured beside it on {device_name}")
    return max(fits, key=lambda rule: rule.rows)
