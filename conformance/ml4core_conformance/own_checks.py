"""Checks that a plugin adds: told by a process of their own, run where the plugin is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ml4core.registry import PluginRecord, describe, load_plugin
from ml4core_conformance import hookspecs
from ml4core_conformance.catalog import BROKEN, broken, validate
from ml4core_conformance.check import PROFILES, Check, CheckFailed

if TYPE_CHECKING:
    from ml4core_conformance.hookspecs import Harness
    from ml4core_conformance.subject import Subject

LISTING_S = 60.0
"""Seconds in which a plugin must have told its checks."""
_FACTS = ("family", "profile", "doc", "variant", "requires", "isolated", "timeout_s", "bugs")


def own_checks(record: PluginRecord) -> tuple[Check, ...]:
    """The plugin's checks. Imports it here. What it raises is passed on; ``ValueError`` for a check
    that can't be, or that would stand for another one.
    """
    found: list[Check] = []
    prefix = f"x-{record.distribution}."

    def register(
        family: str,
        run: Callable[[Subject], None],
        doc: str,
        *,
        variant: str = "",
        profile: str = "system",
        requires: Iterable[str] = (),
        isolated: bool = False,
        timeout_s: float = 120.0,
        bugs: Iterable[str] = (),
    ) -> None:
        if not family.startswith(prefix) or family == prefix:
            raise ValueError(
                f"a check of a plugin is called {prefix}<name>, not {family!r}: none of the "
                "suite's can be replaced"
            )
        if profile not in PROFILES:
            raise ValueError(f"{family}: no profile {profile!r}; works: {', '.join(PROFILES)}")
        found.append(
            Check(
                family,
                profile,
                _Run(run),
                doc,
                variant=variant,
                requires=frozenset(requires),
                unit=family,
                isolated=isolated,
                timeout_s=float(timeout_s),
                bugs=tuple(bugs),
            )
        )

    plugin = load_plugin(record, hook_specs=(hookspecs,))
    plugin.manager.hook.ml4core_conformance_checks(register=register)
    validate(found)
    return tuple(found)


class _Run:
    """A check's function that needs none of the suite's exceptions."""

    def __init__(self, run: Callable[[Subject], None]) -> None:
        self._run = run

    def __call__(self, subject: Subject) -> None:
        try:
            self._run(subject)
        except CheckFailed:
            raise
        except AssertionError as error:
            raise CheckFailed(str(error) or describe(error)) from error


def facts(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """What JSON can hold of checks."""
    found = []
    for check in checks:
        fact = {name: getattr(check, name) for name in _FACTS}
        found.append({**fact, "requires": sorted(check.requires), "bugs": list(check.bugs)})
    return found


def told_checks(record: PluginRecord) -> tuple[Check, ...]:
    """The plugin's checks as data: it is imported in a process of its own, and ``run`` raises here.
    One that can't tell them has a check that stands for them, and is an ERROR.
    """
    from ml4core_conformance.rigs.child import ChildFailed, ask

    try:
        answer = ask("checks", record, limit_s=LISTING_S)
    except ChildFailed as failure:
        return (broken(f"{BROKEN}[{record.name}]", str(failure)),)
    elsewhere = "it runs where the plugin is loaded"
    return tuple(
        Check(
            **{
                **fact,
                "requires": frozenset(fact["requires"]),
                "bugs": tuple(fact["bugs"]),
                "run": broken("", elsewhere).run,
                "unit": fact["family"],
            }
        )
        for fact in answer["checks"]
    )


def resolved(
    ids: Iterable[str], record: PluginRecord | None, suite: Mapping[str, Check]
) -> list[Check]:
    """The checks of these ids, as they can be run here. The plugin's are asked for only if one is
    not in the suite; one that isn't there then is an ERROR.
    """
    ids, own, why = list(ids), dict[str, Check](), "the plugin gives no such check here"
    if record is not None and any(id not in suite for id in ids):
        try:
            own = {check.id: check for check in own_checks(record)}
        except (Exception, SystemExit) as error:
            why = f"its checks can't be had: {describe(error)}"
    return [suite.get(id) or own.get(id) or broken(id, why) for id in ids]


def harness(record: PluginRecord | None, backend: Any) -> Harness | None:
    """What the plugin offers for a backend of its own; None for most."""
    if record is None:
        return None
    plugin = load_plugin(record, hook_specs=(hookspecs,))
    found: Harness | None = plugin.manager.hook.ml4core_conformance_harness(backend=backend)
    return found
