"""A layer's decode step as it is compiled ahead: the fused stage and the latency-specialised layer,
of a TP 8 and a TP 1 rank of the full model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ml4core.api import LayerSpec
from ml4core_triton.aot import Case


def cases() -> Iterator[Case]:
    """Imports triton."""
    from ml4core_cuda.kernels.attn_inputs import attn_inputs
    from ml4core_cuda.kernels.latency_layer import latency_layer
    from ml4core_cuda.measure.layer_works import layer_of, step

    def call(make: Callable[[LayerSpec], Callable[..., Any]], layer: LayerSpec, rows: int) -> Any:
        inputs = step(0, torch.device("meta"), layer=layer, rows=rows, context=65536)
        return make(layer)(*(inputs if make is latency_layer else inputs[:5]))

    for heads in (8, 64):
        for owner in (True, False):
            layer = replace(layer_of(owner, False), heads=heads)
            who = f"{heads} heads, {'owner' if owner else 'sharer'}"
            for rows in (1, 4, 16):
                yield Case(
                    f"attn_inputs {who}, {rows} rows", partial(call, attn_inputs, layer, rows)
                )
                if rows <= 4 and heads == 8:
                    whole = partial(call, latency_layer, layer, rows)
                    yield Case(f"latency layer {who}, {rows} rows", whole)
