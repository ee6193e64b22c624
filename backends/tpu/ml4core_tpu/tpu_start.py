"""JAX's start on a machine with TPUs."""

from __future__ import annotations

import os
import sys
from typing import Any

from ml4core.api import Refusal, Refused
from ml4core_tpu.compiler_stacks import larger_stacks

PLATFORMS = "tpu,cpu"
"""Of JAX: rows and plans come from arrays of the host. As it is named, a TPU that doesn't start is
an error, and not a reason to run on the host.
"""
KINDS = frozenset({"TPU7x"})
"""What JAX calls a device of the chips that are served."""


def start_tpus() -> None:
    """Has JAX take the TPUs of this process. Raises ``Refused`` where it has started without, or is
    told to; and with libtpu's own words where they don't start.

    Variables that tell of the slice, ``TPU_*``, are the machine's, and stay as they are.
    """
    larger_stacks()
    if "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", PLATFORMS)
    import jax
    from jax._src import xla_bridge

    config: Any = jax.config  # its options have no types
    named = [one for one in (config.jax_platforms or "").split(",") if one]
    if named and "tpu" not in named:
        reason = f"JAX is told to use {','.join(named)} alone"
        remedy = f"JAX_PLATFORMS={PLATFORMS}, or leave it out"
        raise Refused([Refusal("tpu", "JAX_PLATFORMS", reason, remedy)])
    if not xla_bridge.backends_are_initialized():
        config.update("jax_platforms", PLATFORMS)


def local_devices(platform: str) -> list[Any]:
    """JAX's devices of this process. Raises ``Refused`` where there are none, or others than the
    kernels are made for.
    """
    import jax

    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError as error:
        reason = f"JAX has no devices of platform {platform}: {error}"
        remedy = "chips that no other process has, and a process that hasn't used JAX before"
        raise Refused([Refusal("tpu", "device", reason, remedy)]) from error
    kinds = {device.device_kind for device in found}
    if platform == "tpu" and not kinds <= KINDS:
        reason = f"JAX's devices are of kind {', '.join(sorted(kinds))}"
        raise Refused([Refusal("tpu", "device", reason, ", ".join(sorted(KINDS)))])
    return list(found)
