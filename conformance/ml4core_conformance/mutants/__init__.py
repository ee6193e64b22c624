"""Backends that are wrong in one way each: what the suite must catch. Each module has a function
``mutants`` that lists its own.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ml4core_conformance.mutant import Mutant


def mutants() -> list[Mutant]:
    """Every mutant, in order of module. Raises ``ValueError`` if two have one name."""
    found: list[Mutant] = []
    for module in sorted(info.name for info in iter_modules(__path__)):
        make = getattr(import_module(f"{__name__}.{module}"), "mutants", None)
        found += make() if make else []
    names = [mutant.name for mutant in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several mutants are called {', '.join(twice)}")
    return found
