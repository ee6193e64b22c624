"""The stage ``sparse_mla`` of layers without rope on a bf16 cache, beside AITER's for the others:
their stream of slots, and the ragged kernel of ours, which reads no rope part.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ml4core.api import LayerKV, LayerSpec, Selection, StepPlan
from ml4core_rocm.kernels.ragged_mla import ragged_mla
from ml4core_rocm.kernels.slot_streams import Streams


def ragged_stage(layer: LayerSpec, shared: Streams) -> Callable[..., tuple[Tensor, Tensor]]:
    """Bound for a layer that chooses its keys; layers of one session share their streams."""
    scale = layer.softmax_scale

    def call(
        plan: StepPlan, kv: LayerKV, q: Tensor, selection: Selection | None
    ) -> tuple[Tensor, Tensor]:
        if selection is None:
            raise ValueError("runs of a stream are those of layers that choose their keys")
        starts, stream = shared.stream(plan, kv.latent, selection)
        return ragged_mla(q, kv.latent, starts, stream, scale, selection.slots.shape[1])

    return call
