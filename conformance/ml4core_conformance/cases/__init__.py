"""Inputs of the checks of ops, as data. Each module has ``cases() -> list[OpCase]``."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ml4core_conformance.case import OpCase


@cache
def all_cases() -> tuple[OpCase, ...]:
    """Of every module, in order of module name."""
    found: list[OpCase] = []
    for module in sorted(module.name for module in iter_modules(__path__)):
        cases = getattr(import_module(f"{__name__}.{module}"), "cases", None)
        if cases is not None:
            found += cases()
    return tuple(found)


def cases_of(op: str, variant: str | None = None) -> tuple[OpCase, ...]:
    """The cases of an op, or of one of its variants."""
    return tuple(case for case in all_cases() if case.op == op and variant in (None, case.variant))
