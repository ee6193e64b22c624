"""LayerNorm, rope, FP8 and the write of an index key in one launch: what ``layer_norm``, ``rope``
and ``indexer_write`` do after the key's projection.

Rate model: 256 or 512 bytes read and 132 written a token: a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_triton.kernels.angles import cos_sin
from ml4core_triton.kernels.keys import index_keys, store_keys
from ml4core_triton.kernels.layer_norm import normed_by, row_moments
from ml4core_triton.kernels.numeric import next_power, rows_of, widen

_ROWS = 4


@triton.jit
def index_key_write_kernel(
    pages,
    slots,
    keys,
    weight,
    bias,
    positions,
    inv_freq,
    count,
    all_slots,
    page_stride,
    key_stride,
    eps,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program writes ``ROWS`` tokens' keys. A rotated dim is its own normed value and that of its
    pair's other dim: keys are read a second time for these, from L1.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token, token < count, other=-1)
    valid = (slot >= 0) & (slot < all_slots)
    column = tl.arange(0, BD)
    fits = valid[:, None] & (column < D)[None, :]
    row = keys + token.to(tl.int64)[:, None] * key_stride
    x = widen(tl.load(row + column[None, :], fits, other=0.0))
    mean, rest, factor = row_moments(x, fits, D, eps)
    gain = widen(tl.load(weight + column, column < D, other=0.0))
    shift = widen(tl.load(bias + column, column < D, other=0.0))
    normed = normed_by(x, gain[None, :], shift[None, :], mean, rest, factor)
    if R > 0:
        HALF: tl.constexpr = R // 2
        rotated = column < R
        if INTERLEAVED:
            other = column ^ 1
            pair = column // 2
            first = column % 2 == 0
        else:
            other = (column + HALF) % R
            pair = column % HALF
            first = column < HALF
        other = tl.where(rotated, other, 0)
        y = widen(tl.load(row + other[None, :], valid[:, None] & rotated[None, :], other=0.0))
        gain = widen(tl.load(weight + other, rotated, other=0.0))
        shift = widen(tl.load(bias + other, rotated, other=0.0))
        partner = normed_by(y, gain[None, :], shift[None, :], mean, rest, factor)
        position = tl.load(positions + token, valid, other=0)
        frequency = tl.load(inv_freq + pair, rotated, other=0.0)
        cos, sin = cos_sin(position[:, None], frequency[None, :])
        turned = normed * cos + tl.where(first[None, :], -partner, partner) * sin
        normed = tl.where(rotated[None, :], turned, normed)
    normed = tl.where(fits, normed, 0.0)
    slot = tl.where(valid, slot, 0)
    store_keys(pages, slot, valid, normed, page_stride, KIND, D, BD, BLOCK_SIZE)


def index_key_write(
    cache: KVCache,
    slots: Tensor,
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor | None,
    interleaved: bool,
) -> None:
    """Norms ``key`` [T, D] by ``weight`` and ``bias`` [D], rotates its first dims by ``positions``
    int64 [T] * ``inv_freq`` fp32 [R/2] (None: none), and writes it to slots int64 [T].

    A slot outside of the cache writes nothing. ``ValueError`` for a layout that isn't served and
    for widths that don't belong together.
    """
    keys = index_keys(cache)
    key = rows_of(key)
    width = keys.width
    rope = 0 if inv_freq is None else 2 * inv_freq.shape[-1]
    if key.shape[1] != width or weight.shape != (width,) or bias.shape != (width,) or rope > width:
        raise ValueError(
            f"keys of {cache.layout.id!r} have {width} values, with a weight and a bias each and "
            f"rope in as many at most; got keys {list(key.shape)}, weight {list(weight.shape)}, "
            f"bias {list(bias.shape)} and rope {rope}"
        )
    if not len(slots):
        return
    index_key_write_kernel[(-(-len(slots) // _ROWS),)](
        keys.pages,
        slots.contiguous(),
        key,
        weight.contiguous(),
        bias.contiguous(),
        positions.contiguous(),
        weight if inv_freq is None else inv_freq.contiguous(),
        len(slots),
        cache.blocks * cache.block_size,
        keys.page_stride,
        key.stride(0),
        eps,
        KIND=keys.kind,
        D=width,
        BD=next_power(width),
        R=rope,
        INTERLEAVED=interleaved,
        BLOCK_SIZE=cache.block_size,
        ROWS=_ROWS,
        num_warps=1,
    )
