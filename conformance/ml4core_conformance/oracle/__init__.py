"""The judge: every op and stage in fp64 or as a loop over bytes. Imports ``ml4core.api`` only.

Each module that knows ops has a mapping ``ORACLE`` of op name to ``(options, arguments) ->
Expected``, with the options of an ``OpCase`` and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

from ml4core_conformance.oracle.expected import Expected

Oracle = Callable[[Mapping[str, Any], Mapping[str, Any]], Expected]


@cache
def oracles() -> Mapping[str, Oracle]:
    """By op name."""
    found: dict[str, Oracle] = {}
    for module in iter_modules(__path__):
        mine = getattr(import_module(f"{__name__}.{module.name}"), "ORACLE", {})
        if twice := set(found) & set(mine):
            raise ValueError(f"two oracles of the ops {sorted(twice)}; one is in {module.name}")
        found |= mine
    return MappingProxyType(found)


def oracle(op: str) -> Oracle:
    """What says what an op's results are. ``ValueError`` if nobody does."""
    try:
        return oracles()[op]
    except KeyError:
        known = ", ".join(sorted(oracles()))
        raise ValueError(f"no oracle of op {op!r}; there are those of {known}") from None
