"""``head_gemm``: a matrix a head, the absorbed projections of MLA.

Rate model (MI350X, 8 TB/s): 64 heads of [512, 64] in bf16 are 4.2 MB, 0.5 us, so that one row costs
a launch.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ml4core.api import Weight
from ml4core_rocm.kernels.activations import Activation
from ml4core_rocm.kernels.gemm import multiply
from ml4core_rocm.kernels.products import PLAIN
from ml4core_triton.kernels.weights import head_args


def head_gemm(x: Tensor, weight: Weight) -> Tensor:
    """``x`` [T, N, A] times each head's matrix of a weight [N, B, A], to [T, N, B] in x's dtype.

    ``ValueError`` for shapes that don't belong together.
    """
    w = head_args(x, weight)
    rows, heads, _ = x.shape
    out = torch.empty(rows, heads, w.rows, dtype=x.dtype, device=x.device)
    if out.numel():
        if x.stride(-1) != 1:
            x = x.contiguous()
        wide = torch.float32 in (x.dtype, w.data.dtype)
        meet = tl.float32 if wide else tl.bfloat16
        one = Activation(x, x, PLAIN, meet, False, rows, x.stride(0), 0)
        multiply(one, w, out, (x.stride(1), out.stride(1), out.stride(0)))
    return out
