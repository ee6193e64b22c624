"""AITER's products: of block-quantised FP8, activations in blocks of 128 and weights in 128 x 128,
and of bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core_rocm.aiter_functions import load
from ml4core_rocm.kernels.activations import quantized


def block_gemm(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x`` [T, K], quantised to ``fp8_block``, times the transpose of a weight [N, K] in that
    format: [T, N] in bf16. ``ValueError`` for another format or result.
    """
    dtype = out_dtype or x.dtype
    if weight.format != "fp8_block" or dtype != torch.bfloat16:
        raise ValueError(
            f"AITER's block product takes fp8_block and gives bfloat16, not {weight.format} and "
            f"{dtype}"
        )
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0], dtype=dtype)
    own = quantized(x, "fp8_block")
    fp8 = torch.float8_e4m3fn
    data = weight.data.contiguous().view(fp8)
    out: Tensor = load("gemm_a8w8_blockscale")(
        own.data.view(fp8), data, own.scale, weight.parts["scale"].contiguous(), dtype=dtype
    )
    return out


def plain_gemm(x: Tensor, weight: Weight) -> Tensor:
    """bf16 ``x`` [T, K] times the transpose of a weight [N, K] in bf16: [T, N] in bf16.
    ``ValueError`` for another format or dtype.
    """
    if weight.format != "bf16" or x.dtype != torch.bfloat16:
        raise ValueError(f"AITER's plain product takes bf16, not {weight.format} and {x.dtype}")
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0])
    out: Tensor = load("gemm_a16w16")(
        x.contiguous(), weight.data.contiguous(), otype=torch.bfloat16
    )
    return out
