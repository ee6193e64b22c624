"""All checks in one list, and the part of it that a run asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ml4core.api import API_VERSION, SUPPORTED_API_VERSIONS
from ml4core.api.capabilities import check_words
from ml4core_conformance import checks as checks_package
from ml4core_conformance.check import PROFILES, Check
from ml4core_conformance.expression import parse

if TYPE_CHECKING:
    from ml4core_conformance.subject import Subject

BROKEN = "suite.loads"
"""Family of the checks that stand for modules of the suite which can't be loaded. They end as
ERROR, so that nothing which is missing can pass for green.
"""


def all_checks() -> tuple[Check, ...]:
    """Every check of the suite, in the order of profiles, then of modules."""
    found: list[Check] = []
    for module in sorted(info.name for info in iter_modules(checks_package.__path__)):
        found += _module_checks(f"{checks_package.__name__}.{module}")
    validate(found)
    return tuple(sorted(found, key=lambda check: PROFILES.index(check.profile)))


def validate(checks: Iterable[Check]) -> None:
    """Raises ``ValueError`` that lists each check which can't be: an id that is taken, unknown
    words, a profile or an API version that doesn't exist.
    """
    problems = []
    seen: set[str] = set()
    for check in checks:
        if check.id in seen:
            problems.append(f"{check.id}: two checks have this id")
        seen.add(check.id)
        if check.profile not in PROFILES:
            problems.append(f"{check.id}: no profile {check.profile!r}; {', '.join(PROFILES)}")
        if not 1 <= check.since <= API_VERSION:
            problems.append(f"{check.id}: since {check.since}; API versions are 1-{API_VERSION}")
        try:
            check_words(check.requires)
        except ValueError as error:
            problems.append(f"{check.id}: {error}")
    if problems:
        raise ValueError("; ".join(problems))


def choose(
    checks: Iterable[Check],
    *,
    profiles: Collection[str] = (),
    expression: str = "",
    api: int = API_VERSION,
) -> tuple[Check, ...]:
    """The checks of these profiles (none named: of all) that ``-k`` means and that judge backends
    of this API version.

    Raises ``ValueError`` for an unknown profile, a malformed expression, or an API version that is
    not served.
    """
    unknown = sorted(set(profiles) - set(PROFILES))
    if unknown:
        raise ValueError(f"no profile {', '.join(unknown)}; works: {', '.join(PROFILES)}")
    if api not in SUPPORTED_API_VERSIONS:
        served = ", ".join(map(str, sorted(SUPPORTED_API_VERSIONS)))
        raise ValueError(f"--api {api}: this suite judges backends of API version {served}")
    meant = parse(expression)
    return tuple(
        check
        for check in checks
        if (not profiles or check.profile in profiles) and check.since <= api and meant(check.id)
    )


def _module_checks(module: str) -> Sequence[Check]:
    try:
        found = list(import_module(module).checks())
        validate(found)
    except Exception as error:
        name = module.rpartition(".")[2]
        reason = f"{module} gives no checks: {type(error).__name__}: {error}"
        return [broken(f"{BROKEN}[{name}]", reason)]
    return found


def broken(id: str, reason: str) -> Check:
    """Stands for a check, or for all of a module or plugin, that can't be had: an ERROR."""

    def run(subject: Subject) -> None:
        raise RuntimeError(reason)

    doc = "A module of the suite, or a plugin, gives its checks. If not, it is itself at fault."
    family, _, variant = id.removesuffix("]").partition("[")
    return Check(family, "plugin", run, doc, variant=variant)
