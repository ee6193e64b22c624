"""The support matrix and the table of what works together, as Markdown made from results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from ml4core.api import VOCABULARY
from ml4core_conformance.check import Status
from ml4core_conformance.report.merge import Column, merge
from ml4core_conformance.results import CheckResult, Result

TITLES: Mapping[str, str] = {
    "op": "Operations",
    "stage": "Fused stages",
    "kv": "Latent cache layouts",
    "index": "Index cache layouts",
    "weights": "Weight formats",
    "act": "Activations",
    "parallel": "Parallelism",
    "spec": "Speculation",
    "feature": "Features",
}
PAIRED = ("kv", "index", "weights", "act", "parallel", "spec", "feature")
"""Prefixes of the words that the table of pairs holds."""

ALTERNATIVES = ("kv", "index", "act")
"""Prefixes of which a deployment has one word."""

PROVEN, DECLARED, BROKEN, REFUSED, WAIVED, UNKNOWN = "✓", "○", "✗", "-", "w", "?"
_LEGEND = (
    f"{PROVEN} checks were made with it, and every one that needs it passes · {DECLARED} declared, "
    f"and no check was made with it · {BROKEN} declared, and a check that needs it fails · "
    f"{WAIVED} a known fault is waived · {REFUSED} not declared, so it is refused · {UNKNOWN} "
    "never run. What core composes for a backend counts as declared."
)
_Evidence = Mapping[frozenset[str], Sequence[Status]]


def to_markdown(results: Iterable[Result], unseen: Sequence[str] = ()) -> str:
    """The page. ``unseen`` are backends to show as never run where no result is of a real device of
    theirs. It depends on the results alone, so that it can be held against what is committed.
    """
    columns = merge(results, (), stale_days=float("inf")).columns
    missing = _missing(columns, unseen)
    lines = [
        "# Support matrix",
        "",
        "<!-- Made by `ml4 conformance matrix`; not to be edited. -->",
        "",
        "Made from capabilities and conformance results, never typed. "
        "[How to read a result](conformance.md).",
        "",
        *_runs(columns, missing),
        "## What each backend supports",
        "",
        _LEGEND,
        "",
        *_support(columns, missing),
        *_together(columns),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _missing(columns: Sequence[Column], unseen: Sequence[str]) -> Mapping[str, str]:
    """Backends without a result of a real device -> the architectures that others stood for."""
    runs = [column.newest for column in columns]
    real = {run.plugin.backend for run in runs if run.device.kind == "real"}
    return {
        name: ", ".join(sorted({run.device.arch for run in runs if run.plugin.backend == name}))
        for name in sorted({*unseen} - real)
    }


def _runs(columns: Sequence[Column], missing: Mapping[str, str]) -> Iterator[str]:
    yield "## Evidence"
    yield ""
    yield "| Backend | Device | Verdict | Checks | Plugin | Suite | Date |"
    yield "|---|---|---|---|---|---|---|"
    for column in columns:
        run = column.newest
        counts = {status: 0 for status in Status}
        for cell in column.cells.values():
            counts[cell.result.status] += 1
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        kind = "" if run.device.kind == "real" else f" ({run.device.kind})"
        plugin = f"{run.plugin.distribution} {run.plugin.version}".strip()
        yield _line(
            f"`{run.plugin.backend}`",
            f"{run.device.name} {run.device.arch}{kind}",
            f"{column.verdict}{_asked(column)}",
            told,
            plugin,
            run.suite,
            run.created[:10],
        )
    for name, arch in missing.items():
        yield _line(f"`{name}`", arch, "NOT-RUN", "", "", "", "")
    yield ""


def _asked(column: Column) -> str:
    """In brackets what runs asked for, where none of those that still count was of the whole
    suite.
    """
    asked = [cell.run.selection for cell in column.cells.values()]
    if any(selection.whole for selection in asked):
        return ""
    return f" ({'; '.join(dict.fromkeys(map(str, asked)))})"


def _support(columns: Sequence[Column], missing: Mapping[str, str]) -> Iterator[str]:
    evidence = [_evidence(column) for column in columns]
    private = {word for column in columns for word in column.newest.capabilities.features}
    words = sorted(VOCABULARY | private)
    for prefix, title in TITLES.items():
        yield f"### {title}"
        yield ""
        never = [f"{name} · {arch}" if arch else name for name, arch in missing.items()]
        yield _line("", *(column.name for column in columns), *never)
        yield "|---" * (1 + len(columns) + len(missing)) + "|"
        for word in words:
            if word.startswith(f"{prefix}:"):
                cells = [
                    _mark(frozenset({word}), column, found)
                    for column, found in zip(columns, evidence, strict=True)
                ]
                yield _line(f"`{word.partition(':')[2]}`", *cells, *[UNKNOWN] * len(missing))
        yield ""


def _together(columns: Sequence[Column]) -> Iterator[str]:
    yield "## What works together"
    yield ""
    yield (
        "For each pair that a backend declares: whether a check that needs both was made, and "
        f"passed. {DECLARED} is declared, and not proven together. A deployment has one cache "
        "layout of a kind and one activation, so pairs of these are left out."
    )
    yield ""
    for column in columns:
        words = [
            word
            for prefix in PAIRED
            for word in sorted(column.newest.capabilities.features)
            if word.startswith(f"{prefix}:") and word != "feature:compose"
        ]
        if len(words) < 2:
            continue
        found = _evidence(column)
        marks = {
            frozenset(pair): _mark(frozenset(pair), column, found)
            for pair in combinations(words, 2)
        }
        yield f"### {column.name}"
        yield ""
        yield _line("", *(f"`{word}`" for word in words[:-1]))
        yield "|---" * len(words) + "|"
        for row, word in enumerate(words[1:], 1):
            cells = [
                "" if _exclusive(word, other) else marks[frozenset({word, other})]
                for other in words[:row]
            ]
            yield _line(f"`{word}`", *cells, *[""] * (len(words) - 1 - row))
        yield ""


def _exclusive(word: str, other: str) -> bool:
    prefix = word.partition(":")[0]
    return prefix in ALTERNATIVES and other.startswith(f"{prefix}:")


def _evidence(column: Column) -> _Evidence:
    """Statuses of the checks by each word, and each pair of words, that they were made with."""
    found: dict[frozenset[str], list[Status]] = {}
    for cell in column.cells.values():
        for words in _shown(cell.result):
            found.setdefault(words, []).append(cell.result.status)
    return found


def _shown(result: CheckResult) -> Iterator[frozenset[str]]:
    """Each word, and each pair of words, that a check says something of. One that failed says
    nothing of what it was merely made with: that is no reason to call it broken.
    """
    if result.provisional:
        return
    kind, _, stage = result.family.partition(".")
    needed = {*result.requires} | ({f"stage:{stage}"} if kind == "stages" else set())
    words = {*needed, *result.exercises}
    passed = result.status is Status.PASS
    for word in words if passed else needed:
        yield frozenset({word})
    for pair in combinations(sorted(words), 2):
        if passed or needed.intersection(pair):
            yield frozenset(pair)


def _mark(words: frozenset[str], column: Column, evidence: _Evidence) -> str:
    features = set(column.newest.capabilities.features)
    composed = ("op:", "stage:") if "feature:compose" in features else ()
    if any(word not in features and not word.startswith(composed) for word in words):
        return REFUSED
    statuses = set(evidence.get(words, ()))
    if statuses & {Status.FAIL, Status.ERROR}:
        return BROKEN
    if Status.WAIVED in statuses:
        return WAIVED
    proven = Status.PASS in statuses and statuses <= {Status.PASS, Status.UNSUPPORTED}
    return PROVEN if proven else DECLARED


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
