"""The hot kernels of a step of ML4, with what each has to move and to multiply.

All that read weights or caches. Those that move rows alone (norms, rotations, writes, sums over
choices) are left out, and so are sums over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ml4core_rocm import aot_cases
from ml4core_rocm.aot_cases import BLOCK, kernel
from ml4core_rocm.aot_floor import Shape, Work
from ml4core_rocm.aot_weights import HEADS, HIDDEN, LATENT, bytes_of, products
from ml4core_triton.aot_cases import bf16, case, f32, ints, weight
from ml4core_triton.select_stage import SCORE_BYTES

SHAPES = (Shape(1), Shape(64), Shape(1, 4), Shape(64, 4), Shape(1, 8192))
"""Decodes, windows that verify three drafts, and a chunk of a prompt."""
LAYERS, MOE_LAYERS, INDEX_OWNERS = 72, 71, 44
EXPERTS, EXPERT_WIDTH, TOPK = 128, 6144, 4
INDEX_HEADS, INDEX_WIDTH, INDEX_TOPK = 32, 128, 2048
ROW = LATENT + 64
CONTEXT = 65536
_MXFP4 = 0.53125
"""Bytes a value, scales included."""


def works(ranks: int, shape: Shape) -> Iterator[Work]:
    """A step of requests of 64k tokens on one of ``ranks`` tensor-parallel ranks."""
    yield from _attention(ranks, shape)
    yield from _experts(ranks, shape)
    yield from products(ranks, shape)


def _attention(ranks: int, shape: Shape) -> Iterator[Work]:
    heads = HEADS // ranks
    keys = aot_cases.keys_of("tiled16_f32")
    # Of a prompt's chunk as many rows at a time as the stage holds scores of.
    each = min(shape.each, SCORE_BYTES // (4 * CONTEXT))
    pieces = shape.each // each
    rows, requests = shape.requests * each, shape.requests
    scored = (
        f32(rows, INDEX_HEADS, INDEX_WIDTH), f32(rows, INDEX_HEADS), 0.01, keys,
        ints(requests, CONTEXT // BLOCK), ints(requests + 1), ints(rows), each,
    )  # fmt: skip
    yield Work(
        case(shape.name("index scores", ranks), kernel("indexer_logits", "scores"), *scored,
             fill=False),
        "indexer_logits_kernel",
        INDEX_OWNERS * pieces,
        CONTEXT * (requests * (INDEX_WIDTH + 4) + rows * 4.0),
        2.0 * rows * CONTEXT * INDEX_HEADS * INDEX_WIDTH,
        "fp8",
        lambda tile: tile["BK"] * (INDEX_WIDTH + 4),
    )  # fmt: skip
    chosen = (f32(rows, CONTEXT), ints(rows), INDEX_TOPK)
    yield Work(
        case(shape.name("top-k", ranks), kernel("topk"), *chosen), "topk_kernel",
        INDEX_OWNERS * pieces, 4.0 * rows * CONTEXT, 0.0, "bf16", lambda tile: 4 * tile["C"],
    )  # fmt: skip
    cache = aot_cases.latents("e4m3")
    # A key that several rows choose comes from memory once at least.
    read = min(shape.rows * INDEX_TOPK, shape.requests * CONTEXT) * ROW
    moved = shape.rows * heads * 2 * (ROW + LATENT)
    for precision in ("bf16", "fp8"):
        attended = aot_cases.attended(cache, shape.rows, heads)
        yield Work(
            case(shape.name(f"sparse MLA {precision}", ranks), kernel("sparse_mla"), *attended,
                 precision=precision),
            "sparse_mla_kernel",
            LAYERS if precision == "bf16" else 0,
            float(read + moved),
            2.0 * shape.rows * heads * INDEX_TOPK * (ROW + LATENT),
            precision,
            lambda tile: tile["BK"] * ROW,
        )  # fmt: skip


def touched(rows: int) -> float:
    """Experts that so many rows choose one of at least, where each chooses by lot."""
    return EXPERTS * (1 - (1 - TOPK / EXPERTS) ** rows)


def _experts(ranks: int, shape: Shape) -> Iterator[Work]:
    width, rows = EXPERT_WIDTH // ranks, shape.rows
    w13 = weight("mxfp4", EXPERTS, 2 * width, HIDDEN)
    w2 = weight("mxfp4", EXPERTS, HIDDEN, width)
    for act, name, value in (("mxfp8", "a8w4", 1.03125), ("mxfp4", "a4w4", _MXFP4)):
        chosen = (f32(rows, TOPK), ints(rows, TOPK, dtype=torch.int64))
        own = case(
            shape.name(f"experts {name}", ranks), kernel("moe_experts"),
            bf16(rows, HIDDEN), w13, w2, *chosen, act=act,
        )  # fmt: skip
        for launch, held, matrices, moved in (
            ("gated_kernel", w13, 2, HIDDEN * value + TOPK * width * 2),
            ("outer_kernel", w2, 1, TOPK * (width * value + HIDDEN * 4)),
        ):
            read = touched(rows) * bytes_of(held) / EXPERTS
            yield Work(
                own,
                launch,
                MOE_LAYERS if name == "a8w4" else 0,
                read + rows * moved,
                2.0 * rows * TOPK * matrices * width * HIDDEN,
                "mxfp4" if act == "mxfp4" else "fp8",
                partial(_asked, matrices),
                read,
            )


def _asked(matrices: int, tile: Mapping[str, Any]) -> float:
    return matrices * int(tile["BN"]) * int(tile["STEP"]) * _MXFP4
