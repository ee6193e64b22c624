"""Which steps are captured as graphs: ``--cudagraph-capture-sizes``, and the keys of
``--compilation-config`` with vLLM's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ml4core.engine.flag_spec import Check, one_of

FLAG = "--compilation-config"
SIZES_FLAG = "--cudagraph-capture-sizes"
SIZES, MODE = "cudagraph_capture_sizes", "cudagraph_mode"
NONE, FULL_DECODE = "NONE", "FULL_DECODE_ONLY"
HELP = (
    f"keys: {SIZES}, as the flag of that name; {MODE}, {NONE} (as --enforce-eager) or "
    f"{FULL_DECODE}: steps without a chunk of a prompt are one graph each, others run eagerly"
)


def _sizes(value: object) -> str:
    whole = isinstance(value, list | tuple) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in value
    )
    return "" if whole else "a list of whole numbers, each 1 or above"


KEYS: Mapping[str, Check] = MappingProxyType({SIZES: _sizes, MODE: one_of(NONE, FULL_DECODE)})
"""Each key with the check of its value."""


def capture_sizes(flag: Iterable[int], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows of steps, ascending; empty: the backend's choice."""
    return tuple(sorted(set(flag) or set(config.get(SIZES, ()))))


def is_eager(enforce_eager: bool, config: Mapping[str, Any]) -> bool:
    return enforce_eager or config.get(MODE) == NONE


def problems(flag: Iterable[int], config: Mapping[str, Any]) -> Iterable[str]:
    """How these flags contradict each other."""
    if tuple(flag) and SIZES in config:
        yield f"{SIZES_FLAG}: {FLAG} {SIZES} says the same; works: one of them"
