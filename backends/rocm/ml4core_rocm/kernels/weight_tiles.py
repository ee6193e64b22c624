"""Tiles of weights in every open format.

A tile is [BN, 128] of a matrix [N, K], the inner axis contiguous. Codes are exact in bf16: e4m3 has
4 significant bits, an e2m1 code times an e4m3 or e8m0 group scale 6 at most. The scales of
``fp8_block`` multiply a tile's sums, those of ``fp8_tensor`` and of NVFP4's rows the whole sum, in
fp32. FP4 tiles come as two, of the even and of the odd columns (a byte's low and high nibble): the
activation is read as two such halves, so that nothing is shuffled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.fp8 import decoded, fp8
from ml4core_triton.kernels.numeric import e2m1, e8m0, narrow, widen
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, NVFP4

_FP8_BLOCK, _NVFP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4)
_TILE = tl.constexpr(K_TILE)


@triton.jit
def packed_tile(data, rows, row_fits, k0, K, WIDTH: tl.constexpr):
    """Bytes uint8 [BN, WIDTH / 2] of ``WIDTH`` FP4 columns from k0 on."""
    byte = k0 // 2 + tl.arange(0, WIDTH // 2)
    where = data + rows.to(tl.int64)[:, None] * (K // 2) + byte[None, :]
    return tl.load(where, mask=row_fits[:, None] & (byte < K // 2)[None, :], other=0)


@triton.jit
def group_bytes(scale, rows, row_fits, k0, K, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Scales uint8 [BN, WIDTH / GROUP] of these columns; 0 behind K."""
    group = k0 // GROUP + tl.arange(0, WIDTH // GROUP)
    where = scale + rows.to(tl.int64)[:, None] * (K // GROUP) + group[None, :]
    return tl.load(where, mask=row_fits[:, None] & (group < K // GROUP)[None, :], other=0)


@triton.jit
def fp4_tile(
    data, scale, rows, row_fits, k0, K, BN: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr
):
    """The even and the odd columns of a tile, [BN, 64] each, group scales included, in ``WIDE``:
    bf16 or fp32.
    """
    GROUP: tl.constexpr = 16 if FORMAT == _NVFP4 else 32
    codes = packed_tile(data, rows, row_fits, k0, K, _TILE).to(tl.int32)
    each = group_bytes(scale, rows, row_fits, k0, K, GROUP, _TILE)
    factor = decoded(each, tl.float32, False) if FORMAT == _NVFP4 else e8m0(each.to(tl.int32))
    spread = tl.broadcast_to(factor[:, :, None], (BN, _TILE // GROUP, GROUP // 2))
    spread = tl.reshape(spread, (BN, _TILE // 2))
    return narrow(e2m1(codes) * spread, WIDE), narrow(e2m1(codes >> 4) * spread, WIDE)


@triton.jit
def plain_tile(
    data, rows, row_fits, k0, K, FORMAT: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr
):
    """A tile [BN, 128] of any other format, its block's or matrix' scale left out; as FP8 operands
    with ``CODES``.
    """
    columns = k0 + tl.arange(0, _TILE)
    where = data + rows.to(tl.int64)[:, None] * K + columns[None, :]
    fits = row_fits[:, None] & (columns < K)[None, :]
    stored = tl.load(where, mask=fits, other=0)
    if FORMAT < _FP8_BLOCK:
        found = stored if stored.dtype == WIDE else narrow(widen(stored), WIDE)
    elif CODES:
        found = fp8(stored, False)
    else:
        found = decoded(stored, WIDE, False)
    return found
