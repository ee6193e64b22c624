"""Which products ``row_turns`` and ``short_experts`` have. In a module of its own: those are
written in Gluon, and not to be imported where it isn't known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core_cuda.kernels.target import gluon
from ml4core_triton.kernels.weights import FP8_BLOCK, WeightArgs

ROWS, TURN = 16, 256
"""Rows of a matrix a program, and columns of a turn: bytes, too."""
MOST_TURNS = 32
"""Of a program: they are written out, one after the other."""


def product_fits(x: Tensor, w: WeightArgs) -> bool:
    """Whether ``row_turns`` has the product of rows ``x`` with a matrix."""
    return w.matrices == 1 and _fits(x, w, w.columns)


def experts_fit(x: Tensor, w13: WeightArgs, w2: WeightArgs, count: int) -> bool:
    """Whether ``short_experts`` has these experts, of ``count`` choices a row."""
    return _fits(x, w13, w13.columns) and _fits(x, w2, count * w2.columns)


def _fits(x: Tensor, w: WeightArgs, columns: int) -> bool:
    """Whether a matrix is one for this, of programs that take so many columns of all."""
    return (
        gluon()
        and x.dtype == torch.bfloat16
        and w.format == FP8_BLOCK
        and w.columns % TURN == w.rows % ROWS == 0
        and columns <= MOST_TURNS * TURN
    )
