"""The hot kernels of a decode step of ML4, with what each has to move and to multiply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ml4core_rocm import aot_cases
from ml4core_rocm.aot_cases import BLOCK, kernel
from ml4core_rocm.aot_floor import Work
from ml4core_triton.aot_cases import bf16, case, f32, ints, weight

LAYERS, MOE_LAYERS, INDEX_OWNERS = 72, 71, 44
HEADS, HIDDEN, EXPERTS, EXPERT_WIDTH, TOPK = 64, 6144, 128, 6144, 4
INDEX_HEADS, INDEX_WIDTH, INDEX_TOPK = 32, 128, 2048
LATENT, ROW = 512, 576
CONTEXT = 65536
_MXFP4 = 0.53125
"""Bytes a value, scales included."""


def works(ranks: int, rows: int) -> Iterator[Work]:
    """A step of ``rows`` requests of 64k tokens on one of ``ranks`` tensor-parallel ranks."""
    yield from _attention(ranks, rows)
    yield from _experts(ranks, rows)
    width = HEADS // ranks * 128
    given = (bf16(rows, width), weight("fp8_block", HIDDEN, width))
    yield Work(
        case(_name("output projection", ranks, rows), kernel("gemm"), *given),
        "tile_kernel", LAYERS, HIDDEN * width, 2.0 * rows * HIDDEN * width, "bf16",
        lambda tile: tile["BN"] * 128,
    )  # fmt: skip


def _attention(ranks: int, rows: int) -> Iterator[Work]:
    heads = HEADS // ranks
    keys = aot_cases.keys_of("tiled16_f32")
    scored = (
        f32(rows, INDEX_HEADS, INDEX_WIDTH), f32(rows, INDEX_HEADS), 0.01, keys,
        ints(rows, CONTEXT // BLOCK), ints(rows + 1), ints(rows), 1,
    )  # fmt: skip
    yield Work(
        case(_name("index scores", ranks, rows), kernel("indexer_logits", "scores"), *scored,
             fill=False),
        "indexer_logits_kernel",
        INDEX_OWNERS,
        rows * CONTEXT * (INDEX_WIDTH + 4 + 4.0),
        2.0 * rows * CONTEXT * INDEX_HEADS * INDEX_WIDTH,
        "fp8",
        lambda tile: tile["BK"] * (INDEX_WIDTH + 4),
    )  # fmt: skip
    chosen = (f32(rows, CONTEXT), ints(rows), INDEX_TOPK)
    yield Work(
        case(_name("top-k", ranks, rows), kernel("topk"), *chosen),
        "topk_kernel", INDEX_OWNERS, 4.0 * rows * CONTEXT, 0.0, "bf16", lambda tile: 4 * tile["C"],
    )  # fmt: skip
    cache = aot_cases.latents("e4m3")
    for precision in ("bf16", "fp8"):
        attended = aot_cases.attended(cache, rows, heads)
        yield Work(
            case(_name(f"sparse MLA {precision}", ranks, rows), kernel("sparse_mla"), *attended,
                 precision=precision),
            "sparse_mla_kernel",
            LAYERS if precision == "bf16" else 0,
            float(rows * INDEX_TOPK * ROW),
            2.0 * rows * heads * INDEX_TOPK * (ROW + LATENT),
            precision,
            lambda tile: tile["BK"] * ROW,
        )  # fmt: skip


def _experts(ranks: int, rows: int) -> Iterator[Work]:
    width = EXPERT_WIDTH // ranks
    touched = EXPERTS * (1 - (1 - TOPK / EXPERTS) ** rows)
    for act, name in (("mxfp4", "a4w4"), ("mxfp8", "a8w4")):
        given = (
            bf16(rows, HIDDEN),
            weight("mxfp4", EXPERTS, 2 * width, HIDDEN),
            weight("mxfp4", EXPERTS, HIDDEN, width),
            f32(rows, TOPK),
            ints(rows, TOPK, dtype=torch.int64),
        )
        own = case(_name(f"experts {name}", ranks, rows), kernel("moe_experts"), *given, act=act)
        unit = "mxfp4" if act == "mxfp4" else "fp8"
        for launch, matrices in (("gated_kernel", 2), ("outer_kernel", 1)):
            yield Work(
                own,
                launch,
                MOE_LAYERS if name == "a4w4" else 0,
                touched * matrices * width * HIDDEN * _MXFP4,
                2.0 * rows * TOPK * matrices * width * HIDDEN,
                unit,
                partial(_tile_bytes, matrices),
            )


def _tile_bytes(matrices: int, tile: Mapping[str, Any]) -> float:
    return matrices * int(tile["BN"]) * int(tile["STEP"]) * _MXFP4


def _name(what: str, ranks: int, rows: int) -> str:
    return f"{what}, TP {ranks}, {rows} rows"
