"""AITER's index scores: paged ones of decode and verify rows, and those of a prefill over gathered
keys. What a row doesn't see is left as the memory was: top-k looks at each row's own run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.aiter_functions import load
from ml4core_rocm.kernels.gather_index_keys import gather_index_keys
from ml4core_rocm.kernels.index_queries import index_queries

CHUNK = 256
"""Keys of a chunk; it and the block size divide one another."""


def paged_scores(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    block_table: Tensor,
    visible: Tensor,
    rows_each: int,
) -> Tensor:
    """Scores fp32 [T, S] of queries [T, Hi, D], ``rows_each`` a request, of which consecutive rows
    see one key more each, as verify windows do; visible int32 [T].

    ``ValueError`` for pages that aren't tiles of 16 tokens, or that don't fit the chunks.
    """
    cache.require("tiled16_f32")
    size, pages = cache.block_size, cache.parts[0]
    requests = block_table.shape[0]
    if CHUNK % size and size % CHUNK:
        raise ValueError(f"pages of {size} keys and chunks of {CHUNK} don't divide one another")
    codes, factor = index_queries(q, weights, scale)
    # One length a request: that of its last row. A row that sees nothing doesn't tell it.
    window = visible.view(requests, rows_each)
    left = torch.arange(rows_each - 1, -1, -1, dtype=torch.int32, device=visible.device)
    lengths = torch.where(window > 0, window + left, 0).amax(1).to(torch.int32)
    columns = block_table.shape[1] * size
    out = torch.empty(q.shape[0], columns, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    load("deepgemm_fp8_paged_mqa_logits")(
        codes.view(torch.float8_e4m3fn).view(requests, rows_each, *q.shape[1:]),
        pages.view(cache.blocks, size, 1, pages.shape[1] // size),
        factor, out, lengths, block_table.contiguous(), columns,
        Preshuffle=True, KVBlockSize=size, ChunkK=CHUNK,
    )  # fmt: skip
    return out


def gathered_keys(
    cache: KVCache, block_table: Tensor, starts: Tensor, total: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales of requests' keys, gathered one request after the other from ``starts``
    int32 [R + 1] on: float8_e4m3fn [total, D] and fp32 [total].
    """
    codes, scales = gather_index_keys(cache, block_table, starts, total, longest)
    return codes.view(torch.float8_e4m3fn), scales


def run_scores(
    q: Tensor,
    weights: Tensor,
    scale: float,
    keys: tuple[Tensor, Tensor],
    begins: Tensor,
    ends: Tensor,
) -> Tensor:
    """Scores fp32 [T, total] of queries [T, Hi, D] over ``gathered_keys``, of which row t sees
    begins[t] to ends[t] - 1, int32 [T]. ``ValueError`` for heads or widths that are no powers of
    two.
    """
    heads, width = q.shape[1:]
    if heads & (heads - 1) or width & (width - 1):
        raise ValueError(f"AITER scores powers of two of heads and values, got {heads} and {width}")
    own, factor = index_queries(q, weights, scale)
    codes, scales = keys
    found: Tensor = load("fp8_mqa_logits")(
        own.view(torch.float8_e4m3fn), codes, scales, factor, begins, ends, clean_logits=False
    )
    return found
