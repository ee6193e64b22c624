"""Index keys of requests, one after the other: codes and scales as a prefill's products take them.

What a chunk's rows score is gathered once, instead of by each tile of rows. The rule that finds a
code in its page is that of the writer and of the paged reader.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_triton.kernels.keys import index_keys, key_scales, key_tile
from ml4core_triton.kernels.numeric import next_power

_ROWS = 32


@triton.jit
def gather_index_keys_kernel(
    pages,
    block_table,
    starts,
    codes,
    scales,
    blocks,
    table_pages,
    page_stride,
    table_stride,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid (tiles of the longest request, requests)."""
    request = tl.program_id(1)
    begin = tl.load(starts + request)
    length = tl.load(starts + request + 1) - begin
    position = tl.program_id(0) * BK + tl.arange(0, BK)
    fits = position < length
    place = position // BLOCK_SIZE
    known = fits & (place < table_pages)
    table = block_table + request.to(tl.int64) * table_stride
    page = tl.load(table + place, mask=known, other=-1)
    known = known & (page >= 0) & (page < blocks)
    offset = tl.where(known, page, 0).to(tl.int64) * page_stride
    inside = position % BLOCK_SIZE
    stored = key_tile(pages, offset, inside, known, KIND, D, BD)
    column = tl.arange(0, BD)
    row = (begin + position).to(tl.int64)
    mask = fits[:, None] & (column < D)[None, :]
    tl.store(codes + row[:, None] * D + column[None, :], stored, mask)
    tl.store(scales + row, key_scales(pages, offset, inside, known, KIND, D, BLOCK_SIZE), fits)


def gather_index_keys(
    cache: KVCache, block_table: Tensor, starts: Tensor, total: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [total, D] and scales fp32 [total] of requests' first keys: those of request r
    from starts[r] to starts[r + 1] - 1, int32 [R + 1], through its pages block_table int32 [R, B].

    ``total`` is starts[R] or more, ``longest`` what one request has at most; both known without the
    device. Positions whose page isn't there give zeros of scale 1; rows behind starts[R] are not
    written. ``ValueError`` for a layout without codes.
    """
    cache.require("tiled16_f32", "planar_f32")
    keys = index_keys(cache)
    requests, pages = block_table.shape
    device = block_table.device
    codes = torch.empty(total, keys.width, dtype=torch.uint8, device=device)
    scales = torch.empty(total, dtype=torch.float32, device=device)
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    if total and requests and longest:
        gather_index_keys_kernel[(-(-longest // _ROWS), requests)](
            keys.pages,
            table,
            starts.contiguous(),
            codes,
            scales,
            cache.blocks,
            pages,
            keys.page_stride,
            table.stride(0),
            KIND=keys.kind,
            D=keys.width,
            BK=_ROWS,
            BD=next_power(keys.width),
            BLOCK_SIZE=cache.block_size,
            num_warps=4,
        )
    return codes, scales
