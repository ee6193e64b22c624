"""A plan's data as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from ml4core.cli import output

Facts = Mapping[str, Any]


def text(facts: Facts, stream: TextIO) -> str:
    """Everything that ``ml4core.planning.report.to_json`` says, but for the assumptions."""
    parts = [
        output.table(("", ""), list(_top(facts)), stream),
        _weights(facts, stream),
        _caches(facts, stream),
        _memory(facts, stream),
    ]
    if facts["capacity"] is not None:
        parts.append(_capacity(facts, stream))
    parts += [output.printable(f"note: {note}\n") for note in facts["notes"]]
    return "\n".join(parts)


def _top(facts: Facts) -> Iterator[tuple[str, str]]:
    ranks, limits = facts["ranks"], facts["limits"]
    experts = f", EP {ranks['expert_parallel_size']}" * (ranks["expert_parallel_size"] > 1)
    yield "model", output.printable(facts["model"])
    yield "weights", facts["variant"] or "as the tensors say"
    yield (
        "ranks",
        f"{ranks['world']}: TP {ranks['tensor_parallel_size']}, "
        f"DCP {ranks['decode_context_parallel_size']}, "
        f"PCP {ranks['prefill_context_parallel_size']}, DP {ranks['data_parallel_size']}{experts}",
    )
    yield "longest context", f"{limits['max_model_len']:,}"
    yield "requests at most", f"{limits['max_num_seqs']:,}"
    yield "rows a step", f"{limits['max_num_batched_tokens']:,}"


def _weights(facts: Facts, stream: TextIO) -> str:
    rows = [
        (
            one["part"],
            _gib(one["checkpoint"]),
            _gib(one["held"]) if one["loaded"] else "not loaded",
            _gib(one["rank"]) if one["loaded"] else "",
            one["shared"],
        )
        for one in facts["weights"]["parts"]
    ]
    held = sum(one["held"] for one in facts["weights"]["parts"])
    totals = (_gib(facts["weights"]["checkpoint"]), _gib(held), _gib(facts["weights"]["rank"]))
    columns = ("WEIGHTS, GIB", "CHECKPOINT", f"HELD, {facts['held'].upper()}", "A RANK", "SHARED")
    return output.table(columns, [*rows, ("in all", *totals, "")], stream)


def _caches(facts: Facts, stream: TextIO) -> str:
    rows = []
    for one in facts["kv"]["groups"]:
        window = f"{one['window']:,} + {one['rows_beside_window']}" if one["window"] else "all"
        rows.append(
            (
                one["group"],
                str(one["layers"]),
                f"{one['layout']}, {one['row']:,}",
                f"{one['bytes_per_token']:,}",
                window,
                f"{one['pages_a_request']:,}",
                "" if one["pages"] is None else f"{one['pages']:,}",
                "" if one["bytes"] is None else _gib(one["bytes"]),
                one["shared"],
            )
        )
    columns = (
        "CACHES",
        "LAYERS",
        "ROW, BYTES",
        "BYTES A TOKEN",
        "ROWS KEPT",
        "PAGES A REQUEST",
        "PAGES",
        "GIB A RANK",
        "SHARED",
    )
    return output.table(columns, rows, stream)


def _memory(facts: Facts, stream: TextIO) -> str:
    memory, reserve = facts["memory"], facts["reserve"]
    rows = [("weights", _gib(facts["weights"]["rank"]), "")]
    rows += [
        (f"reserve: {name}", _gib(size), reserve["formulas"][name])
        for name, size in reserve["terms"].items()
    ]
    if memory["device"] is not None:
        share = memory["gpu_memory_utilization"]
        rows.append(("usable", _gib(memory["usable"]), f"{share:g} of {_gib(memory['device'])}"))
    if memory["for_caches"] is not None:
        rows.append(("for caches", _gib(memory["for_caches"]), ""))
    rows.append(("needed for one request", _gib(memory["required"]), "weights, reserve, caches"))
    return output.table(("MEMORY OF A RANK", "GIB", ""), rows, stream)


def _capacity(facts: Facts, stream: TextIO) -> str:
    capacity, sizes = facts["capacity"], facts["kv"]["bytes_per_token"]
    rows = [
        ("tokens", f"{capacity['tokens']:,}"),
        ("longest context", f"{capacity['longest_context']:,}"),
    ]
    rows += [
        (f"requests of {one['context']:,} tokens", f"{one['requests']:,}")
        for one in capacity["requests"]
    ]
    rows += [
        (f"tokens with {name}, {sizes[name]:,} bytes each", f"{tokens:,}")
        for name, tokens in capacity["tokens_by_layout"].items()
    ]
    return output.table(("CAPACITY", ""), rows, stream)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.3f}"
