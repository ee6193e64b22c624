"""The backend's own ops: which file serves which contract.

Files are imported when a session opens. What stands in no file is composed by core on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from ml4core_cuda.providers import deep_gemm_unfit
from ml4core_cuda.tuned import measured
from ml4core_triton.ops import load, served

OWN: tuple[str, ...] = served("ml4core_cuda")
"""Names of ``ml4core.api.OPS`` that a kernel of ours serves."""

QUANTISING = frozenset({"gemm", "moe_experts"})
"""Ops that quantise their input where a deployment needs it."""


def load_ops(act: str | None = None, device_name: str = "") -> Mapping[str, Callable[..., object]]:
    """Each own op by name. Imports triton. ``act``: the format to which products bring inputs that
    meet a quantised weight, if any. Where it is FP8 in blocks, and DeepGEMM was measured to be
    faster on ``device_name`` from some rows on, its product serves these.
    """
    found = {name: load(name, "ml4core_cuda") for name in OWN}
    if act is not None:
        found |= {name: partial(found[name], act=act) for name in QUANTISING}
    if act == "fp8_block" and (rows := library_rows(device_name)) is not None:
        from ml4core_cuda.kernels.deep_gemm import serving

        found["gemm"] = serving(found["gemm"], rows)
    return MappingProxyType(found)


def library_rows(device_name: str) -> int | None:
    """From how many rows on DeepGEMM serves FP8 products; None where it doesn't."""
    table = measured().get(device_name)
    rules = table.rules.get("gemm", ()) if table is not None else ()
    wanted = [rows for rows, provider, _ in rules if provider == "DeepGEMM"]
    if not wanted:
        return None
    from ml4core_cuda.kernels.deep_gemm import deep_gemm

    try:
        unfit = deep_gemm_unfit(deep_gemm())
    except Exception:  # an import of a library may do anything; ours serves
        return None
    return None if unfit else min(wanted)
