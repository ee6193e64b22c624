"""``topk`` with the sizes that were measured on the device."""

from __future__ import annotations

from torch import Tensor

from ml4core_cuda.kernels.target import device_name
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels import topk as shared
from ml4core_triton.kernels.topk import Chosen, Tiling


def topk(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions int32 [T, k], lens int32 [T] and has_nan bool [T] of scores fp32 [T, S], of which
    the first visible [T] count. ``ValueError`` for a k above a quarter of a tile.
    """
    chosen = choose(scores, visible, k)
    return chosen.positions, chosen.lens, chosen.has_nan


def choose(
    scores: Tensor,
    visible: Tensor,
    k: int,
    block_table: Tensor | None = None,
    row_request: Tensor | None = None,
    block_size: int = 1,
    *,
    ahead: bool = False,
) -> Chosen:
    """``topk``, with the slots of what is chosen if a block table int32 [R, B] and the request of
    each row int64 [T] are given. ``ahead``: launches may begin before the end of those before.
    """

    def measured(shape: str, default: Tiling) -> Tiling:
        return sizes_for("topk", device_name(scores.device), shape, default)

    given = (scores, visible, k, block_table, row_request, block_size)
    return shared.choose(*given, ahead=ahead, measured=measured)
