"""Ops by name: the file of a kernel is named as its op and holds a function of that name.

A file among a backend's own kernels goes before the one here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ml4core.api import OPS

_SHARED = "ml4core_triton"


def served(package: str) -> tuple[str, ...]:
    """Names of ``ml4core.api.OPS`` that kernels of ``package``, a backend's, or of this one serve.
    Imports no kernel.
    """
    return tuple(name for name in OPS if _place(name, package) is not None)


def load(name: str, package: str) -> Callable[..., Any]:
    """The op. Imports triton. ``KeyError`` if no kernel serves it."""
    place = _place(name, package)
    if place is None:
        raise KeyError(f"{package} serves no {name}; works: {', '.join(served(package))}")
    found: Callable[..., Any] = getattr(import_module(place), name)
    return found


def _place(name: str, package: str) -> str | None:
    places = (f"{owner}.kernels.{name}" for owner in (package, _SHARED))
    return next((place for place in places if find_spec(place) is not None), None)
