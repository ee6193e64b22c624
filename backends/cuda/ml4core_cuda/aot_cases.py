"""Shapes at which the kernels of caches, attention and selection are compiled ahead: a TP 1 and a
TP 8 rank of the full model, one row and many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_cuda.ops import load_ops
from ml4core_triton.aot import Case
from ml4core_triton.aot_cases import bf16, cache, case, f32, ints

_BLOCK = 64
_PAGES = 4096
_TOPK = 2048
_SCALE = 576**-0.5


def cases() -> Iterator[Case]:
    """Imports triton."""
    ops = load_ops()

    def one(name: str, op: str, *arguments: Any, hot: bool = True) -> Case:
        return case(name, ops[op], *arguments, hot=hot)

    for layout in ("fp8_ds_mla", "bf16"):
        latents = _latents(layout)
        for heads in (8, 16, 32, 64, 128):
            for rows in (1, 64, 4096):
                yield one(
                    f"sparse_mla {layout} {heads} heads {rows} rows",
                    "sparse_mla",
                    *_sparse(latents, rows, heads),
                )
        yield one(
            f"window_mla {layout} 8 heads, blocks of 7",
            "window_mla",
            *_paged(bf16(8 * 7, 8, 576), latents, 8, 7),
            _SCALE,
            512,
        )
        yield one(
            f"window_mla {layout} 8 heads, one row",
            "window_mla",
            *_paged(bf16(1, 8, 576), latents, 1, 1),
            _SCALE,
        )
        yield one(
            f"window_mla {layout} 64 heads, one row",
            "window_mla",
            *_paged(bf16(1, 64, 576), latents, 1, 1),
            _SCALE,
        )
        slots = ints(8, dtype=torch.int64)
        yield one(f"kv_write {layout}", "kv_write", latents, slots, bf16(8, 512), bf16(8, 64))
        yield one(f"gather_kv {layout}", "gather_kv", latents, ints(8), hot=False)
    fp32 = _sparse(_latents("fp32"), 4, 8)
    yield one("sparse_mla fp32 8 heads", "sparse_mla", fp32[0].float(), *fp32[1:], hot=False)
    keys = _keys("planar_f32")
    for heads in (32, 64):
        for rows in (1, 2, 6, 4096):
            requests = 8 if rows < 4096 else 1
            q = f32(requests * rows, heads, 128)
            weights = f32(requests * rows, heads)
            rest = _paged(q, keys, requests, rows)[2:]
            yield one(
                f"indexer_logits {heads} heads {rows} rows a request",
                "indexer_logits",
                *(q, weights, 0.01, keys, *rest),
            )
    yield one(
        "indexer_write",
        "indexer_write",
        *(keys, ints(8, dtype=torch.int64), f32(8, 128)),
    )
    for columns in (16384, 65536, 1 << 20):
        scores = f32(8, columns)
        yield one(f"topk of {columns}", "topk", scores, ints(8), _TOPK)
    yield one(
        "to_slots",
        "to_slots",
        *(ints(8, _TOPK), ints(8, 1024), ints(8, dtype=torch.int64), _BLOCK),
    )


def _latents(layout: str) -> KVCache:
    return cache(latent_layout(layout), _PAGES, _BLOCK)


def _keys(layout: str) -> KVCache:
    return cache(index_layout(layout), _PAGES, _BLOCK)


def _sparse(latents: KVCache, rows: int, heads: int) -> tuple[Any, ...]:
    return bf16(rows, heads, 576), latents, ints(rows, _TOPK), ints(rows), _SCALE


def _paged(q: Tensor, pages: KVCache, requests: int, rows: int) -> tuple[Any, ...]:
    """q, cache, block table, query_start, visible and max_rows of requests of 64k tokens."""
    return q, pages, ints(requests, 1024), ints(requests + 1), ints(requests * rows), rows
