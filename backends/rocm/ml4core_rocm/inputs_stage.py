"""Who can serve the ``attn_inputs`` stage here, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ml4core.api import Accepted, Candidate, Deployment, LayerSpec, Refusal, Rejected
from ml4core_rocm.devices import release

PROVIDER = "triton index-key write"
OPS = frozenset(
    {"gemm", "head_gemm", "kv_write", "layer_norm", "rms_norm", "rope", "ssmax", "indexer_write"}
)
"""Ops of the backend's own that its parts are."""
KEYS = ("tiled16_f32", "planar_f32", "fp32")
"""Layouts of index keys that its kernel writes."""


def inputs_candidate(
    layer: LayerSpec, deployment: Deployment, ops: Mapping[str, Callable[..., Any]]
) -> Candidate:
    """The stage with a fused write of the index key, for layers that have one."""
    found = []

    def against(reason: str, remedy: str = "") -> None:
        found.append(Refusal("rocm", "stage:attn_inputs", reason, remedy))

    if layer.indexer is None:
        against("the layer writes no index key; all else is products and ops of their own")
    elif layer.indexer.hadamard:
        against("index keys are turned by a Hadamard matrix before they are written")
    if deployment.index_layout not in KEYS:
        works = ", ".join(KEYS)
        against(f"its kernel writes no index keys of layout {deployment.index_layout}", works)
    if lacking := sorted(OPS - set(ops)):
        against(f"its parts {', '.join(lacking)} are no kernels of ours here")
    if found:
        return Rejected(PROVIDER, tuple(found))
    from ml4core_rocm.kernels.attn_inputs import attn_inputs

    return Accepted(PROVIDER, attn_inputs(layer, ops), release())
