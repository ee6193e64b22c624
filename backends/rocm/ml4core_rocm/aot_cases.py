"""Shapes at which the kernels of caches, attention and selection are compiled ahead: ranks of TP 4
and TP 8 of the full model, one row and many.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_triton.aot import Case
from ml4core_triton.aot_cases import bf16, cache, case, f32, ints
from ml4core_triton.ops import load

BLOCK = 64
TOPK = 2048
_PAGES = 65536
"""Of 64 rows of 576 bytes: 2.4 GB, beyond what 32-bit offsets reach."""
_SCALE = 576**-0.5

F8 = MappingProxyType({"gfx950": r"f8f6f4", "gfx942": r"_fp8_fp8"})
"""The matrix instruction of FP8 by architecture."""
_BF16 = MappingProxyType({"gfx950": r"_bf16", "gfx942": r"_bf16"})
_INDEX = MappingProxyType({"gfx950": r"f8f6f4", "gfx942": r"_f16"})
"""gfx942's matrix units don't take e4m3fn, which index keys are stored in."""


def kernel(name: str, function: str = "") -> Any:
    """An op, or a function of a file of our own kernels. Imports triton."""
    if not function:
        return load(name, "ml4core_rocm")
    return getattr(import_module(f"ml4core_rocm.kernels.{name}"), function)


def cases() -> Iterator[Case]:
    """Imports triton."""
    sparse = kernel("sparse_mla")
    for layout, archs in (
        ("e4m3", ("gfx950",)),
        ("e4m3fnuz", ("gfx942",)),
        ("bf16", ()),
    ):
        rows_of = latents(layout)
        for heads in (8, 16, 64):
            for rows in (1, 4096):
                name = f"sparse_mla {layout} {heads} heads {rows} rows"
                given = attended(rows_of, rows, heads)
                yield case(name, sparse, *given, wants=_BF16, archs=archs)
                if layout != "bf16":
                    yield case(
                        f"{name} fp8",
                        sparse,
                        *given,
                        wants=F8,
                        archs=archs,
                        precision="fp8",
                    )
        for heads, rows, window in ((16, 1, None), (16, 7, 512), (16, 2048, None)):
            given = (bf16(rows, heads, 576), rows_of, *paged(1, rows), _SCALE, window)
            name = f"window_mla {layout} {heads} heads {rows} rows"
            yield case(name, kernel("window_mla"), *given, wants=_BF16, archs=archs)
        slots = ints(8, dtype=torch.int64)
        given = (rows_of, slots, bf16(8, 512), bf16(8, 64))
        yield case(f"kv_write {layout}", kernel("kv_write"), *given, archs=archs)
        name = f"gather_kv {layout}"
        yield case(name, kernel("gather_kv"), rows_of, ints(8), archs=archs, hot=False)
    wide = attended(latents("fp32"), 4, 8)
    yield case("sparse_mla fp32 8 heads", sparse, f32(4, 8, 576), *wide[1:], hot=False)
    ragged = (bf16(64, 16, 512), latents("bf16"), ints(65), ints(64 * TOPK), _SCALE, TOPK)
    yield case("ragged_mla bf16 16 heads", kernel("ragged_mla"), *ragged, wants=_BF16)
    yield from _selection()


def _selection() -> Iterator[Case]:
    keys = keys_of("tiled16_f32")
    for heads in (32, 64):
        for rows in (1, 4, 4096):
            requests = 8 if rows < 4096 else 1
            yield case(
                f"indexer_logits {heads} heads {rows} rows a request",
                kernel("indexer_logits"),
                *scored(requests * rows, heads),
                keys,
                *paged(requests, rows),
                wants=_INDEX,
            )
    gather = (keys, ints(1, 1024), ints(2), 65536, 65536)
    yield case("gather_index_keys", kernel("gather_index_keys"), *gather)
    yield case("gather_kv tiled16_f32", kernel("gather_kv"), keys, ints(8), hot=False)
    # What goes before AITER's scores and its top-k.
    yield case("index_queries 64 heads", kernel("index_queries", "index_queries"), *scored(8, 64))
    runs = (f32(8, 65536), ints(8), ints(8), 65536)
    yield case("without_nan of 65536", kernel("aiter_topk", "without_nan"), *runs)
    slots = ints(8, dtype=torch.int64)
    yield case("indexer_write", kernel("indexer_write"), keys, slots, f32(8, 128))
    norm = (f32(128), f32(128), 1e-6, slots)
    write = kernel("index_key_write")
    yield case("index_key_write rope", write, keys, slots, f32(8, 128), *norm, f32(32), True)
    yield case("index_key_write", write, keys, slots, f32(8, 128), *norm, None, True)
    for columns in (16384, 65536, 1 << 20):
        yield case(f"topk of {columns}", kernel("topk"), f32(8, columns), ints(8), TOPK)
    chosen = (ints(8, TOPK), ints(8, 1024), slots, BLOCK)
    yield case("to_slots", kernel("to_slots"), *chosen)


def latents(layout: str) -> KVCache:
    return cache(latent_layout(layout), _PAGES, BLOCK)


def keys_of(layout: str) -> KVCache:
    return cache(index_layout(layout), _PAGES, BLOCK)


def attended(kept: KVCache, rows: int, heads: int) -> tuple[Any, ...]:
    """q, cache, slots, lens and scale."""
    return bf16(rows, heads, 576), kept, ints(rows, TOPK), ints(rows), _SCALE


def scored(rows: int, heads: int) -> tuple[Any, ...]:
    """Index queries, weights and scale."""
    return f32(rows, heads, 128), f32(rows, heads), 0.01


def paged(requests: int, rows: int) -> tuple[Any, ...]:
    """Block table, query_start, visible and max_rows of requests of 64k tokens."""
    return ints(requests, 1024), ints(requests + 1), ints(requests * rows), rows
