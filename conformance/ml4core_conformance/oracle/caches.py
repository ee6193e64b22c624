"""Writing and reading cache rows, and positions to slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core_conformance.case import Arguments, Pages
from ml4core_conformance.oracle.expected import Exact, Expected
from ml4core_conformance.oracle.layouts import ByteLayout, byte_layout


def layout_of(cache: Pages) -> ByteLayout:
    return byte_layout(cache.role, cache.layout)


def scale_of(cache: Pages) -> float:
    return 1.0 if cache.scale is None else float(cache.scale)


def all_rows(cache: Pages) -> Tensor:
    """fp64 [blocks * block_size, width]: every row of a cache, by slot."""
    layout = layout_of(cache)
    pages = layout.pages(cache.parts[0])
    slots = torch.arange(pages.shape[0] * cache.block_size)
    return layout.decode(layout.get(pages, cache.block_size, slots), scale_of(cache))


def after_write(cache: Pages, slots: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """The parts of a cache once rows [T, width] are written to slots [T]."""
    layout = layout_of(cache)
    pages = layout.pages(cache.parts[0])
    layout.put(pages, cache.block_size, slots, layout.encode(rows, scale_of(cache)))
    return (layout.array(pages, cache.block_size),)


def kv_write(options: Mapping[str, Any], args: Arguments) -> Expected:
    cache, latent, rope = args["cache"], args["latent"], args.get("rope")
    if rope is None:
        rope = latent.new_zeros(latent.shape[0], layout_of(cache).width - latent.shape[1])
    rows = torch.cat((latent.float(), rope.float()), -1)
    return Expected(caches={"cache": after_write(cache, args["slots"], rows)})


def indexer_write(options: Mapping[str, Any], args: Arguments) -> Expected:
    written = after_write(args["cache"], args["slots"], args["key"].float())
    return Expected(caches={"cache": written})


def gather_kv(options: Mapping[str, Any], args: Arguments) -> Expected:
    slots = args["slots"].long()
    rows = all_rows(args["cache"])[slots.clamp(min=0)]
    rows = torch.where((slots < 0).unsqueeze(-1), 0.0, rows)
    # A code times a scale of 24 bits is rounded once.
    axes = (*(f"slot{i}" for i in range(slots.dim())), "width")
    return Expected({"rows": Exact(rows.float(), axes)})


def to_slots(options: Mapping[str, Any], args: Arguments) -> Expected:
    positions, table = args["positions"], args["block_table"]
    size, requests = args["block_size"], args["row_request"].tolist()
    slots = torch.full_like(positions, -1)
    for t, row in enumerate(positions.tolist()):
        for j, position in enumerate(row):
            if position >= 0:
                page = int(table[requests[t], position // size])
                slots[t, j] = page * size + position % size
    return Expected({"slots": Exact(slots, ("T", "k"))})


ORACLE: Mapping[str, Callable[[Mapping[str, Any], Arguments], Expected]] = MappingProxyType(
    {
        "kv_write": kv_write,
        "indexer_write": indexer_write,
        "gather_kv": gather_kv,
        "to_slots": to_slots,
    }
)
