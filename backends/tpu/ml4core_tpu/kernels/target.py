"""Where a kernel is to run, as a static argument of every kernel."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from jax.experimental.pallas import tpu as pltpu

Target: TypeAlias = Literal["tpu", "host", "simulator", "races"]
"""``tpu``: compiled by Mosaic. ``host``: XLA's loops in place of the grid. ``simulator``: Pallas's
TPU simulator, in which memory that nobody wrote is NaN, reads out of bounds raise, and copied data
arrive when they are waited for. ``races``: the same, with copies made at once and races noted.
"""

VMEM_BYTES = 64 << 20
"""Of a tpu7x core; a v6e has twice as much."""
_HEADROOM = 4 << 20


Dimension: TypeAlias = Literal["parallel", "arbitrary"]


def compiler_params(target: Target, *dimensions: Dimension) -> dict[str, Any]:
    """Arguments of ``pallas_call`` for a target: the grid's semantics, or how it is interpreted."""
    if target == "host":
        return {"interpret": True}
    if target == "simulator":
        return {
            "interpret": pltpu.InterpretParams(
                dma_execution_mode="on_wait", uninitialized_memory="nan"
            )
        }
    if target == "races":
        return {"interpret": pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)}
    return {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=dimensions, vmem_limit_bytes=VMEM_BYTES - _HEADROOM
        )
    }
