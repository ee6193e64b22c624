"""Shapes at which the kernels of caches, attention and selection are compiled ahead: a TP 1 and a
TP 8 rank of the full model, one row and many.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_cuda.aot import Case
from ml4core_cuda.ops import load_ops

_BLOCK = 64
_PAGES = 4096
_TOPK = 2048
_SCALE = 576**-0.5


def cases() -> Iterator[Case]:
    """Imports triton."""
    ops = load_ops()

    def case(name: str, op: str, *arguments: Any, hot: bool = True) -> Case:
        return Case(name, partial(ops[op], *arguments), hot)

    for layout in ("fp8_ds_mla", "bf16"):
        cache = _latents(layout)
        for heads in (8, 16, 32, 64, 128):
            for rows in (1, 64, 4096):
                yield case(
                    f"sparse_mla {layout} {heads} heads {rows} rows",
                    "sparse_mla",
                    *_sparse(cache, rows, heads),
                )
        yield case(
            f"window_mla {layout} 8 heads, blocks of 7",
            "window_mla",
            *_paged(_bf16(8 * 7, 8, 576), cache, 8, 7),
            _SCALE,
            512,
        )
        yield case(
            f"window_mla {layout} 8 heads, one row",
            "window_mla",
            *_paged(_bf16(1, 8, 576), cache, 1, 1),
            _SCALE,
        )
        yield case(
            f"window_mla {layout} 64 heads, one row",
            "window_mla",
            *_paged(_bf16(1, 64, 576), cache, 1, 1),
            _SCALE,
        )
        slots = _ints(8, dtype=torch.int64)
        yield case(f"kv_write {layout}", "kv_write", cache, slots, _bf16(8, 512), _bf16(8, 64))
        yield case(f"gather_kv {layout}", "gather_kv", cache, _ints(8), hot=False)
    fp32 = _sparse(_latents("fp32"), 4, 8)
    yield case("sparse_mla fp32 8 heads", "sparse_mla", fp32[0].float(), *fp32[1:], hot=False)
    keys = _keys("planar_f32")
    for heads in (32, 64):
        for rows in (1, 2, 6, 4096):
            requests = 8 if rows < 4096 else 1
            q = torch.empty(requests * rows, heads, 128, device="meta")
            weights = torch.empty(requests * rows, heads, device="meta")
            rest = _paged(q, keys, requests, rows)[2:]
            yield case(
                f"indexer_logits {heads} heads {rows} rows a request",
                "indexer_logits",
                *(q, weights, 0.01, keys, *rest),
            )
    yield case(
        "indexer_write",
        "indexer_write",
        *(keys, _ints(8, dtype=torch.int64), torch.empty(8, 128, device="meta")),
    )
    for columns in (16384, 65536, 1 << 20):
        scores = torch.empty(8, columns, device="meta")
        yield case(f"topk of {columns}", "topk", scores, _ints(8), _TOPK)
    yield case(
        "to_slots",
        "to_slots",
        *(_ints(8, _TOPK), _ints(8, 1024), _ints(8, dtype=torch.int64), _BLOCK),
    )


def _latents(layout: str) -> KVCache:
    return _cache(latent_layout(layout))


def _keys(layout: str) -> KVCache:
    return _cache(index_layout(layout))


def _cache(layout: Any) -> KVCache:
    parts = tuple(
        torch.empty(part.shape(_PAGES, _BLOCK), dtype=getattr(torch, part.dtype), device="meta")
        for part in layout.parts
    )
    return KVCache(layout, _BLOCK, parts)


def _sparse(cache: KVCache, rows: int, heads: int) -> tuple[Any, ...]:
    return _bf16(rows, heads, 576), cache, _ints(rows, _TOPK), _ints(rows), _SCALE


def _paged(q: Tensor, cache: KVCache, requests: int, rows: int) -> tuple[Any, ...]:
    """q, cache, block table, query_start, visible and max_rows of requests of 64k tokens."""
    return q, cache, _ints(requests, 1024), _ints(requests + 1), _ints(requests * rows), rows


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
