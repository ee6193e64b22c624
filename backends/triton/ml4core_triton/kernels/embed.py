"""``embed``: rows of the embedding.

Rate model: 4 bytes an element of bf16; 4,096 rows of 6,144 are 101 MB, 24 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed_kernel(ids, table, out, width, table_row, BLOCK: tl.constexpr):
    """Grid (T, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = at < width
    source = table + tl.load(ids + row) * table_row + at
    tl.store(out + row * width + at, tl.load(source, mask=fits), mask=fits)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows [T, H] of the table [vocab, H] at ids int64 [T], which lie in [0, vocab)."""
    rows, width = ids.shape[0], weight.shape[1]
    out = torch.empty(rows, width, dtype=weight.dtype, device=weight.device)
    if out.numel():
        if weight.stride(-1) != 1:
            weight = weight.contiguous()
        _embed_kernel[(rows, triton.cdiv(width, 2048))](
            ids.contiguous(), weight, out, width, weight.stride(0), BLOCK=2048
        )
    return out
