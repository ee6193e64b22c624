"""Inputs of matrix products in every weight format, and of what stands between them.

Variants of ``gemm`` are ``<weight>+<activation>``: ``fp8_block+bf16`` is a bf16 input that is used
as it is; ``mxfp4+fp8_block`` one that is quantised first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ml4core_conformance.case import Arguments, OpCase
from ml4core_conformance.draw import Draw
from ml4core_conformance.op_inputs import (
    ACTIVATIONS,
    QUANTIZED_ACTIVATIONS,
    WEIGHT_FORMATS,
    integers,
    needs,
    quantized,
    small_integers,
    strided,
)

_LONG = 4096
"""A reduction in which bf16 accumulation loses all but a few bits."""

_BUGS = {"nvfp4": ("B036",), "fp8_block": ("B040",)}
"""By weight format: known faults that shapes with a cut block, or one row, show."""

Make = Callable[[Draw], Arguments]


def cases() -> list[OpCase]:
    found = [case for act, dtype in ACTIVATIONS.items() for case in _plain(act, dtype)]
    for act, dtype in ACTIVATIONS.items():
        for format in WEIGHT_FORMATS:
            found += _gemm(act, dtype, format)
        for format in ("bf16", "fp32"):
            found += _head_gemm(act, dtype, format)
    for act, format in QUANTIZED_ACTIVATIONS:
        found += _quantized_gemm(act, format)
    return found


def _plain(act: str, dtype: torch.dtype) -> list[OpCase]:
    words = needs(act)
    return [
        OpCase(
            "embed",
            act,
            "rows",
            partial(_embed, dtype),
            frozenset({"first and last id", "repeated id"}),
            words,
            small=True,
        ),
        OpCase(
            "silu_mul",
            act,
            "rows",
            partial(_silu, dtype),
            frozenset({"large negative gate"}),
            words,
            small=True,
        ),
        OpCase("embed", act, "none", partial(_embed_none, dtype), requires=words),
        OpCase("silu_mul", act, "none", partial(_silu_none, dtype), requires=words),
        OpCase("silu_mul", act, "one", partial(_silu_one, dtype), requires=words),
    ]


def _gemm(act: str, dtype: torch.dtype, format: str) -> list[OpCase]:
    def case(
        name: str, make: Make, *corners: str, small: bool = False, exact: bool = False
    ) -> OpCase:
        return OpCase(
            "gemm",
            f"{format}+{act}",
            name,
            make,
            frozenset(corners),
            needs(act, f"weights:{format}"),
            small,
            {"exact": True} if exact else {},
            _BUGS.get(format, ()) if corners else (),
        )

    found = [
        case("one", partial(_product, format, dtype, 1, 256, 512), "one row"),
        case("ragged", partial(_product, format, dtype, 17, 200, 352), "ragged last block"),
        # As many rows as the latent's projection, and columns of a shard: the last block is cut.
        case("shard", partial(_product, format, dtype, 3, 576, 320), "ragged last block"),
        case("long", partial(_product, format, dtype, 6, 96, _LONG), small=True),
        case("rounded", partial(_whole, format, dtype), small=True, exact=True),
        case("none", partial(_product, format, dtype, 0, 64, 128)),
    ]
    if format in ("fp32", "bf16"):
        found.append(case("wide", partial(_to_float, format, dtype)))
        found.append(case("slice", partial(_slice, format, dtype)))
    return found


def _quantized_gemm(act: str, format: str) -> list[OpCase]:
    words = needs(act, "act:bf16", f"weights:{format}")
    variant, dtype = f"{format}+{act}", torch.bfloat16
    return [
        OpCase("gemm", variant, name, make, requires=words, small=small, options={"act": act})
        for name, make, small in (
            ("one", partial(_product, format, dtype, 1, 256, 512), False),
            ("rows", partial(_product, format, dtype, 33, 200, 640), True),
            ("outliers", partial(_outliers, format, dtype), False),
        )
    ]


def _head_gemm(act: str, dtype: torch.dtype, format: str) -> list[OpCase]:
    def case(
        name: str, make: Make, *corners: str, small: bool = False, exact: bool = False
    ) -> OpCase:
        words = needs(act, f"weights:{format}")
        options = {"exact": True} if exact else {}
        variant = f"{format}+{act}"
        return OpCase("head_gemm", variant, name, make, frozenset(corners), words, small, options)

    return [
        case("heads", partial(_per_head, format, dtype, 9, 8, 512, 64), small=True),
        case("one", partial(_per_head, format, dtype, 1, 16, 64, 512), "one row"),
        case("head", partial(_per_head, format, dtype, 5, 1, 128, 96), "one head"),
        case("none", partial(_per_head, format, dtype, 0, 4, 64, 32)),
        case("rounded", partial(_whole_heads, format, dtype), small=True, exact=True),
    ]


def _embed(dtype: torch.dtype, draw: Draw) -> Arguments:
    table = draw.normal(131, 96, dtype=dtype)
    return {"ids": torch.tensor([0, 130, 7, 7, 0, 64, 130, 1]), "weight": table}


def _embed_none(dtype: torch.dtype, draw: Draw) -> Arguments:
    args = _embed(dtype, draw)
    return {**args, "ids": args["ids"][:0]}


def _silu_none(dtype: torch.dtype, draw: Draw) -> Arguments:
    return {"gate_up": torch.zeros(0, 64, dtype=dtype)}


def _silu(dtype: torch.dtype, draw: Draw) -> Arguments:
    x = draw.normal(24, 2 * 320, dtype=torch.float32) * 3
    edges = torch.tensor([-20.0, -60.0, -87.0, -88.5, -89.0, -104.0, -1e4, -1e30, 0.0, 30.0, 90.0])
    x[0, : len(edges)] = edges
    return {"gate_up": x.to(dtype)}


def _silu_one(dtype: torch.dtype, draw: Draw) -> Arguments:
    return {"gate_up": draw.normal(1, 2 * 1536, dtype=dtype)}


def _product(
    format: str, dtype: torch.dtype, rows: int, out: int, inner: int, draw: Draw
) -> Arguments:
    weight = quantized(format, draw.normal(out, inner) * inner**-0.5)
    return {"x": draw.normal(rows, inner, dtype=dtype), "weight": weight}


def _to_float(format: str, dtype: torch.dtype, draw: Draw) -> Arguments:
    """An fp32 result, as index queries and logits are: it shows what bf16 would hide."""
    return {**_product(format, dtype, 11, 160, 1024, draw), "out_dtype": torch.float32}


def _slice(format: str, dtype: torch.dtype, draw: Draw) -> Arguments:
    args = _product(format, dtype, 5, 64, 320, draw)
    return {**args, "x": strided(args["x"])}


def _outliers(format: str, dtype: torch.dtype, draw: Draw) -> Arguments:
    """Rows of different sizes, some values far larger than others, and a row of zeros."""
    args = _product(format, dtype, 12, 160, 384, draw)
    x = args["x"] * torch.exp2(draw.integers(12, 1, low=-12, high=12).float()).to(dtype)
    x[:, 200] *= 300
    x[3] = 0
    return {**args, "x": x}


def _whole(format: str, dtype: torch.dtype, draw: Draw) -> Arguments:
    """Sums of whole numbers, exact in fp32, of which bf16 can hold a part."""
    return {
        "x": small_integers(draw, 19, 608, dtype=dtype),
        "weight": integers(format, draw, 144, 608),
    }


def _per_head(
    format: str, dtype: torch.dtype, rows: int, heads: int, inner: int, out: int, draw: Draw
) -> Arguments:
    weight = quantized(format, draw.normal(heads, out, inner) * inner**-0.5)
    x = strided(draw.normal(rows, heads, inner, dtype=dtype), before=0, behind=64)
    return {"x": x, "weight": weight}


def _whole_heads(format: str, dtype: torch.dtype, draw: Draw) -> Arguments:
    return {
        "x": small_integers(draw, 7, 8, 320, dtype=dtype),
        "weight": integers(format, draw, 8, 48, 320),
    }
