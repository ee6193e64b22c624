"""Figures of ``ml4 bench step`` as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TextIO

from ml4core.cli import output

Facts = Mapping[str, Any]

_JUDGED = MappingProxyType({"wall": "ratio", "cpu": "cpu_ratio"})


def text(facts: Facts, stream: TextIO) -> str:
    """Every part that was measured. A figure in brackets is the range without the outer tenths."""
    parts = [output.table(("", ""), list(_environment(facts["environment"])), stream)]
    for name, table in (("host", _host), ("model", _model), ("load", _load), ("compare", _compare)):
        if name in facts:
            parts.append(table(facts[name], stream))
    return "\n".join(parts)


def _environment(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "date", facts["date"]
    yield "backend", f"{facts['backend']} on {facts['device']} ({facts['device_kind']})"
    yield "host", f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads used"
    yield "versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    yield "time", f"{facts['seconds']} s, {facts['cpu_seconds']} s of a core"
    if facts["load"] is not None:
        yield (
            "load",
            f"{facts['load']} before, {facts['load_after']} after: processes at work, ours too",
        )


def _host(facts: list[Facts], stream: TextIO) -> str:
    rows = [
        (
            str(one["requests"]),
            "one kept in flight" if one["overlap"] else "one after the other",
            _spread(one["seconds"], 1e3, 3),
            "" if one["target"] is None else f"{one['target'] * 1e3:g}",
            _met(one["target"], -one["seconds"]["median"], lower=True),
        )
        for one in facts
    ]
    columns = ("HOST: RUNNING REQUESTS", "STEPS", "MS A STEP", "TARGET", "")
    return output.table(columns, rows, stream)


def _model(facts: Facts, stream: TextIO) -> str:
    head = f"model {facts['name']}, {facts['dtype']}, cache {facts['kv_layout']}\n"
    contexts = [
        (
            str(one["context"]),
            _spread(one["prefill"], 1e3, 0),
            f"{one['context'] / one['prefill']['median']:,.0f}",
            _spread(one["decode"], 1e3, 2),
            f"{1 / one['decode']['median']:,.1f}",
            f"{1e3 * one['prefill_cpu']['median']:,.0f}",
            f"{1e3 * one['decode_cpu']['median']:,.2f}",
        )
        for one in facts["contexts"]
    ]
    batches = [
        (
            str(one["requests"]),
            str(one["context"]),
            _spread(one["prefill"], 1, 0),
            _spread(one["decode"], 1, 1),
            f"{one['prefill_cpu']['median']:,.0f}",
            f"{one['decode_cpu']['median']:,.1f}",
        )
        for one in facts["batches"]
    ]
    cpu = ("BY CPU TIME", "")
    one = ("CONTEXT", "PROMPT, MS", "TOKENS/S", "A TOKEN BEHIND IT, MS", "TOKENS/S", *cpu)
    many = ("REQUESTS", "PROMPT EACH", "PROMPT TOKENS/S", "OUTPUT TOKENS/S", *cpu)
    return "\n".join(
        [output.printable(head), output.table(one, contexts, stream),
         output.table(many, batches, stream)]
    )  # fmt: skip


def _load(facts: Facts, stream: TextIO) -> str:
    rows = [
        ("checkpoint on disk", _mib(facts["file"])),
        ("model in memory", _mib(facts["model"])),
        ("peak above the start", _mib(facts["peak"] - facts["before"])),
        ("beside the model", _mib(facts["beside"])),
        (
            "target: the largest layer and tensor",
            f"{_mib(facts['target'])} {_met(facts['target'], -facts['beside'], lower=True)}",
        ),
    ]
    return output.table(("LOADING", "MIB"), rows, stream)


def _compare(facts: Facts, stream: TextIO) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    rows = [
        (
            one["case"],
            _spread(one["ours"], 1, 1),
            _spread(one["theirs"], 1, 1),
            _spread(one["ratio"], 1, 2),
            _spread(one["cpu_ratio"], 1, 2),
            f"{one['target']:g}",
            _met(one["target"], one[_JUDGED[one["judged"]]]["median"]),
        )
        for one in facts["comparisons"]
    ]
    columns = ("COMPARED", "OURS, TOKENS/S", "THEIRS", "RATIO", "BY CPU TIME", "TARGET", "")
    head = f"{versions}, {facts['model']}; {facts['alike']:.1%} of the tokens alike\n"
    return f"{output.printable(head)}\n{output.table(columns, rows, stream)}"


def _spread(value: Facts, scale: float, digits: int) -> str:
    middle, low, high = (f"{scale * value[name]:,.{digits}f}" for name in ("median", "low", "high"))
    return f"{middle} [{low} .. {high}]"


def _met(target: float | None, value: float, *, lower: bool = False) -> str:
    """``value`` is negative where less is better."""
    if target is None:
        return ""
    return "met" if value >= (-target if lower else target) else "missed"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
