"""Tables of the pages that a window reaches, so that their width is that of the window, whatever
the context: few programs serve all steps, and none walks over pages that no row sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ml4core_tpu.bridge import bucket


class Paged(NamedTuple):
    """What rows of requests see.

    Attributes:
        table: int32 [R, B].
        query_start: int32 [R + 1], the first row of each request.
        visible: int32 [T]: a row sees that many of its request's keys.
    """

    table: Tensor
    query_start: Tensor
    visible: Tensor


def near_pages(paged: Paged, window: int | None, page: int, max_rows: int, most: int) -> Paged:
    """The same for the last ``window`` keys that a row sees: keys are numbered from the first page
    that a request's rows reach, and tables are as wide as windows of ``max_rows`` rows that follow
    each other need, or as ``most``, the pages that a request can have. Where that is too few for
    some, and for None, which is all keys, tables are as they were, but of a power of two.
    """
    table, start, visible = paged
    if window is not None and table.shape[0]:
        near = min(most, 1 + -(-(window + max_rows) // page))
        if (found := _from_first(paged, window, page, near)) is not None:
            return found
    return Paged(pad(table, (0, bucket(table.shape[1]) - table.shape[1])), start, visible)


def _from_first(paged: Paged, window: int, page: int, near: int) -> Paged | None:
    """With ``near`` pages of each request; None if one needs more."""
    table, start, visible = paged
    requests, rows = table.shape[0], int(start[-1])
    counts = (start[1:] - start[:-1]).long()
    owner = torch.repeat_interleave(torch.arange(requests), counts)
    seen = visible[:rows].long()
    live = seen > 0
    first = torch.full((requests,), table.shape[1] * page)
    first = first.scatter_reduce(0, owner[live], (seen[live] - window).clamp(min=0), "amin") // page
    last = torch.zeros(requests, dtype=torch.int64)
    last = last.scatter_reduce(0, owner[live], seen[live] - 1, "amax") // page
    if bool((last - first >= near).any()):
        return None
    columns = first.clamp(max=table.shape[1] - 1).unsqueeze(-1) + torch.arange(near)
    inside = columns < table.shape[1]
    taken = table.gather(1, columns.clamp(max=table.shape[1] - 1))
    moved = visible.clone()
    moved[:rows] = torch.where(live, seen - first[owner] * page, 0).to(visible.dtype)
    return Paged(torch.where(inside, taken, 0).to(table.dtype), start, moved)
