"""Triton's interpreter: kernels as numpy on the host, for checks where there is no GPU."""

from __future__ import annotations

import os
import sys

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
