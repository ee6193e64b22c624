"""The products of a step of ML4 whose weights every step reads: all matrices that a rank holds but
routed experts, and the embedding, of which it reads a row a token.

Their bytes are those of the planner, which a backend doesn't import: a test holds them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ml4core.api import Weight
from ml4core_rocm.aot_cases import kernel
from ml4core_rocm.aot_floor import Shape, Work
from ml4core_triton.aot import Case
from ml4core_triton.aot_cases import bf16, case, f32, weight
from ml4core_triton.ops import load

HEADS, HIDDEN, LATENT = 64, 6144, 512
NOPE, VALUE = 64, 128
"""Values of a head: of a query without its rope, and of what attention gives."""
_DENSE, _SHARED, _VOCAB, _EXPERTS, _TOPK = 16384, 6144, 131072, 128, 4
_SIZE = {"bf16": 2, "fp32": 4}
"""Bytes of a value; FP8 has one."""


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] of the model, of which a rank holds a part.

    Attributes:
        times: layers that have it.
        cut: the side that tensor-parallel ranks share out.
        wide: whether its result is fp32, not bf16.
    """

    name: str
    times: int
    rows: int
    columns: int
    cut: Literal["rows", "columns", "whole"] = "whole"
    format: str = "fp8_block"
    wide: bool = False

    def of_rank(self, ranks: int) -> tuple[int, int]:
        rows = self.rows // ranks if self.cut == "rows" else self.rows
        return rows, self.columns // ranks if self.cut == "columns" else self.columns


MATRICES = (
    Matrix("wq", 54, HEADS * (NOPE + 64), HIDDEN, "rows"),
    Matrix("wq", 18, HEADS * NOPE, HIDDEN, "rows"),  # of layers without rope
    Matrix("wkv_a", 54, LATENT + 64, HIDDEN),
    Matrix("wkv_a", 9, LATENT, HIDDEN),
    Matrix("output projection", 72, HIDDEN, HEADS * VALUE, "columns"),
    Matrix("index_wq", 44, 32 * 128, HIDDEN, wide=True),
    Matrix("index_wk", 44, 128, HIDDEN, wide=True),
    Matrix("index_weights_proj", 44, 32, HIDDEN, format="fp32", wide=True),
    Matrix("router", 71, _EXPERTS, HIDDEN, format="fp32", wide=True),
    Matrix("shared_w13", 71, 2 * _SHARED, HIDDEN, "rows"),
    Matrix("shared_w2", 71, HIDDEN, _SHARED, "columns"),
    Matrix("dense_w13", 1, 2 * _DENSE, HIDDEN, "rows"),
    Matrix("dense_w2", 1, HIDDEN, _DENSE, "columns"),
    Matrix("head", 1, _VOCAB, HIDDEN, "rows", "bf16", wide=True),
)


def products(ranks: int, shape: Shape) -> Iterator[Work]:
    """One launch of each product, with how often a step makes it."""
    for matrix in MATRICES:
        yield _product(matrix, ranks, shape)
    heads = HEADS // ranks
    for name, inner, outer in (("w_uk", NOPE, LATENT), ("w_uv", LATENT, VALUE)):
        held = weight("bf16", heads, outer, inner)
        own = case(
            shape.name(f"{name} {heads} heads", ranks),
            kernel("head_gemm"),
            bf16(shape.rows, heads, inner),
            held,
        )
        moved = 2 * heads * (inner + outer)
        yield _work(own, 72, held, shape.rows, (heads * outer, inner), moved)


def bytes_of(held: Weight) -> int:
    """Scales included."""
    return sum(part.numel() * part.element_size() for part in held.parts.values())


def _product(matrix: Matrix, ranks: int, shape: Shape) -> Work:
    rows, columns = matrix.of_rank(ranks)
    many = shape.judged if matrix.name == "head" else shape.rows
    name, x = shape.name(f"{matrix.name} {rows} x {columns}", ranks), bf16(many, columns)
    if matrix.format == "fp32":
        held = Weight("fp32", (rows, columns), {"data": f32(rows, columns)})
    else:
        held = weight(matrix.format, rows, columns)
    if matrix.name == "router":
        router = load("router", "ml4core_rocm")
        own = case(name, router, x, held.parts["data"], _TOPK, True, 1.0)
    else:
        own = case(name, kernel("gemm"), x, held, *([torch.float32] if matrix.wide else []))
    moved = 2 * columns + (4 if matrix.wide else 2) * rows
    return _work(own, matrix.times, held, many, (rows, columns), moved)


def _work(
    own: Case, times: int, held: Weight, rows: int, matrix: tuple[int, int], moved: int
) -> Work:
    """``moved``: bytes of a row of the input and of the result."""
    router, read = own.name.startswith("router"), bytes_of(held)
    return Work(
        own,
        "_logits_kernel" if router else "tile_kernel",
        times,
        float(read + rows * moved),
        2.0 * rows * matrix[0] * matrix[1],
        "fp32" if held.format == "fp32" and not router else "bf16",  # the router's, as sums of bf16
        _asked(rows, _SIZE.get(held.format, 1)),
        float(read),
    )


def _asked(rows: int, value: int) -> Callable[[Mapping[str, Any]], float]:
    """Bytes of the tiles of the weight and of the rows that a program asks for at a time."""

    def asked(tile: Mapping[str, Any]) -> float:
        inner = int(tile.get("BK", 128))
        return inner * (int(tile["BN"]) * value + 2 * min(rows, int(tile["BM"])))

    return asked
