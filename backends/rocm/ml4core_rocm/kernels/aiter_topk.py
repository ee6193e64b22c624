"""AITER's top-k in its stable form: ascending positions, ties to the lowest, so that every rank of
a tensor-parallel group chooses the same keys. It exists for 2,048 keys on gfx950.

It would take NaN for the largest score: scores are looked through for NaN first, and -inf put in
its place. A row with NaN is a fault, and what it chose is not used. Of a row its own run is read,
once, however wide the array is padded: a program whose columns lie behind the run ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_rocm.aiter_functions import load

KEYS = 2048
_TILE = 4096


@triton.jit
def nan_kernel(scores, begins, ends, has_nan, row_stride, column_stride, TILE: tl.constexpr):
    """-inf in the place of NaN, and whether there was any, in columns begins[t] .. ends[t] - 1 of
    row t: grid (rows, tiles of the longest run).
    """
    row = tl.program_id(0)
    column = tl.load(begins + row) + tl.program_id(1) * TILE + tl.arange(0, TILE)
    fits = column < tl.load(ends + row)
    own = scores + row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    value = tl.load(own, mask=fits, other=0.0)
    nan = fits & (value != value)
    if tl.max(nan.to(tl.int32), 0) != 0:
        tl.store(own, float("-inf"), mask=nan)
        tl.store(has_nan + row, True)


def topk_rows(
    scores: Tensor, begins: Tensor, ends: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions int32 [T, 2048] from each row's begin, lens int32 [T] and has_nan bool [T] of
    scores fp32 [T, S], of which a row has columns begins[t] to ends[t] - 1, int32 [T], ``longest``
    at most. NaN among them becomes -inf.
    """
    has_nan = without_nan(scores, begins, ends, longest)
    found = scores.new_full((scores.shape[0], KEYS), -1, dtype=torch.int32)
    load("top_k_per_row_prefill")(
        scores, begins, ends, found, None, scores.shape[0], scores.stride(0), scores.stride(1),
        k=KEYS, stable=True,
    )  # fmt: skip
    # Columns of the whole array, not of a row's run.
    return _ended(found - begins.unsqueeze(1), ends - begins, has_nan)


def topk_windows(scores: Tensor, visible: Tensor, rows_each: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same of rows that begin at column 0, ``rows_each`` a request, of which consecutive ones
    see one key more each; visible int32 [T].
    """
    has_nan = without_nan(scores, torch.zeros_like(visible), visible, scores.shape[1])
    window = visible.view(-1, rows_each)
    left = torch.arange(rows_each - 1, -1, -1, dtype=torch.int32, device=visible.device)
    lengths = torch.where(window > 0, window + left, 0).amax(1).to(torch.int32)
    found = scores.new_full((scores.shape[0], KEYS), -1, dtype=torch.int32)
    load("top_k_per_row_decode")(
        scores, rows_each, lengths, found, scores.shape[0], scores.stride(0), scores.stride(1),
        k=KEYS, stable=True,
    )  # fmt: skip
    return _ended(found, visible, has_nan)


def without_nan(scores: Tensor, begins: Tensor, ends: Tensor, longest: int) -> Tensor:
    """has_nan bool [T]; in place, as scores are made for top-k alone."""
    rows = scores.shape[0]
    has_nan = torch.zeros(rows, dtype=torch.bool, device=scores.device)
    if rows and longest:
        nan_kernel[(rows, triton.cdiv(longest, _TILE))](
            scores, begins, ends, has_nan, scores.stride(0), scores.stride(1), TILE=_TILE
        )
    return has_nan


def _ended(positions: Tensor, visible: Tensor, has_nan: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What stands behind a row's length is -1, whatever the kernel left there."""
    lens = visible.clamp(0, KEYS).to(torch.int32)
    column = torch.arange(KEYS, device=positions.device)
    kept = torch.where(column < lens.unsqueeze(1), positions, -1).to(torch.int32)
    return kept, lens, has_nan
