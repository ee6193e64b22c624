"""AITER's top-k in its stable form: ascending positions, ties to the lowest, so that every rank of
a tensor-parallel group chooses the same keys. It exists for 2,048 keys on gfx950.

It would take NaN for the largest score: scores are looked through for NaN first, and -inf put in
its place. A row with NaN is a fault, and what it chose is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core_rocm.aiter_functions import load

KEYS = 2048


def topk_rows(scores: Tensor, begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions int32 [T, 2048] from each row's begin, lens int32 [T] and has_nan bool [T] of
    scores fp32 [T, S], of which a row has columns begins[t] to ends[t] - 1, int32 [T].
    """
    scores, has_nan = _without_nan(scores, begins, ends)
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
    begins = torch.zeros_like(visible)
    scores, has_nan = _without_nan(scores, begins, visible)
    window = visible.view(-1, rows_each)
    left = torch.arange(rows_each - 1, -1, -1, dtype=torch.int32, device=visible.device)
    lengths = torch.where(window > 0, window + left, 0).amax(1).to(torch.int32)
    found = scores.new_full((scores.shape[0], KEYS), -1, dtype=torch.int32)
    load("top_k_per_row_decode")(
        scores, rows_each, lengths, found, scores.shape[0], scores.stride(0), scores.stride(1),
        k=KEYS, stable=True,
    )  # fmt: skip
    return _ended(found, visible, has_nan)


def _without_nan(scores: Tensor, begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    column = torch.arange(scores.shape[1], device=scores.device)
    seen = (column >= begins.unsqueeze(1)) & (column < ends.unsqueeze(1))
    nan = torch.isnan(scores) & seen
    return scores.masked_fill(nan, float("-inf")), nan.any(1)


def _ended(positions: Tensor, visible: Tensor, has_nan: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What stands behind a row's length is -1, whatever the kernel left there."""
    lens = visible.clamp(0, KEYS).to(torch.int32)
    column = torch.arange(KEYS, device=positions.device)
    kept = torch.where(column < lens.unsqueeze(1), positions, -1).to(torch.int32)
    return kept, lens, has_nan
