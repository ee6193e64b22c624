"""Stacks of libtpu's compiler, which are too small for large layers.

Where two of 2,048 rows and more were compiled at a time, in a process that had compiled others, a
thread that generates code for SparseCores ran over the end of its stack, and with it went the
process. libtpu takes flags from a variable as it is loaded. One that it doesn't know ends the
process, too: so this one is for releases that were seen to know it.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

VARIABLE = "LIBTPU_INIT_ARGS"
FLAG = "--fibers_default_thread_stack_size"
STACK_BYTES = 4 << 20
_KNOWN_TO = ("0.0.42", "0.0.48", "0.0.50", "0.0.52")


def larger_stacks() -> None:
    """Asks for larger ones, unless the variable names a size already. Before libtpu is loaded."""
    given = os.environ.get(VARIABLE, "")
    if FLAG not in given and _knows_flag():
        os.environ[VARIABLE] = f"{given} {FLAG}={STACK_BYTES}".strip()


def _knows_flag() -> bool:
    try:
        found = version("libtpu")
    except PackageNotFoundError:
        return False
    return ".".join(found.split(".")[:3]) in _KNOWN_TO
