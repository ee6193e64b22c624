"""Works of the caches, of attention, of index scores and of top-k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as kept
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_cuda.kernels import indexer_logits as logits
from ml4core_cuda.kernels import sparse_mla as sparse
from ml4core_cuda.kernels.topk import choose
from ml4core_cuda.kernels.window_mla import window_mla
from ml4core_cuda.measure import peers, sizes
from ml4core_cuda.measure.judges import (
    attention_error,
    empty,
    logits_error,
    topk_error,
    window_error,
    write_error,
)
from ml4core_cuda.measure.work import Draw, Inputs, Work
from ml4core_triton.kernels import topk as top
from ml4core_triton.kernels import window_mla as window
from ml4core_triton.kernels.indexer_write import indexer_write
from ml4core_triton.kernels.kv_write import kv_write

BLOCK = 64
"""Tokens a page."""
SCALE = 576**-0.5
_TARGETS = {
    (64, 1): ("2x FlashMLA", 17.4 / 2),
    (64, 8): ("1.6x FlashMLA", 19.9 / 1.6),
    (64, 64): ("1.0x FlashMLA", 75.0),
    (64, 128): ("0.9x FlashMLA", 113 / 0.9),
}
_FEW_HEADS = "2x FlashMLA padded to 64 heads"


def works(*, small: bool) -> Iterator[Work]:
    """``small`` ones for the interpreter."""
    yield from _sparse(small)
    yield from _logits(small)
    yield from _topk(small)
    yield from _window(small)
    yield from _writes()


@kept
def _whole(layout: str, blocks: int, device: torch.device) -> KVCache:
    """One for all works: it is larger than what the device caches, and slots differ from set to
    set.
    """
    return Draw(0, device).cache(latent_layout(layout), blocks, BLOCK)


def _sparse(small: bool) -> Iterator[Work]:
    keys, blocks = (100, 4) if small else (2048, 4096)
    shapes = [(8, 2), (64, 2)] if small else []
    if not small:
        shapes = [(64, r) for r in (1, 8, 64, 128)] + [(h, r) for h in (8, 16) for r in (1, 8, 64)]
        shapes += [(32, 8), (128, 8), (64, 4096)]

    def make(seed: int, device: torch.device, *, layout: str, heads: int, rows: int) -> Inputs:
        draw = Draw(seed, device)
        slots = draw.choices(blocks * BLOCK, rows, keys, torch.int32)
        q = draw.bf16(rows, heads, 576)
        lens = draw.full(keys, rows)
        return q, _whole(layout, blocks, device), slots, lens, SCALE

    for layout in ("fp8_ds_mla", "bf16"):
        for heads, rows in shapes:
            if layout == "bf16" and not small and (heads not in (8, 64) or rows not in (8, 4096)):
                continue
            told, us = "", 0.0
            if layout == "fp8_ds_mla":
                told, us = _TARGETS.get((heads, rows), ("", 0.0))
                if heads in (8, 16):
                    told = _FEW_HEADS
                if rows == 4096:
                    told = "0.7x FlashMLA, 490 TFLOP/s"
                    us = 1e6 * _flops(rows, heads, keys) / (0.7 * 490e12)
            against: dict[str, Callable[..., Any]] = {}
            if layout == "fp8_ds_mla":
                against["FlashMLA"] = peers.flash_mla_decode
                if rows >= 1024:
                    against["FlashMLA prefill, bf16 rows"] = peers.flash_mla_prefill
            shape = sparse.shape_key(layout, rows, heads, keys)
            yield Work(
                f"sparse_mla {layout} {heads} heads {rows} rows",
                "sparse_mla",
                partial(make, layout=layout, heads=heads, rows=rows),
                sparse.sparse_mla,
                attention_error,
                rows * (keys * latent_layout(layout).bytes_per_token + heads * (576 + 512) * 2),
                _flops(rows, heads, keys),
                told,
                us,
                against,
                [("sparse_mla", shape, () if small else sizes.sparse_mla(rows, heads, keys))],
            )


def _flops(rows: int, heads: int, keys: int) -> int:
    return 2 * rows * heads * keys * (576 + 512)


def _window(small: bool) -> Iterator[Work]:
    for layout, requests, each, heads, seen, wide in (
        ("fp8_ds_mla", 8, 7, 8, 187, 100),
        ("bf16", 1, 3, 8, 187, 100),
    ) if small else (
        ("bf16", 1, 3, 8, 2100, 2048),
        ("bf16", 64, 3, 64, 2100, 2048),
        ("fp8_ds_mla", 1, 1, 64, 8000, None),
    ):  # fmt: skip
        pages = -(-seen // BLOCK)

        def make(
            seed: int, device: torch.device, *, layout: str, requests: int, each: int, heads: int,
            seen: int, pages: int, wide: int | None,
        ) -> Inputs:  # fmt: skip
            draw = Draw(seed, device)
            cache = draw.cache(latent_layout(layout), requests * pages + 1, BLOCK)
            table = 1 + draw.choices(requests * pages, 1, requests * pages, torch.int32)
            start = draw.count(requests + 1) * each
            visible = draw.full(seen, requests * each)
            q = draw.bf16(requests * each, heads, 576)
            return q, cache, table.view(requests, pages), start, visible, each, SCALE, wide

        span = min(pages * BLOCK, wide + each) if wide else pages * BLOCK
        yield Work(
            f"window_mla {layout} {requests}x{each} rows {heads} heads window {wide}",
            "window_mla",
            partial(
                make, layout=layout, requests=requests, each=each, heads=heads, seen=seen,
                pages=pages, wide=wide,
            ),
            window_mla,
            window_error,
            requests * min(seen, wide or seen) * latent_layout(layout).bytes_per_token,
            tuned=[
                (
                    "window_mla",
                    window.shape_key(layout, each * heads, span),
                    () if small else sizes.WINDOW_MLA,
                )
            ],
        )  # fmt: skip


def _logits(small: bool) -> Iterator[Work]:
    context = 200 if small else 65536
    floors = {1: 2.0, 8: 16.3, 64: 130.0}
    pages = -(-context // BLOCK)

    def make(seed: int, device: torch.device, *, heads: int, rows: int) -> Inputs:
        draw = Draw(seed, device)
        cache = draw.cache(index_layout("planar_f32"), rows * pages + 1, BLOCK)
        table = 1 + draw.choices(rows * pages, 1, rows * pages, torch.int32)
        q, weights = draw.normal(rows, heads, 128), draw.normal(rows, heads)
        visible = draw.full(context, rows)
        table = table.view(rows, pages)
        return q, weights, 0.01, cache, table, draw.count(rows + 1), visible, 1

    for heads in (32, 64):
        for rows in (2,) if small else (1, 8, 64):
            floor = floors.get(rows, 0.0)
            shape = logits.shape_key(rows, heads, pages * BLOCK, 1)
            yield Work(
                f"indexer_logits {heads} heads {rows} rows of {context}",
                "indexer_logits",
                partial(make, heads=heads, rows=rows),
                partial(logits.scores, fill=False),
                logits_error,
                rows * context * (132 + 4),
                2 * rows * heads * context * 128,
                "75% of the floor, 0.9x DeepGEMM" if rows > 1 else "0.9x DeepGEMM",
                floor / 0.75 if rows > 1 else 0.0,
                {"DeepGEMM": peers.deep_gemm_logits},
                [("indexer_logits", shape, () if small else sizes.INDEXER_LOGITS)],
            )


def _topk(small: bool) -> Iterator[Work]:
    targets = {(65536, 1): ("3x flashinfer", 12.0), (65536, 64): ("1.5x flashinfer", 24.0)}
    k = 100 if small else 2048

    def make(seed: int, device: torch.device, *, columns: int, rows: int) -> Inputs:
        draw = Draw(seed, device)
        scores = (draw.normal(rows, columns) * 512).round() / 512  # ties at the border
        visible = draw.full(columns, rows)
        pages = -(-columns // BLOCK)
        table = draw.count(rows * pages).view(rows, pages)
        return scores, visible, k, table, draw.count(rows, torch.int64), BLOCK

    for columns in (3000,) if small else (65536, 4096, 1 << 20):
        for rows in (2,) if small else (1, 64):
            told, us = targets.get((columns, rows), ("", 0.0))
            shape = top.shape_key(rows, columns, k)
            yield Work(
                f"topk of {columns} {rows} rows",
                "topk",
                partial(make, columns=columns, rows=rows),
                choose,
                topk_error,
                rows * (columns * 4 + k * 8),
                0,
                told,
                us,
                {"torch": peers.torch_topk, "FlashInfer": peers.flashinfer_topk},
                [("topk", shape, () if small else sizes.topk(rows, columns))],
            )


def _writes() -> Iterator[Work]:
    def rows(seed: int, device: torch.device, width: int) -> Tensor:
        x = Draw(seed, device).normal(64, width)
        if device.type == "meta":
            return x
        return x * torch.logspace(-12, 4, 64, device=device).unsqueeze(1)

    def latents(seed: int, device: torch.device, *, layout: str) -> Inputs:
        x, slots = rows(seed, device, 576).bfloat16(), torch.arange(64, device=device) * 3
        return empty(latent_layout(layout), 4, device), slots, x[:, :512], x[:, 512:]

    def keys(seed: int, device: torch.device) -> Inputs:
        slots = torch.arange(64, device=device) * 3
        return empty(index_layout("planar_f32"), 4, device), slots, rows(seed, device, 128)

    for layout in ("fp8_ds_mla", "bf16", "e4m3"):
        make = partial(latents, layout=layout)
        yield Work(f"kv_write {layout}", "writes", make, _written(kv_write), write_error)
    yield Work("indexer_write planar_f32", "writes", keys, _written(indexer_write), write_error)


def _written(op: Callable[..., None]) -> Callable[..., Tensor]:
    def call(cache: KVCache, *rest: Tensor) -> Tensor:
        op(cache, *rest)
        return cache.parts[0]

    return call
