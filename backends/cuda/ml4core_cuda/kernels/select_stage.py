"""The stage ``select`` by the kernels of this backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ml4core.api import LayerSpec, Selection
from ml4core_cuda.kernels.indexer_logits import scores
from ml4core_cuda.kernels.topk import choose
from ml4core_triton import select_stage as shared


def select_stage(layer: LayerSpec, *, ahead: bool = False) -> Callable[..., Selection]:
    """Bound for a layer that owns an indexer. ``ahead``: its launches may begin before the end of
    those before them.
    """
    return shared.select_stage(
        layer, partial(scores, fill=False, ahead=ahead), partial(choose, ahead=ahead)
    )
