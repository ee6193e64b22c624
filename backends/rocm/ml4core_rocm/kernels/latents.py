"""Rows of a latent cache as kernels read them, in each layout that is served."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ml4core.api import KVCache
from ml4core_rocm.kernels.numeric import decoded, fp8, narrow, widen

LAYOUTS = ("e4m3", "e4m3fnuz", "bf16", "fp32")

E4M3FN = tl.constexpr(0)
E4M3FNUZ = tl.constexpr(1)
WIDE = tl.constexpr(2)
"""bf16 and fp32: values as they are."""


@dataclass(frozen=True)
class LatentRows:
    """What a kernel needs to know of a latent cache.

    Attributes:
        rows: the array [blocks, block_size, width] of uint8, bfloat16 or float32.
        scale: [1] fp32; read for FP8 only.
        kind: ``E4M3FN``, ``E4M3FNUZ`` or ``WIDE``.
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
    kind = {"e4m3": E4M3FN, "e4m3fnuz": E4M3FNUZ}.get(cache.layout.id, WIDE).value
    scale = cache.scale
    if kind != WIDE.value and scale is None:
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
def row_tile(
    rows,
    offsets,
    valid,
    KIND: tl.constexpr,
    START: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,
):
    """Values START .. START + COUNT - 1 of rows at ``offsets`` [keys] as [keys, WIDTH]; 0 where not
    ``valid``, and behind. In ``DTYPE``, without the cache's scale; or, with ``CODES``, as FP8
    operands of a product.
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
