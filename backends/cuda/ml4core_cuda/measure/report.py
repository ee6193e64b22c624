"""The journal as a result: verdicts, the table of times, and measured sizes as data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ml4core_cuda import tuned
from ml4core_cuda.measure.journal import Facts

_COPY_RATE = 4.25e12
"""Bytes a second, read and written, where none was measured: of one H200."""


def gathered(lines: Iterable[Facts], works: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that was found, by work, in the order of ``works``: name, part, nbytes, flops,
    rate, target and target_us of each.
    """
    done = {line["key"]: line for line in lines if line["what"] == "end"}
    rate = done.get("copy", {}).get("bytes_per_second") or _COPY_RATE
    rows = []
    for work in works:
        name = work["name"]
        row: dict[str, Any] = dict(work)
        row["check"] = _bare(done.get(f"check/{name}"))
        own = done.get(f"time/{name}")
        row["ours"] = _bare(own)
        found = [line for key, line in done.items() if key.startswith(f"tuned/{name}/")]
        row["tuned"] = [_bare(line) for line in found]
        best = min((us for us in (_us(own), *(line["us"] for line in found)) if us), default=None)
        row["best_us"] = best
        row["floor_us"] = max(work["nbytes"] / rate * 1e6, work["flops"] / work["rate"] * 1e6)
        row["of_floor"] = row["floor_us"] / best if best and row["floor_us"] else None
        start = f"peer/{name}/"
        row["peers"] = {
            key[len(start) :]: _bare(line) for key, line in done.items() if key.startswith(start)
        }
        row["kernels"] = _bare(done.get(f"kernels/{name}"))
        rows.append(row)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _bare(done.get("device")),
        "copy_bytes_per_second": rate,
        "works": rows,
        "failed": {key: line["failed"] for key, line in done.items() if "failed" in line},
    }


def table(found: Mapping[str, Any]) -> str:
    """A line a work that was timed, and one for each that is wrong or failed."""
    head = f"{'work':48} {'ours':>9} {'best':>9} {'floor':>8} {'of it':>6} {'target':>8}  peers"
    lines = [head]
    for row in found["works"]:
        check, ours, best = row["check"] or {}, _us(row["ours"]), row["best_us"]
        if "failed" in check:
            lines.append(f"{row['name']:48} FAILED: {check['failed'][:90]}")
            continue
        if check.get("error", 0.0) > 1.0:
            lines.append(f"{row['name']:48} WRONG: {check['error']:.3g} of what is allowed")
            continue
        told = "  ".join(
            f"{name} {_us(one):.1f} ({_us(one) / best:.2f}x)" if _us(one) and best
            else f"{name}: {str(one.get('failed'))[:40]}"
            for name, one in row["peers"].items()
        )  # fmt: skip
        share = f"{row['of_floor']:.0%}" if row["of_floor"] else ""
        lines.append(
            f"{row['name']:48} {_text(ours)} {_text(best)} {row['floor_us']:8.1f} {share:>6} "
            f"{row['target_us']:8.1f}  {told}"
        )
    return "\n".join(lines)


def measured(found: Mapping[str, Any], lines: Iterable[Facts]) -> str:
    """The text of ``data/measured.json`` with what this run found put in: sizes that beat the
    default by 2% or more.
    """
    device = found["device"] or {}
    name = device.get("name", "")
    tables = dict(tuned.measured())
    table = tables.get(name, tuned.Table())
    kernels = {kernel: dict(shapes) for kernel, shapes in table.kernels.items()}
    for line in lines:
        if line["what"] != "end" or not line["key"].startswith("tuned/") or "sizes" not in line:
            continue
        own, us = float(line["default_us"]), float(line["us"])
        shapes = kernels.setdefault(line["kernel"], {})
        sizes = line["sizes"] if us < 0.98 * own else {}
        source = tuned.source_of(line["kernel"])
        shapes[line["shape"]] = tuned.Entry(sizes, min(us, own), own, source)
    rules = {**table.rules, **rules_of(found)}
    taken = f"{found['date']}, torch {device.get('torch')}, triton {device.get('triton')}"
    tables[name] = tuned.Table(taken, kernels, rules)
    return tuned.render(tables)


_SPARSE = re.compile(r"sparse_mla fp8_ds_mla (\d+) heads (\d+) rows")
_PRODUCT = re.compile(r"gemm fp8_block 6144x(6144) (\d+) rows act fp8_block")
_RULED = ((_SPARSE, "sparse_mla/{0} heads", "FlashMLA"), (_PRODUCT, "gemm", "DeepGEMM"))
"""Works that decide between our kernel and a library's: the rule's name, and the library."""


def rules_of(found: Mapping[str, Any]) -> dict[str, tuple[tuple[int, str, str], ...]]:
    """Who serves from how many rows on: a library where it was right, and faster than ours by 3%
    or more.
    """
    rules: dict[str, list[tuple[int, str, str]]] = {}
    for row in found["works"]:
        for pattern, name, library in _RULED:
            match = pattern.fullmatch(row["name"])
            theirs = row["peers"].get(library)
            if match is None or not row["best_us"] or not _us(theirs):
                continue
            right = (theirs or {}).get("error", 0.0) <= 1.0
            figures = f"{row['best_us']:.1f} us of ours, {_us(theirs):.1f} of {library}"
            wins = right and _us(theirs) < 0.97 * row["best_us"]
            each = rules.setdefault(name.format(*match.groups()), [])
            each.append((int(match[2]), library if wins else "triton", figures))
    return {name: tuple(sorted(each)) for name, each in rules.items()}


def _us(facts: Mapping[str, Any] | None) -> float:
    return float((facts or {}).get("median_us") or 0.0)


def _text(us: float | None) -> str:
    return f"{us:9.1f}" if us else f"{'':9}"


def _bare(line: Facts | None) -> Facts | None:
    if line is None:
        return None
    return {key: value for key, value in line.items() if key not in ("what", "key")}
