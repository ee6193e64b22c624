"""The backend's own ops: which file serves which contract.

A kernel's file is named as its op and holds a function of that name. Files are imported when a
session opens. What stands in no file is composed by core on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType

OWN: tuple[str, ...] = (
    "sparse_mla",
    "merge_lse",
    "window_mla",
    "kv_write",
    "indexer_write",
    "gather_kv",
    "to_slots",
    "indexer_logits",
    "topk",
    "embed",
    "rms_norm",
    "layer_norm",
    "all_reduce_rms_norm",
    "rope",
    "ssmax",
    "gemm",
    "head_gemm",
    "silu_mul",
    "router",
    "moe_experts",
    "quantize",
    "sample",
    "verify_draft",
)
"""Names of ``ml4core.api.OPS``."""


QUANTISING = frozenset({"gemm", "moe_experts"})
"""Ops that quantise their input where a deployment needs it."""


def load_ops(act: str | None = None) -> Mapping[str, Callable[..., object]]:
    """Each own op by name. Imports triton. ``act``: the format to which products bring inputs that
    meet a quantised weight, if any.
    """
    found = {name: getattr(import_module(f"ml4core_cuda.kernels.{name}"), name) for name in OWN}
    if act is not None:
        found |= {name: partial(found[name], act=act) for name in QUANTISING}
    return MappingProxyType(found)
