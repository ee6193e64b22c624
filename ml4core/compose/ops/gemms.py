"""Matrix products with weights in any open format, and what stands between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.api import Weight
from ml4core.compose.ops.tiles import TEMP_BYTES, tiles
from ml4core.compose.ops.weights import ROW_MULTIPLE, decode_weight, weight_rows


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows [T, H] of the table [vocab, H]."""
    return F.embedding(ids, weight)


def gemm(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x`` [T, K] times the transpose of a weight [N, K], to [T, N] in out_dtype or x's dtype."""
    out_dtype = out_dtype or x.dtype
    if weight.format == "bf16" and x.dtype == out_dtype == torch.bfloat16:
        return F.linear(x, weight.data)  # torch accumulates in fp32 and rounds once
    wide = x.to(torch.float32)
    if weight.format == "fp32":
        return F.linear(wide, weight.data).to(out_dtype)
    # A tile of the weight at a time, as its fp32 form takes up to eight times the memory.
    rows, width = weight.shape
    size = max(1, TEMP_BYTES // (4 * width) // ROW_MULTIPLE) * ROW_MULTIPLE
    parts = [
        F.linear(wide, decode_weight(weight_rows(weight, start, stop))).to(out_dtype)
        for start, stop in tiles(rows, size)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def head_gemm(x: Tensor, weight: Weight) -> Tensor:
    """``x`` [T, N, A] times each head's matrix of a weight [N, B, A], to [T, N, B] in x's dtype."""
    data = decode_weight(weight, x.dtype if weight.format == "bf16" else torch.float32)
    heads = torch.bmm(x.transpose(0, 1).to(data.dtype), data.transpose(1, 2))
    return heads.transpose(0, 1).to(x.dtype).contiguous()


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [T, I] of [T, 2I], gate first."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)
