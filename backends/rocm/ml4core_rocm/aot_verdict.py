"""What may not be in a compiled kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ml4core_rocm.aot import Compiled

_FN, _FNUZ = "f8E4M3FN", "f8E4M3FNUZ"
_FLAVOUR = {"gfx950": _FN, "gfx942": _FNUZ}
"""Architecture -> the FP8 type that its matrix units compute with."""


def spilling(one: Compiled) -> str:
    """Why a hot kernel may not be so; "" if it may. What is kept in other registers, scalars in
    vectors and vectors in those of the matrix units, costs no memory.
    """
    if not one.hot or not one.scratch_bytes:
        return ""
    return f"is hot, and keeps {one.vgpr_spills} registers in {one.scratch_bytes} bytes of memory"


def foreign(one: Compiled) -> str:
    """Why its FP8 isn't the architecture's; "" if it is. What the units don't take is emulated: it
    may be decoded, as index keys are on gfx942, but not meet them.
    """
    meets = any("fp8" in name or "f8f6f4" in name for name in one.matrix)
    wrong = set(one.fp8) - {_FLAVOUR[one.arch]}
    if wrong and (meets or one.arch == "gfx950"):
        return f"computes in {', '.join(sorted(wrong))} on {one.arch}"
    return ""


def missing(launches: Iterable[Compiled]) -> Iterator[str]:
    """Cases of which no kernel has the matrix instruction that is wanted, with the reason."""
    wanted: dict[str, str] = {}
    found: dict[str, set[str]] = {}
    for one in launches:
        if one.wants:
            wanted[one.case] = one.wants
            found.setdefault(one.case, set()).update(one.matrix)
    for case, pattern in wanted.items():
        if not any(re.search(pattern, name) for name in found[case]):
            names = ", ".join(sorted(found[case])) or "none"
            yield f"{case}: no matrix instruction matches {pattern}; there: {names}"
