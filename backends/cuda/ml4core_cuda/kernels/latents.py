"""Rows of a latent cache as kernels read them, in each open layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ml4core.api import KVCache
from ml4core_cuda.kernels.numeric import INTERPRETED, e4m3, narrow
from ml4core_cuda.kernels.row_scales import widen

LAYOUTS = ("fp8_ds_mla", "e4m3", "bf16", "fp32")

DS_MLA = tl.constexpr(0)
E4M3 = tl.constexpr(1)
WIDE = tl.constexpr(2)
"""bf16 and fp32: values as they are."""

_SCALED = tl.constexpr(128)


@dataclass(frozen=True)
class LatentRows:
    """What a kernel needs to know of a latent cache.

    Attributes:
        rows: the array [blocks, block_size, width] of uint8, bfloat16 or float32.
        scale: [1] fp32; read for ``e4m3`` only.
        kind: ``DS_MLA``, ``E4M3`` or ``WIDE``.
        latent, rope: L and R.
    """

    rows: torch.Tensor
    scale: torch.Tensor
    kind: int
    latent: int
    rope: int

    @property
    def page_stride(self) -> int:
        """In elements of ``rows``."""
        return int(self.rows.stride(0))

    @property
    def row_stride(self) -> int:
        return int(self.rows.stride(1))


def latent_rows(cache: KVCache) -> LatentRows:
    """The rows of a cache. Raises ``ValueError`` for a layout that the kernels don't read."""
    cache.require(*LAYOUTS)
    counts = {field.name: field.count for field in cache.layout.fields}
    rows = cache.parts[0]
    if rows.stride(-1) != 1:
        raise ValueError(
            f"rows of a latent cache must be dense; these have strides {rows.stride()} for "
            f"{list(rows.shape)}"
        )
    id = cache.layout.id
    kind = {"fp8_ds_mla": DS_MLA, "e4m3": E4M3}.get(id, WIDE).value
    scale = cache.scale
    if kind == E4M3.value and scale is None:
        scale = torch.ones(1, dtype=torch.float32, device=rows.device)
    return LatentRows(
        rows, rows if scale is None else scale, kind, counts["latent"], counts.get("rope", 0)
    )


@triton.jit
def row_offsets(slots, BLOCK_SIZE: tl.constexpr, page_stride, row_stride):
    """Offsets int64 of slots, in elements of the array."""
    page = slots // BLOCK_SIZE
    return page.to(tl.int64) * page_stride + (slots % BLOCK_SIZE) * row_stride


@triton.jit
def latent_tile(
    rows,
    offsets,
    valid,
    KIND: tl.constexpr,
    L: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Latents [BK, BL] in ``DTYPE`` of rows at ``offsets`` [BK]; 0 where not ``valid``, and
    behind L. Those of ``E4M3`` are without the cache's scale.
    """
    column = tl.arange(0, BL)
    mask = valid[:, None] if BL == L else valid[:, None] & (column < L)[None, :]
    stored = tl.load(rows + offsets[:, None] + column[None, :], mask=mask, other=0)
    if KIND == DS_MLA:
        group = tl.arange(0, BL // _SCALED)
        place = (rows + offsets + L).to(tl.pointer_type(tl.float32))
        known = valid[:, None] if BL == L else valid[:, None] & (group < L // _SCALED)[None, :]
        factor = tl.load(place[:, None] + group[None, :], mask=known, other=0.0)
        # A power of two, so that nothing is lost where it is narrowed or multiplied by.
        wide: tl.constexpr = tl.float32 if INTERPRETED else DTYPE
        values = tl.reshape(e4m3(stored, wide), (BK, BL // _SCALED, _SCALED))
        grouped = values * factor.to(wide)[:, :, None]
        tile = narrow(tl.reshape(grouped, (BK, BL)), DTYPE)
    elif KIND == E4M3:
        tile = e4m3(stored, DTYPE)
    elif stored.dtype == DTYPE:
        tile = stored
    else:
        tile = narrow(widen(stored), DTYPE)
    return tile


@triton.jit
def rope_tile(
    rows,
    offsets,
    valid,
    KIND: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The rope parts [keys, BR] of the same rows, as ``latent_tile`` gives latents."""
    column = tl.arange(0, BR)
    mask = valid[:, None] if BR == R else valid[:, None] & (column < R)[None, :]
    if KIND == DS_MLA:
        place = (rows + offsets + (L + 4 * (L // _SCALED))).to(tl.pointer_type(tl.bfloat16))
        stored = tl.load(place[:, None] + column[None, :], mask=mask, other=0.0)
        tile = stored if tl.bfloat16 == DTYPE else widen(stored)
    else:
        stored = tl.load(rows + offsets[:, None] + (column + L)[None, :], mask=mask, other=0)
        if KIND == E4M3:
            tile = e4m3(stored, DTYPE)
        elif stored.dtype == DTYPE:
            tile = stored
        else:
            tile = narrow(widen(stored), DTYPE)
    return tile
