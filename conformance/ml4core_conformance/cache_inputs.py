"""Caches, block tables and queries from which cases of caches and attention are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ml4core_conformance.case import Pages
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.kv_numbers import e4m3_values, finite_amax, least_e4m3
from ml4core_conformance.oracle.layouts import (
    INDEX_LAYOUTS,
    LATENT,
    LATENT_LAYOUTS,
    ByteLayout,
    byte_layout,
)
from ml4core_conformance.oracle.numbers import NVFP4_GROUP

Role = Literal["latent", "index"]
ACTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
BLOCK = 64
"""Tokens a page, where the case isn't about it."""
SCALE = 0.05
"""Scale of caches that have one: no power of two, so that a product isn't a quotient."""
SOFTMAX = (LATENT + 64) ** -0.5


@dataclass(frozen=True)
class Variant:
    """What cases of one layout and one dtype of activations share.

    Attributes:
        name: ``<layout>+<act>``.
        requires: capability words.
    """

    name: str
    layout: str
    dtype: torch.dtype
    requires: frozenset[str]


def variants(role: Role) -> tuple[Variant, ...]:
    """Every layout of that role with every dtype of activations."""
    known, prefix = (LATENT_LAYOUTS, "kv") if role == "latent" else (INDEX_LAYOUTS, "index")
    return tuple(
        Variant(f"{id}+{act}", id, dtype, frozenset({f"{prefix}:{id}", f"act:{act}"}))
        for id in known
        for act, dtype in ACTS.items()
    )


def block_size(id: str, wanted: int, role: Role = "latent") -> int:
    """The least block size from ``wanted`` that the layout can have."""
    multiple = byte_layout(role, id).multiple
    return -(-wanted // multiple) * multiple


def pages(
    draw: Draw,
    role: Role,
    id: str,
    blocks: int,
    size: int = BLOCK,
    *,
    spread: float = 1.0,
    mean: float = 0.0,
    page_stride: int = 1,
) -> Pages:
    """A cache full of normal rows of that mean and deviation, as its layout stores them."""
    layout = byte_layout(role, id)
    rows = mean + spread * draw.normal(blocks * size, layout.width)
    scale = torch.tensor([SCALE]) if layout.scaled else None
    data = torch.zeros(blocks, size * layout.token_bytes, dtype=torch.uint8)
    tokens = layout.encode(rows, SCALE if layout.scaled else 1.0)
    layout.put(data, size, torch.arange(blocks * size), tokens)
    return Pages(id, size, (layout.array(data, size),), scale, page_stride, role)


def raw_pages(draw: Draw, role: Role, id: str, blocks: int, size: int) -> Pages:
    """A cache of random bytes, for what only writes."""
    layout = byte_layout(role, id)
    data = draw.bytes(blocks, size * layout.token_bytes)
    scale = torch.tensor([SCALE]) if layout.scaled else None
    return Pages(id, size, (layout.array(data, size),), scale, 1, role)


def tie_free(rows: Tensor, id: str) -> Tensor:
    """Rows [...] for a cache whose scales are no powers of two. Zero replaces what, over its scale,
    lies near the middle of two stored values: there the quotient's own rounding might decide.
    """
    if id == "nvfp4_ds_mla":
        return _tie_free_fours(rows)
    if id not in ("e4m3", "e4m3fnuz"):
        return rows
    flavour = "e4m3fnuz" if id == "e4m3fnuz" else "e4m3fn"
    values = torch.tensor(e4m3_values(flavour)[:0x7E])
    middles = (values[1:] + values[:-1]) / 2
    size = rows.double().abs() / SCALE
    after = torch.searchsorted(middles, size)
    near = torch.zeros_like(rows, dtype=torch.bool)
    for index in (after - 1, after):
        middle = middles[index.clamp(0, len(middles) - 1)]
        near |= (size / middle - 1).abs() < 2e-3
    return torch.where(near, torch.zeros_like(rows), rows)


def _tie_free_fours(rows: Tensor) -> Tensor:
    """Rows [..., 576] of which no latent value lies near the middle of two E2M1 values, but where
    the quotient is exact.
    """
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    rows = rows.clone()
    groups = rows[..., :LATENT].unflatten(-1, (-1, NVFP4_GROUP))
    while True:
        amax = finite_amax(groups.float().numpy()) / 6
        scale = e4m3_values("e4m3fn")[least_e4m3(np.maximum(amax, 2.0**-9))]
        size = groups.double().abs() / torch.from_numpy(scale).unsqueeze(-1)
        near = ((size.unsqueeze(-1) / middles - 1).abs() < 2e-3).any(-1)
        near &= torch.from_numpy(np.frexp(scale)[0] != 0.5).unsqueeze(-1)  # no power of two
        if not near.any():
            return rows
        groups[near] = 0  # which may be the largest: then the scale is another


def nan_byte(layout: ByteLayout) -> int:
    """A byte that makes NaN of every number of the layout."""
    return 0x80 if layout.id == "e4m3fnuz" else 0xFF


def poisoned(cache: Pages, kept: Iterable[int]) -> Pages:
    """The cache with NaN in each row but those of the slots ``kept``."""
    layout = byte_layout(cache.role, cache.layout)
    data = layout.pages(cache.parts[0])
    slots = torch.tensor(sorted(set(kept)), dtype=torch.int64)
    tokens = layout.get(data, cache.block_size, slots)
    data.fill_(nan_byte(layout))
    layout.put(data, cache.block_size, slots, tokens)
    return replace(cache, parts=(layout.array(data, cache.block_size),))


def block_table(draw: Draw, pages_each: Sequence[int], columns: int, blocks: int) -> Tensor:
    """int32 [R, columns]: distinct pages in any order, from 1; page 0 behind."""
    order = draw.permutation(blocks - 1) + 1
    table = torch.zeros(len(pages_each), columns, dtype=torch.int32)
    used = 0
    for r, count in enumerate(pages_each):
        table[r, :count] = order[used : used + count].to(torch.int32)
        used += count
    return table


def visible_slots(table: Tensor, size: int, visible: Sequence[int]) -> list[int]:
    """The slots of the first ``visible[r]`` positions of each request."""
    return [
        int(table[r, position // size]) * size + position % size
        for r, seen in enumerate(visible)
        for position in range(seen)
    ]


def query_start(rows: Sequence[int]) -> Tensor:
    """int32 [R + 1] of rows a request."""
    return torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
