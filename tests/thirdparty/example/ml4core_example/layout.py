"""A private cache layout: bfloat16 pages that are stored value by value, not token by token."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ml4core.api import KVField, KVLayout, KVPart

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = "x-ml4core-example/columns"
"""A private id is ``x-<distribution>/<name>``; its capability word is ``kv:`` before that."""


@cache
def columns(latent: int = 512, rope: int = 64) -> KVLayout:
    """Pages [width, block_size] of bfloat16: one value of all tokens side by side."""
    width = latent + rope
    part = KVPart("columns", "bfloat16", width, "planar")

    def pack(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        import torch

        pages = rows.to(torch.bfloat16).transpose(1, 2)  # [blocks, width, block_size]
        return (pages.reshape(rows.shape[0], -1),)

    def unpack(arrays: tuple[Tensor, ...], scale: Tensor | None) -> Tensor:
        return as_columns(arrays[0], width).transpose(1, 2).float()

    fields = (
        KVField("latent", 0, "bfloat16", 0, latent),
        KVField("rope", 0, "bfloat16", 2 * latent, rope),
    )
    return KVLayout(COLUMNS, "latent", width, (part,), fields, pack, unpack, block_multiple=8)


def as_columns(array: Tensor, width: int) -> Tensor:
    """[blocks, width, block_size] of an array [blocks, block_size * width]; the same memory."""
    return array.unflatten(1, (width, -1))
