"""Weights trained as the shipped format holds them.

The forward and backward pass see matrices rounded to FP8 blocks, a step changes those that are not
rounded (a straight-through gradient): what is learned fits the rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ml4core.formats.fp8_block import dequantize_weight, quantize_weight
from tools.train_tiny.draft import DraftLayer
from tools.train_tiny.layers import Attention

PLAIN = ("embedding", "gate", "weights_proj", "mask_embeddings", "markov_w1")
"""Matrices that the shipped checkpoint keeps in bf16 or fp32."""


@contextmanager
def rounded(module: nn.Module) -> Iterator[None]:
    """Within it the matrices of `module` have the values that FP8 blocks hold of them."""
    kept = [(parameter, parameter.detach().clone()) for parameter in _matrices(module)]
    round_(module)
    try:
        yield
    finally:
        _set(kept)


def round_(module: nn.Module) -> None:
    """Round the matrices of `module` in place."""
    alone = dict.fromkeys(_matrices(module))
    for layer in module.modules():
        if isinstance(layer, Attention | DraftLayer):
            _set(_rounded_up_projection(layer))
            del alone[layer.w_uk], alone[layer.w_uv]
    _set((parameter, _rounded(parameter.detach())) for parameter in alone)


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.ndim >= 2 and name.rpartition(".")[2] not in PLAIN
    ]


def _rounded_up_projection(layer: Attention | DraftLayer) -> list[tuple[nn.Parameter, Tensor]]:
    """Blocks are those of the stored matrix: of each head the key rows, then the value rows."""
    parts = (layer.w_uk, layer.w_uv)
    heads = [part.detach().unflatten(0, (layer.heads, -1)) for part in parts]
    stored = torch.cat(heads, dim=1)
    whole = _rounded(stored.flatten(0, 1)).view_as(stored)
    split = whole.split([head.shape[1] for head in heads], dim=1)
    return [(part, some.flatten(0, 1)) for part, some in zip(parts, split, strict=True)]


def _rounded(weight: Tensor) -> Tensor:
    return dequantize_weight(*quantize_weight(weight))


def _set(values: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    # Through `data`: autograd must not take it for a change of what the forward pass saved.
    for parameter, value in values:
        parameter.data.copy_(value)
