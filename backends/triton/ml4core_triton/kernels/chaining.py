"""Launches that may begin ahead of the end of the one before, where the device can let them."""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.numeric import INTERPRETED


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits for all that the launch before wrote, in a launch that was allowed to begin ahead of
    its end. Nothing of it may be read, and nothing that it reads be written, before.
    """
    if DEPENDENT and not INTERPRETED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """Lets the next launch's programs come up while this one still runs."""
    if DEPENDENT and not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()


def dependent(wanted: bool) -> dict[str, bool]:
    """Options of a launch that may begin ahead of the end of the one before."""
    return {"launch_pdl": True} if wanted and not INTERPRETED.value else {}
