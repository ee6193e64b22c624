"""Reads which backends are installed, from metadata alone: nothing of a plugin is imported."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import Distribution, EntryPoint, distributions

from ml4core.api import API_KEYWORD, BACKENDS_GROUP, SUPPORTED_API_VERSIONS, Refusal, Refused
from ml4core.registry._records import PluginRecord
from ml4core.registry._text import describe

AUTO = "auto"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_RANGE = re.compile(rf"{re.escape(API_KEYWORD)}:(\d+)-(\d+)")


def discover() -> tuple[PluginRecord, ...]:
    """Every entry point of ``ml4core.backends``, by name; those that may not load say why."""
    records = [record for distribution in _installed() for record in _records(distribution)]
    claims: dict[str, list[PluginRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda r: (r.name, r.distribution, r.target)):
        claims[record.name].append(record)
    return tuple(
        record for rivals in claims.values() for record in (_refuse_rivals(rivals) or rivals)
    )


def find(name: str, records: Sequence[PluginRecord] | None = None) -> PluginRecord:
    """The record of a backend that may be loaded; ``records`` defaults to ``discover()``.

    Raises ``Refused`` if none has that name, or if its metadata forbids to load it.
    """
    records = discover() if records is None else records
    named = [record for record in records if record.name == name]
    refusals = [refusal for record in named for refusal in record.refusals]
    if not named:
        refusals = [_unknown(name, sorted({record.name for record in records}))]
    if refusals:
        raise Refused(refusals, what=f"--backend {name}")
    return named[0]


def _installed() -> Iterator[Distribution]:
    """Distributions as imports see them: of two with one name, the first on the path counts."""
    seen: set[str] = set()
    for distribution in distributions():
        try:
            name = distribution.name
        except Exception:  # leftovers of interrupted installs have no readable name
            continue
        normal = re.sub(r"[-_.]+", "-", name or "").lower()
        if normal and normal not in seen:
            seen.add(normal)
            yield distribution


def _records(distribution: Distribution) -> list[PluginRecord]:
    text = distribution.read_text("entry_points.txt") or ""
    if BACKENDS_GROUP not in text:  # what others wrote there is not ours to parse
        return []
    try:
        entry_points = list(distribution.entry_points.select(group=BACKENDS_GROUP))
    except Exception as error:
        why = f"its entry_points.txt can't be read: {describe(error)}"
        refusal = Refusal("core", distribution.name, why, "a repaired or reinstalled distribution")
        return [PluginRecord(*_identity(distribution), target="", refusals=(refusal,))]
    return [_record(distribution, entry_point) for entry_point in entry_points]


def _identity(distribution: Distribution) -> tuple[str, str, str]:
    """A record's name where no entry point gives one, the distribution, and its version."""
    return distribution.name, distribution.name, distribution.version or "without version"


def _record(distribution: Distribution, entry_point: EntryPoint) -> PluginRecord:
    name = entry_point.name
    _, owner, version = _identity(distribution)
    label = f"{owner} {version}"
    refusals: list[Refusal] = []
    if name == AUTO or not _NAME.fullmatch(name):
        why = "is a word of the core" if name == AUTO else f"does not match {_NAME.pattern}"
        remedy = "another name in its entry point"
        refusals.append(Refusal("core", name, f"{label} offers a backend whose name {why}", remedy))
    api, fault = _api_range(distribution)
    if fault:
        refusals.append(Refusal("core", name, f"{label} {fault}", _api_remedy(owner)))
    return PluginRecord(
        name=name,
        distribution=owner,
        version=version,
        target=entry_point.value,
        api=api,
        refusals=tuple(refusals),
    )


def _api_range(distribution: Distribution) -> tuple[tuple[int, int] | None, str]:
    """The range that its keywords state, and what is wrong with it ("" if nothing)."""
    try:
        fields = distribution.metadata.get_all("Keywords") or []
    except Exception as error:
        return None, f"has metadata that can't be read: {describe(error)}"
    # Keywords are divided by commas in newer metadata, by spaces in older.
    stated = sorted(
        {word for field in fields for word in re.split(r"[,\s]+", field) if _is_range(word)}
    )
    form = f"{API_KEYWORD}:LOW-HIGH"
    if not stated:
        return None, f"states no API range: its metadata lacks the keyword {form}"
    if len(stated) > 1:
        return None, f"states several API ranges: {', '.join(stated)}"
    match = _RANGE.fullmatch(stated[0])
    if not match or int(match[1]) > int(match[2]):
        return None, f"states a malformed API range {stated[0]!r}; the form is {form}"
    low, high = int(match[1]), int(match[2])
    if not any(low <= version <= high for version in SUPPORTED_API_VERSIONS):
        return (low, high), f"supports API {low}-{high}, this core serves {_served()}"
    return (low, high), ""


def _is_range(word: str) -> bool:
    return word.partition(":")[0] == API_KEYWORD


def _served() -> str:
    return ", ".join(map(str, sorted(SUPPORTED_API_VERSIONS)))


def _api_remedy(distribution: str) -> str:
    return f"a release of {distribution} whose range includes API {_served()}"


def _refuse_rivals(rivals: Sequence[PluginRecord]) -> list[PluginRecord]:
    """The same records, each refused, if several claim one name; else nothing."""
    if len(rivals) < 2:
        return []
    claims = " and ".join(f"{r.distribution} {r.version} ({r.target})" for r in rivals)
    remedy = f"pip uninstall {' or '.join(dict.fromkeys(r.distribution for r in rivals))}"
    name = rivals[0].name
    clash = Refusal("core", name, f"several plugins claim this name: {claims}", remedy)
    return [replace(rival, refusals=(*rival.refusals, clash)) for rival in rivals]


def _unknown(name: str, installed: Sequence[str]) -> Refusal:
    words = [*installed, AUTO] if name != AUTO else []
    # Strict enough to tell `tpu` from `cpu`. A slip of the pen gets no install line, for that could
    # name a stranger's package.
    alike = difflib.get_close_matches(name, words, n=1, cutoff=0.7)
    if alike:
        remedy = f"--backend {alike[0]}"
    elif name != AUTO and _NAME.fullmatch(name):
        remedy = f"pip install ml4core-{name}, or whichever distribution offers {name!r}"
    else:
        remedy = f"the name of a plugin; it matches {_NAME.pattern}"
    listed = ", ".join(installed) or "none"
    return Refusal(
        "core", name, f"no installed plugin offers this backend; installed: {listed}", remedy
    )
