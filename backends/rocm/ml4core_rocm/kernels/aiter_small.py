"""AITER's small functions whose contracts are those of ours: the gate of a dense layer, and the
write of a latent row where it is stored as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.aiter_functions import load

WIDE = 8
"""Values of bf16 that its cache write reads at once, so what rows begin at multiples of."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of bf16 rows [T, 2I] times the second: [T, I]."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    if out.numel():
        load("silu_and_mul")(out, gate_up.contiguous())
    return out


def takes_latents(cache: KVCache, latent: Tensor, rope: Tensor | None) -> bool:
    """Whether the rows are copied as they are: bf16 into pages of bf16, both parts there. To FP8
    its cast doesn't saturate as the contract wants, and without rope it leaves the tail as it was.
    """
    if rope is None or cache.layout.id != "bf16" or cache.parts[0].stride(-1) != 1:
        return False
    whole = latent.shape[-1] + rope.shape[-1] == cache.parts[0].shape[-1]
    return whole and {latent.dtype, rope.dtype} == {torch.bfloat16}


def kv_write(cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor, scale: Tensor) -> None:
    """Rows [T, L] and [T, R] at ``slots`` int64 [T] of a cache that ``takes_latents``; slot -1
    writes nothing. ``scale`` fp32 [1] is read, and does nothing to bf16.
    """
    if len(slots):
        parts = (_aligned(latent), _aligned(rope))
        load("concat_and_cache_mla")(*parts, cache.parts[0], slots, "auto", scale)


def _aligned(rows: Tensor) -> Tensor:
    """The same, dense where rows don't lie as it reads them."""
    fits = rows.stride(1) == 1 and rows.stride(0) % WIDE == 0 and rows.storage_offset() % WIDE == 0
    return rows if fits else rows.contiguous()
