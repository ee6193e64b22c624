"""Triton's interpreter: kernels as numpy on the host, for checks where there is no GPU."""

from __future__ import annotations

import os
import sys
from functools import wraps
from typing import Any

from ml4core.api import Refusal

_SWITCH = "TRITON_INTERPRET"


def interpreter_refusals(backend: str) -> tuple[Refusal, ...]:
    """Turns the interpreter on for this process, or says why that can't be.

    Triton reads the switch as it is imported: its own functions are decorated then.
    """
    if "triton" not in sys.modules:
        os.environ[_SWITCH] = "1"
        return ()
    if is_on():
        return ()
    reason = "triton was imported by this process for compiled kernels before the device was opened"
    return (Refusal(backend, "device", reason, f"{_SWITCH}=1 in the environment"),)


def compiler_refusals(backend: str) -> tuple[Refusal, ...]:
    """Why this process can't compile kernels, if it can't. Imports triton."""
    if not is_on():
        return ()
    reason = "Triton's interpreter is on in this process, which runs kernels on the host"
    return (Refusal(backend, "device", reason, f"{_SWITCH} unset"),)


def is_on() -> bool:
    """Whether kernels of this process are interpreted. Imports triton."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def patch_once() -> None:
    """Makes the interpreter patch Triton's language once a launch, and imports it.

    By itself it looks through all names of the language again in each call of a device function,
    for what isn't patched yet: half of the time of a kernel, and it finds nothing once a launch has
    begun. Called twice or within a launch it does nothing more. An interpreter that patches in
    another way is left as it is.
    """
    import triton.language as tl
    from triton.language import core, math
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    holders = (tl, core, core.tensor, math, getattr(core, "tensor_descriptor_base", None))
    names = ((holder, _first_builtin(holder)) for holder in holders)
    known = [(holder, name) for holder, name in names if name]  # of core none once it was patched
    if patch is None or hasattr(patch, "__wrapped__") or tl not in (holder for holder, _ in known):
        return
    scope = getattr(interpreter, "_LangPatchScope", lambda: None)

    @wraps(patch)
    def once(fn: Any) -> Any:
        if any(core.is_builtin(getattr(holder, name)) for holder, name in known):
            return patch(fn)
        return scope()

    interpreter._patch_lang = once


def _first_builtin(holder: Any) -> str | None:
    """The first name in a module or class of Triton's that the interpreter would patch; None where
    it has patched all, or there is no such module.
    """
    from triton.language.core import is_builtin

    return next((name for name in dir(holder) if is_builtin(getattr(holder, name, None))), None)
