"""Random weights that make a fair case: nothing degenerate, and little hangs on rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_INDEX_RANK = 4
# Spread of what a projection gives for inputs of unit size. Unlisted: 1. Queries, gates and logits
# that are nearly equal would hide faults; blocks that outweigh the residual would amplify noise.
_GAINS: Mapping[str, float] = {
    "q_b_proj": 2.0,
    "q_proj": 2.0,
    "mlp.gate": 2.0,
    "lm_head": 4.0,
}


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Fills every parameter from one generator, so that no weight is 0, 1 or equal to another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                offset = 0.0 if name.endswith("bias") else 1.0
                parameter.copy_(offset + 0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                gain = next((g for key, g in _GAINS.items() if f"{key}.weight" in name), 1.0)
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
        for module in model.modules():
            if hasattr(module, "weights_proj"):
                _align(module, generator)
    return model.eval()


def _align(indexer: Any, generator: torch.Generator) -> None:
    """Lets index keys and queries lie in a few directions that all share, as training does.

    Scores of unrelated vectors crowd together: no selection would be far from a tie.
    """
    directions = torch.randn(indexer.head_dim, _INDEX_RANK, generator=generator)
    directions *= _INDEX_RANK**-0.5
    for projection in (indexer.wk, indexer.wq_b):
        width = projection.weight.shape[1]
        heads = projection.weight.view(-1, indexer.head_dim, width)
        for head in heads:
            inner = torch.randn(_INDEX_RANK, width, generator=generator) * width**-0.5
            head.copy_(directions @ inner)
