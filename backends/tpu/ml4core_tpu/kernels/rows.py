"""What kernels know of a latent cache, and how blocks of its pages become keys.

Forms of a page of tokens:

    tiles   latent uint8 [page, L / 128, 128], rope uint8 [page / 4, 4, 128]: 64 values, 64 zeros
    e4m3    uint8 [page, L + R]
    wide    bfloat16 or fp32 [page, L + R]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ml4core_tpu.kernels.numbers import e4m3_values

LANES = 128
TOGETHER = 4
"""Tokens whose rope parts share a tile."""

Kind: TypeAlias = Literal["tiles", "e4m3", "wide"]


@dataclass(frozen=True)
class Rows:
    """A latent cache's form: its kind, and the values of a row's latent and rope parts."""

    kind: Kind
    latent: int
    rope: int

    @property
    def scaled(self) -> bool:
        """Whether values are codes that the cache's one scale multiplies."""
        return self.kind != "wide"

    def page(self, parts: tuple[jax.Array, ...]) -> int:
        """Tokens a page."""
        return int(parts[0].shape[1])


def page_specs(rows: Rows, parts: tuple[jax.Array, ...], has_rope: bool, at) -> list[pl.BlockSpec]:
    """Blocks of one page of each part that is read; ``at`` is an index map to the page."""
    used = parts if has_rope or rows.kind != "tiles" else parts[:1]
    return [
        pl.BlockSpec(
            (1, *part.shape[1:]),
            lambda *grid, rank=part.ndim: (at(*grid), *(0,) * (rank - 1)),
        )
        for part in used
    ]


def page_keys(
    rows: Rows, blocks: list[jax.Array], has_rope: bool, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array | None]:
    """Latents [page, L] and rope parts ([page, 128] of tiles, else [page, R]; None without) of the
    blocks of one page, without the cache's scale. Not all may be finite.
    """
    if rows.kind == "tiles":
        page, tiles, _ = blocks[0].shape
        latent = e4m3_values(blocks[0]).reshape(page, tiles * LANES)
        rope = e4m3_values(blocks[1]).reshape(page, LANES) if has_rope else None
    else:
        stored = blocks[0]
        values = e4m3_values(stored) if rows.kind == "e4m3" else stored.astype(jnp.float32)
        latent = values[:, : rows.latent]
        rope = values[:, rows.latent :] if has_rope else None
    return latent.astype(dtype), None if rope is None else rope.astype(dtype)


def taken_rows(rows: Rows, parts: tuple[jax.Array, ...], slots: jax.Array) -> jax.Array:
    """Rows fp32 [..., L + R] of slots [...] within the cache, without its scale."""
    page = rows.page(parts)
    where, offset = slots // page, slots % page
    if rows.kind == "tiles":
        found = parts[0][where, offset].reshape(*slots.shape, rows.latent)
        if rows.rope and len(parts) > 1:
            tail = parts[1][where, offset // TOGETHER, offset % TOGETHER, : rows.rope]
            found = jnp.concatenate((found, tail), -1)
        return e4m3_values(found)
    stored = parts[0][where, offset]
    return e4m3_values(stored) if rows.kind == "e4m3" else stored.astype(jnp.float32)
