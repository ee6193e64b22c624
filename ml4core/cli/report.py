"""The start-up report of an engine, as text for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml4core.cli import output
from ml4core.cli.inspect import ranges

PARTS = "parts"
WHOLE_MODEL = "*"
"""Layer kind of ops, which are bound once for all layers."""

_STAGE_COLUMNS = ("STAGE", "STEPS", "LAYERS", "SERVED BY", "CHOSEN BY", "PASSED OVER")
_OP_COLUMNS = ("SERVED BY", "CHOSEN BY", "PASSED OVER", "OPS")


def text(facts: Mapping[str, Any]) -> str:
    """All facts in lines, and the parts of the model in tables, with alike ones in one row."""
    head = output.outline({key: value for key, value in facts.items() if key != PARTS})
    parts = list(facts.get(PARTS, ()))
    ops = [part for part in parts if part["layer_kind"] == WHOLE_MODEL]
    stages = [part for part in parts if part["layer_kind"] != WHOLE_MODEL]
    tables = [(_STAGE_COLUMNS, _stage_rows(stages)), (_OP_COLUMNS, _op_rows(ops))]
    shown = [output.table(columns, rows, sys.stderr) for columns, rows in tables if rows]
    return "\n\n".join([head, *shown])


def _stage_rows(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    layers: dict[tuple[str, ...], set[int]] = {}
    for part in stages:
        layers.setdefault((part["part"], *_served(part), part["step_kind"]), set()).update(
            part["layers"]
        )
    steps: dict[tuple[str, ...], list[str]] = {}
    for (name, *served, step), numbers in layers.items():
        steps.setdefault((name, ranges(numbers), *served), []).append(step)
    return [(name, ", ".join(kinds), *rest) for (name, *rest), kinds in steps.items()]


def _op_rows(ops: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    names: dict[tuple[str, ...], list[str]] = {}
    for part in ops:
        names.setdefault(_served(part), []).append(part["part"])
    return [(*served, ", ".join(found)) for served, found in names.items()]


def _served(part: Mapping[str, Any]) -> tuple[str, str, str]:
    provider = " ".join(word for word in (part["provider"], part.get("version", "")) if word)
    return provider, part["chosen_by"], "\n".join(_passed_over(part.get("rejected", ())))


def _passed_over(rejected: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for candidate in rejected:
        for refusal in candidate["refusals"]:
            yield f"{candidate['provider']}: {refusal['subject']}: {refusal['reason']}"
