"""How ``fp4_experts`` cuts its products, and which it has. In a module of its own: those are
written in Gluon, and not to be imported where it isn't known.
"""

from __future__ import annotations

from dataclasses import dataclass

from ml4core_cuda.kernels.target import gluon
from ml4core_triton.kernels.weights import K_TILE, WeightArgs


@dataclass(frozen=True)
class TurnsTiling:
    """How a product is cut.

    Attributes:
        columns: rows of the weight a program, 16 or more; of w1 and w3 together.
        warps: of a program; they share its rows, and take 128 columns of the weight in turn.
        chunks: turns that are asked for at once, so that much of a row comes together.
        stages: how many times that shared memory holds.
    """

    columns: int = 32
    warps: int = 2
    chunks: int = 2
    stages: int = 2


def turns_fit(*weights: WeightArgs) -> bool:
    """Whether ``fp4_experts`` has these weights, as ``moe_fp4`` has them: a loop of one step isn't
    compiled.
    """
    tiling = TurnsTiling()
    return gluon() and all(w.columns > tiling.warps * tiling.chunks * K_TILE for w in weights)
