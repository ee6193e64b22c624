"""Rows of a latent cache as kernels read them, in each layout of rows that lie dense."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_hip

from ml4core.api import KVCache
from ml4core_triton.kernels.fp8 import HALF_BIAS, decoded, fp8, moved
from ml4core_triton.kernels.numeric import INTERPRETED, narrow, widen
from ml4core_triton.kernels.target import target_of

LAYOUTS = ("fp8_ds_mla", "e4m3", "e4m3fnuz", "bf16", "fp32")
DS_MLA = tl.constexpr(0)
E4M3FN = tl.constexpr(1)
E4M3FNUZ = tl.constexpr(2)
"""FP8, all values of a row under the cache's scale."""

WIDE = tl.constexpr(3)
"""bf16 and fp32: values as they are."""

_SCALED = tl.constexpr(128)


def foreign(layout: str, arch: str) -> bool:
    """Whether an architecture can't convert a layout's flavour of FP8: NVIDIA's know one only."""
    return layout == "e4m3fnuz" and arch.startswith("sm_")


@dataclass(frozen=True)
class LatentRows:
    """What a kernel needs to know of a latent cache.

    Attributes:
        rows: the array [blocks, block_size, width] of uint8, bfloat16 or float32.
        scale: [1] fp32; read where ``scaled``.
        kind: ``DS_MLA``, ``E4M3FN``, ``E4M3FNUZ`` or ``WIDE``.
        latent, rope: L and R.
    """

    rows: torch.Tensor
    scale: torch.Tensor
    kind: int
    latent: int
    rope: int

    @property
    def scaled(self) -> bool:
        """Whether the cache has one scale."""
        return self.kind in (E4M3FN.value, E4M3FNUZ.value)

    @property
    def coded(self) -> bool:
        """Whether rows are FP8, of whatever layout."""
        return self.kind != WIDE.value

    @property
    def page_stride(self) -> int:
        """In elements of ``rows``."""
        return int(self.rows.stride(0))

    @property
    def row_stride(self) -> int:
        return int(self.rows.stride(1))


def latent_rows(cache: KVCache) -> LatentRows:
    """The rows of a cache. Raises ``ValueError`` for a layout that the kernels don't read, or not
    on its device.
    """
    arch = target_of(cache.parts[0].device).arch
    cache.require(*(name for name in LAYOUTS if not foreign(name, arch)))
    counts = {field.name: field.count for field in cache.layout.fields}
    rows = cache.parts[0]
    if rows.stride(-1) != 1:
        raise ValueError(
            f"rows of a latent cache must be dense; these have strides {rows.stride()} for "
            f"{list(rows.shape)}"
        )
    kinds = {"fp8_ds_mla": DS_MLA, "e4m3": E4M3FN, "e4m3fnuz": E4M3FNUZ}
    kind, scale = kinds.get(cache.layout.id, WIDE).value, cache.scale
    if kind in (E4M3FN.value, E4M3FNUZ.value) and scale is None:
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
def row_scale(cache_scale, KIND: tl.constexpr):
    """The scale of a cache that has one, else 1."""
    scale = 1.0
    if KIND == E4M3FN or KIND == E4M3FNUZ:  # noqa: SIM109, kernels have no tuples
        scale = tl.load(cache_scale)
    return scale


@triton.jit
def row_tile(
    rows, offsets, valid, KIND: tl.constexpr, START: tl.constexpr, COUNT: tl.constexpr,
    WIDTH: tl.constexpr, DTYPE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Values START .. START + COUNT - 1 of rows at ``offsets`` [keys] as [keys, WIDTH]; 0 where not
    ``valid``, and behind. In ``DTYPE``, without the cache's scale; or, with ``CODES``, as FP8
    operands of a product. Not for ``DS_MLA``.
    """
    column = tl.arange(0, WIDTH)
    mask = valid[:, None] if WIDTH == COUNT else valid[:, None] & (column < COUNT)[None, :]
    stored = tl.load(rows + offsets[:, None] + (column + START)[None, :], mask=mask, other=0)
    if CODES:
        tile = fp8(stored, KIND == E4M3FNUZ)
    elif KIND != WIDE:
        tile = decoded(stored, DTYPE, KIND == E4M3FNUZ)
    elif stored.dtype == DTYPE:
        tile = stored
    else:
        tile = narrow(widen(stored), DTYPE)
    return tile


@triton.jit
def decoded_once(tile):
    """A bf16 tile as it is. Where two products take it in layouts of their own, the compiler would
    decode bytes in each of them, twice, and bring those through shared memory one by one.
    """
    if tile.dtype == tl.bfloat16 and not INTERPRETED and not is_hip():
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return tile


@triton.jit
def latent_tile(
    rows, offsets, valid, KIND: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    DTYPE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Latents [BK, BL] of rows at ``offsets`` [BK], as ``row_tile`` gives values. Those of
    ``DS_MLA`` are with their scales, and in ``DTYPE`` only.
    """
    if KIND == DS_MLA:
        column = tl.arange(0, BL)
        mask = valid[:, None] if BL == L else valid[:, None] & (column < L)[None, :]
        stored = tl.load(rows + offsets[:, None] + column[None, :], mask=mask, other=0)
        group = tl.arange(0, BL // _SCALED)
        place = (rows + offsets + L).to(tl.pointer_type(tl.float32))
        known = valid[:, None] if BL == L else valid[:, None] & (group < L // _SCALED)[None, :]
        factor = tl.load(place[:, None] + group[None, :], mask=known, other=0.0)
        # A power of two, so that nothing is lost where it is narrowed or multiplied by.
        wide: tl.constexpr = tl.float32 if INTERPRETED else DTYPE
        if tl.bfloat16 == DTYPE and not INTERPRETED and not is_hip():
            # Conversions unpack single bytes here, 8 instructions a value where this takes 4.
            values = moved(stored) * tl.full((), HALF_BIAS, tl.bfloat16)
            factor = factor * HALF_BIAS
        else:
            values = decoded(stored, wide, False)
        values = tl.reshape(values, (BK, BL // _SCALED, _SCALED))
        grouped = values * factor.to(wide)[:, :, None]
        tile = decoded_once(narrow(tl.reshape(grouped, (BK, BL)), DTYPE))
    else:
        tile = row_tile(rows, offsets, valid, KIND, 0, L, BL, DTYPE, CODES)
        if KIND != WIDE:
            tile = decoded_once(tile)
    return tile


@triton.jit
def rope_tile(
    rows, offsets, valid, KIND: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    DTYPE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """The rope parts [keys, BR] of the same rows."""
    if KIND == DS_MLA:
        column = tl.arange(0, BR)
        mask = valid[:, None] if BR == R else valid[:, None] & (column < R)[None, :]
        place = (rows + offsets + (L + 4 * (L // _SCALED))).to(tl.pointer_type(tl.bfloat16))
        stored = tl.load(place[:, None] + column[None, :], mask=mask, other=0.0)
        tile = stored if tl.bfloat16 == DTYPE else widen(stored)
    else:
        tile = row_tile(rows, offsets, valid, KIND, L, R, BR, DTYPE, CODES)
    return tile
