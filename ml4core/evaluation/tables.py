"""Figures of ``ml4 eval`` as tables of texts, for the terminal and for a model card."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml4core.evaluation.perplexity import STORED

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(facts: Facts) -> list[Table]:
    """One for each part that was measured."""
    made = {
        "ppl": perplexity,
        "retrieval": retrieval,
        "tools": tools,
        "draft": drafts,
        "speed": speed,
    }
    return [make(facts[part]) for part, make in made.items() if facts.get(part)]


def perplexity(scores: Sequence[Facts]) -> Table:
    """A row for each form and layout; changes are against the first one."""
    runs: dict[tuple[str, str], dict[str, Facts]] = {}
    for score in scores:
        runs.setdefault((score["weights"], score["kv"]), {})[score["text"]] = score
    first = next(iter(runs.values()))
    rows = []
    for (_, kv), by_text in runs.items():
        one = next(iter(by_text.values()))
        cells = [
            weights_name(one),
            f"{one['weight_bytes'] / 1e6:.1f}",
            f"{kv}, {one['kv_bytes']:,}",
        ]
        for name, score in by_text.items():
            cells += [f"{score['nats']:.4f}", f"{score['ppl']:.2f}"]
            cells.append("" if by_text is first else f"{change(score, first[name]):+.2%}")
        rows.append(tuple(cells))
    heads = [part for name in first for part in (f"{name}, nats", "perplexity", "change")]
    counts = ", ".join(f"{score['tokens']:,} of {name}" for name, score in first.items())
    return Table(
        f"Perplexity, tokens: {counts}",
        ("weights", "MB", "cache, bytes a token", *heads),
        tuple(rows),
    )


def weights_name(score: Facts) -> str:
    """What the matrices are, of a score."""
    if score["weights"] != STORED:
        return str(score["weights"])
    return f"{STORED} ({', '.join(name for name in score['formats'] if name != 'fp32')})"


def change(score: Facts, base: Facts) -> float:
    """Of the perplexity, as a part of ``base``'s."""
    return math.expm1(score["nats"] - base["nats"])


def retrieval(findings: Sequence[Facts]) -> Table:
    depths = sorted({depth for one in findings for depth in one["depths"]})
    rows = []
    for one in findings:
        found = dict(zip(one["depths"], one["found"], strict=True))
        cells = [("yes" if found[d] else "no") if d in found else "" for d in depths]
        rows.append((f"{one['length']:,}", f"{sum(one['found'])} of {len(one['found'])}", *cells))
    columns = ("prompt tokens", "found", *(f"{depth:.0%}" for depth in depths))
    return Table("A number told at a depth of a prompt, found again", columns, tuple(rows))


def tools(rates: Sequence[Facts]) -> Table:
    rows = tuple(
        (one["kind"], str(len(one["valid"])), _part(one["valid"]), _part(one["right"]))
        for one in rates
    )
    return Table("Answers of a form", ("kind", "prompts", "valid", "right"), rows)


def drafts(found: Sequence[Facts]) -> Table:
    places = max((len(one["by_position"]) for one in found), default=0)
    rows = []
    for one in found:
        parts = [f"{part:.0%}" for part in one["by_position"]]
        cells = parts + [""] * (places - len(parts))
        rows.append((one["kind"], str(one["windows"]), f"{one['length']:.2f}", *cells))
    heads = (f"place {place + 1}" for place in range(places))
    columns = ("text", "windows", "tokens a window", *heads)
    return Table("Accepted drafts at temperature 0", columns, tuple(rows))


def speed(found: Sequence[Facts]) -> Table:
    rows = []
    for one in found:
        rates = [f"{one[name]['median']:.1f}" for name in ("plain", "drafted")]
        ratios = [
            f"{one[name]['median']:.2f} [{one[name]['low']:.2f} .. {one[name]['high']:.2f}]"
            for name in ("ratio", "cpu_ratio")
        ]
        alike = "yes" if one["alike"] else "no"
        rows.append((one["kind"], f"{one['length']:.2f}", *rates, *ratios, alike))
    columns = (
        "text", "tokens a window", "tokens/s", "with drafts", "ratio", "by CPU time", "same tokens",
    )  # fmt: skip
    return Table("Speed of one request with drafts and without", columns, tuple(rows))


def markdown(table: Table) -> str:
    lines = [f"**{table.title}**", "", _row(table.columns), _row(["---"] * len(table.columns))]
    return "\n".join([*lines, *map(_row, table.rows)]) + "\n"


def cells(facts: Facts) -> Iterator[str]:
    """All texts of all tables, to compare two sets of figures by."""
    for table in tables(facts):
        for row in table.rows:
            yield from row


def _part(values: Sequence[bool]) -> str:
    return f"{sum(values) / len(values):.0%}" if values else ""


def _row(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"
