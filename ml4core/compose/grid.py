"""Rows of a batch laid out as [requests, rows a request], for batched matrix products."""

from __future__ import annotations

import torch
from torch import Tensor


class Grid:
    """Maps rows [T, ...] of requests given by ``query_start`` [R+1] to [R, Q, ...] and back."""

    def __init__(self, query_start: Tensor, max_rows: int) -> None:
        start = query_start.long()
        offset = torch.arange(max_rows, device=start.device)
        self._start = start
        self._max_rows = max_rows
        self._row = start[:-1, None] + offset
        self._valid = offset < (start[1:] - start[:-1])[:, None]

    def spread(self, x: Tensor) -> Tensor:
        """[T, ...] -> [R, Q, ...]; cells without a row are zero."""
        whole = self._whole(x.shape[0])
        cells = x.unsqueeze(0) if whole else x[self._row.clamp(0, x.shape[0] - 1)]
        valid = self._valid.reshape(*self._valid.shape, *(1,) * (x.dim() - 1))
        return torch.where(valid, cells, torch.zeros((), dtype=x.dtype, device=x.device))

    def collect(self, cells: Tensor, rows: int) -> Tensor:
        """[R, Q, ...] -> [T, ...]; rows that belong to no request repeat some cell."""
        if self._whole(rows):
            return cells[0]
        row = torch.arange(rows, device=cells.device)
        request = torch.searchsorted(self._start[1:].contiguous(), row, right=True)
        request = request.clamp_max(cells.shape[0] - 1)
        offset = (row - self._start[request]).clamp(0, self._max_rows - 1)
        return cells[request, offset]

    def _whole(self, rows: int) -> bool:
        """Whether the rows are the one request's cells, in order: nothing has to be moved."""
        return self._row.shape[0] == 1 and rows == self._max_rows
