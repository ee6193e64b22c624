"""What ranks do with a vocabulary of which each has an equal share of rows, in rank order.

Rows behind the last token fill up the last shares. One rank has all of it, and does no more than
the ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import Collectives, Weight
from ml4core.compose.context import Ops


def embeddings(ops: Ops, ids: Tensor, table: Tensor, collectives: Collectives) -> Tensor:
    """Rows [T, H] of tokens ``ids`` [T] int64, on each rank. ``table`` [V', H] is its share."""
    if collectives.world_size == 1:
        whole: Tensor = ops["embed"](ids, table)
        return whole
    local = ids - collectives.rank * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    rows = ops["embed"](torch.where(here, local, 0), table)
    # One rank has the row and the others add zeros: the sum is exact in any dtype.
    return collectives.all_reduce(torch.where(here.unsqueeze(-1), rows, 0.0))


def vocabulary_logits(
    ops: Ops, hidden: Tensor, output: Weight, vocab_size: int, collectives: Collectives
) -> Tensor:
    """Logits fp32 [T, vocab_size] of ``hidden`` [T, H], the same on each rank. ``output`` [V', H]
    is its share.
    """
    logits: Tensor = ops["gemm"](hidden, output, torch.float32)
    if collectives.world_size == 1:
        return logits
    return collectives.all_gather(logits, -1)[:, :vocab_size].contiguous()
