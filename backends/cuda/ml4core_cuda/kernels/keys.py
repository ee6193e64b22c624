"""Index keys of a cache as kernels read them, in each layout that is served."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ml4core.api import KVCache
from ml4core_cuda.kernels.row_scales import power_of_two

LAYOUTS = ("planar_f32", "planar_ue8m0x4", "fp32")

PLANAR_F32 = tl.constexpr(0)
PLANAR_UE8M0 = tl.constexpr(1)
FP32 = tl.constexpr(2)


@dataclass(frozen=True)
class IndexKeys:
    """What a kernel needs to know of a cache of index keys.

    Attributes:
        pages: [blocks, block_size * (D + 4)] uint8, or [blocks, block_size, D] fp32.
        kind: ``PLANAR_F32``, ``PLANAR_UE8M0`` or ``FP32``.
        width: D.
    """

    pages: torch.Tensor
    kind: int
    width: int

    @property
    def page_stride(self) -> int:
        """In elements of ``pages``."""
        return int(self.pages.stride(0))


def index_keys(cache: KVCache) -> IndexKeys:
    """The keys of a cache. Raises ``ValueError`` for a layout that the kernels don't read, and for
    pages that are not dense inside.
    """
    cache.require(*LAYOUTS)
    pages = cache.parts[0]
    if not pages[:1].is_contiguous():
        raise ValueError(
            f"pages of index keys must be dense inside; these have strides {pages.stride()} for "
            f"{list(pages.shape)}"
        )
    kind = LAYOUTS.index(cache.layout.id)
    return IndexKeys(pages, kind, cache.layout.width)


@triton.jit
def key_scales(
    pages,
    page_offsets,
    inside,
    valid,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Scales fp32 [keys] of the tokens ``inside`` their pages at ``page_offsets``; 1 if not
    ``valid``.
    """
    place = pages + page_offsets + BLOCK_SIZE * D + 4 * inside
    if KIND == PLANAR_UE8M0:
        exponent = tl.load(place, mask=valid, other=127).to(tl.int32)
        scale = power_of_two(exponent - 127)
    else:
        scale = tl.load(place.to(tl.pointer_type(tl.float32)), mask=valid, other=1.0)
    return scale
