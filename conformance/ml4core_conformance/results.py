"""What a run found, as data: one JSON file a run, checked when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, WithJsonSchema

from ml4core_conformance.check import PROFILES, Check, Measure, Profile, Status

SCHEMA = 1
SCHEMA_FILE = Path(__file__).parent / "report" / "result.schema.json"
_ODD = ("Infinity", "-Infinity", "NaN")
_STRICT: Any = {"extra": "forbid"}

Number = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(_ODD)}]})]
"""In JSON a number, or the word for one that JSON lacks."""

Verdict = Literal[
    "conformant", "conformant with waivers", "not conformant", "incomplete", "nothing judged"
]


@dataclass(frozen=True)
class Judged:
    """A ``Measure`` in a result. ``ratio`` is error / bound; 0 / 0 is 0."""

    what: str
    error: Number
    bound: Number
    ratio: Number
    where: str

    __pydantic_config__ = _STRICT

    @classmethod
    def of(cls, measure: Measure) -> Judged:
        numbers = (float(measure.error), float(measure.bound), float(measure.ratio))
        return cls(measure.what, *numbers, measure.where)


@dataclass(frozen=True)
class CheckResult:
    """How one check ended.

    Attributes:
        reason: empty for PASS; else what broke, was refused, or is missing.
        measures: what was judged, the worst of each kind.
        seconds: that it took.
        requires: the capability words without which it isn't made.
        exercises: further ones with which it was made.
        raised: type of the exception that ended it, empty if none did.
        waiver: for WAIVED, the reason and link of the waiver.
    """

    id: str
    family: str
    profile: Profile
    status: Status
    reason: str = ""
    measures: tuple[Judged, ...] = ()
    seconds: Number = 0.0
    variant: str = ""
    since: int = 1
    provisional: bool = False
    requires: tuple[str, ...] = ()
    exercises: tuple[str, ...] = ()
    bugs: tuple[str, ...] = ()
    raised: str = ""
    waiver: str = ""

    __pydantic_config__ = _STRICT

    @classmethod
    def of(
        cls,
        check: Check,
        status: Status,
        reason: str = "",
        measures: Iterable[Measure] = (),
        seconds: float = 0.0,
        raised: str = "",
        exercises: Iterable[str] = (),
    ) -> CheckResult:
        return cls(
            id=check.id,
            family=check.family,
            profile=check.profile,
            status=status,
            reason=reason,
            measures=_worst(Judged.of(measure) for measure in measures),
            seconds=round(seconds, 4),
            variant=check.variant,
            since=check.since,
            provisional=check.provisional,
            requires=tuple(sorted(check.requires)),
            exercises=tuple(sorted({*exercises} - check.requires)),
            bugs=check.bugs,
            raised=raised,
        )

    @property
    def worst(self) -> Judged | None:
        """The measure nearest to its bound, or farthest beyond it."""
        return max(self.measures, key=_badness, default=None)

    @property
    def gates(self) -> bool:
        return not self.provisional


@dataclass(frozen=True)
class DeviceFacts:
    """The device of a run; ``driver`` is what its details say of one."""

    kind: Literal["real", "interpreted", "fake", "source", "none"]
    name: str
    arch: str
    torch_device: str = ""
    memory_bytes: int = 0
    driver: str = ""
    details: dict[str, str] = field(default_factory=dict)

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class PluginFacts:
    """The plugin of a run; distribution and version are empty for a bare object."""

    backend: str
    distribution: str = ""
    version: str = ""
    target: str = ""
    api: str = ""

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class GitFacts:
    """The state of a checkout."""

    commit: str
    dirty: bool

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class CapabilityFacts:
    """``Capabilities`` as they were declared, and the SHA-256 of their JSON."""

    features: tuple[str, ...] = ()
    defaults: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    sha256: str = ""

    __pydantic_config__ = _STRICT

    @classmethod
    def of(cls, declared: Mapping[str, Any]) -> CapabilityFacts:
        digest = hashlib.sha256(json.dumps(declared, sort_keys=True).encode()).hexdigest()
        return cls(
            tuple(declared["features"]),
            dict(declared["defaults"]),
            dict(declared["limits"]),
            digest,
        )


@dataclass(frozen=True)
class Selection:
    """What part of the suite was asked for."""

    profiles: tuple[str, ...] = ()
    expression: str = ""
    api: int = 1
    seeds: tuple[int, ...] = (0,)

    __pydantic_config__ = _STRICT

    @property
    def whole(self) -> bool:
        return not self.expression and set(self.profiles) in (set(), set(PROFILES))

    def __str__(self) -> str:
        parts = [f"profile {', '.join(self.profiles)}" if self.profiles else "all profiles"]
        parts += [f"-k {self.expression!r}"] if self.expression else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Result:
    """One run of the suite.

    Attributes:
        schema: version of this form.
        created: UTC, ISO 8601.
        suite, core: versions of the distributions.
        libraries: versions of libraries that take part, and of Python.
        git: by distribution, for those that run from a checkout.
        complete: False if the run was interrupted; its checks without a verdict are NOT-RUN.
        problems: what is wrong with waivers; each fails the run.
    """

    created: str
    suite: str
    core: str
    plugin: PluginFacts
    device: DeviceFacts
    selection: Selection
    results: tuple[CheckResult, ...]
    schema: Annotated[Literal[1], Field(description="Version of this form.")] = SCHEMA  # type: ignore[assignment]
    libraries: dict[str, str] = field(default_factory=dict)
    git: dict[str, GitFacts] = field(default_factory=dict)
    capabilities: CapabilityFacts = field(default_factory=CapabilityFacts)
    options: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    problems: tuple[str, ...] = ()
    seconds: Number = 0.0
    jobs: int = 0

    __pydantic_config__ = _STRICT

    @property
    def counts(self) -> dict[Status, int]:
        found = Counter(result.status for result in self.results)
        return {status: found[status] for status in Status}

    @property
    def verdict(self) -> Verdict:
        return verdict(self.results, self.problems, self.complete)

    @property
    def column(self) -> str:
        """The name of its column: backend, device, and the kind where it isn't real."""
        kind = "" if self.device.kind == "real" else f" ({self.device.kind})"
        return f"{self.plugin.backend} · {self.device.arch}{kind}"

    def save(self, path: Path) -> None:
        """Writes it whole, or leaves what was there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(self.to_json(), "utf-8")
        os.replace(part, path)

    def to_json(self) -> str:
        """A line for each check, so that two files can be compared by line; what is at its default
        there is left out.
        """
        facts = _plain(asdict(self))
        checks = [_line(check) for check in facts.pop("results")]
        head = json.dumps(facts, indent=1, allow_nan=False)[1:]
        listed = ",\n  ".join(checks)
        return '{\n "results": [\n  ' + listed + "\n ]," + head + "\n"


class ResultError(ValueError):
    """A file that is no result of this suite."""


def load(path: Path) -> Result:
    """A saved result. Raises ``ResultError`` that names the file and what is wrong in it."""
    text = path.read_text("utf-8", errors="replace")
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ResultError(
            f"{path}: no conformance result of schema {SCHEMA}: {where}: {first['msg']} "
            f"({error.error_count()} faults)"
        ) from None


def json_schema() -> dict[str, Any]:
    """The JSON schema of the file, as ``SCHEMA_FILE`` ships it."""
    found = _ADAPTER.json_schema(mode="serialization")
    found["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    found["required"] = sorted(found["properties"])
    return found


def verdict(
    results: Sequence[CheckResult], problems: Sequence[str] = (), complete: bool = True
) -> Verdict:
    """The claim that results allow. No check is never green, nor is one that was not run.
    Provisional checks are reported, and change nothing.
    """
    gating = [result for result in results if result.gates]
    found = {result.status for result in gating}
    if problems or found & {Status.FAIL, Status.ERROR}:
        return "not conformant"
    if not complete or Status.NOT_RUN in found:
        return "incomplete"
    if not found & {Status.PASS, Status.WAIVED}:
        return "nothing judged"
    return "conformant with waivers" if Status.WAIVED in found else "conformant"


def _worst(measures: Iterable[Judged]) -> tuple[Judged, ...]:
    """For each ``what`` the measure with the greatest ratio, in order of appearance."""
    found: dict[str, Judged] = {}
    for measure in measures:
        if measure.what not in found or _badness(measure) > _badness(found[measure.what]):
            found[measure.what] = measure
    return tuple(found.values())


def _badness(measure: Judged) -> float:
    return math.inf if math.isnan(measure.ratio) else measure.ratio


def _line(check: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in check.items() if value != _DEFAULTS.get(name, value)}
    named = {name: check[name] for name in ("id", "family", "profile", "status")}
    return json.dumps(named | kept, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


_DEFAULTS: Mapping[str, Any] = {
    field.name: _plain(field.default)
    for field in fields(CheckResult)
    if field.default is not MISSING
}
_ADAPTER: TypeAdapter[Result] = TypeAdapter(Result)
