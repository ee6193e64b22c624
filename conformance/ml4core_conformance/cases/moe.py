"""Inputs of routing and of routed experts. Variants of ``moe_experts`` are named as ``gemm``'s."""

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
    needs,
    quantized,
    small_integers,
)

Make = Callable[[Draw], Arguments]


def cases() -> list[OpCase]:
    found = []
    for act, dtype in ACTIVATIONS.items():
        found += _router(act, dtype)
        for format in WEIGHT_FORMATS:
            found += _experts(act, dtype, format)
    for act, format in QUANTIZED_ACTIVATIONS:
        found += _quantized_experts(act, format)
    return found


def _router(act: str, dtype: torch.dtype) -> list[OpCase]:
    def case(
        name: str, make: Make, *corners: str, small: bool = False, exact: bool = False
    ) -> OpCase:
        options = {"exact_logits": True} if exact else {}
        words = needs(act)
        return OpCase(
            "router", act, name, make, frozenset(corners), words, small, options, ("B076",)
        )

    return [
        case("rows", partial(_route, dtype, 65, 512, 128, 4, True), small=True),
        case("long", partial(_route, dtype, 5, 6144, 128, 4, True)),
        case("raw", partial(_route, dtype, 17, 256, 16, 3, False), "no renormalisation"),
        case("none", partial(_route, dtype, 0, 64, 16, 4, True)),
        case("ties", partial(_route_ties, dtype), "ties", small=True, exact=True),
        case("negative", partial(_route_negative, dtype), "all negative", exact=True),
        case("broken", partial(_route_broken, dtype), "NaN row"),
    ]


def _experts(act: str, dtype: torch.dtype, format: str) -> list[OpCase]:
    def case(name: str, make: Make, *corners: str, small: bool = False, bug: str = "") -> OpCase:
        return OpCase(
            "moe_experts",
            f"{format}+{act}",
            name,
            make,
            frozenset(corners),
            needs(act, f"weights:{format}"),
            small,
            bugs=(bug,) if bug else (),
        )

    def of(rows: int, experts: int, width: int, inner: int, topk: int) -> Make:
        return partial(_mixture, format, dtype, rows, experts, width, inner, topk)

    return [
        case("one", of(1, 8, 256, 192, 4), "one row"),
        case("rows", of(23, 8, 192, 160, 3), small=True),
        case("long", of(6, 2, 1024, 768, 2)),
        case("none", of(0, 4, 64, 32, 2)),
        case("each", partial(_one_each, format, dtype, 6, 320, 192), bug="B034"),
        case("narrow", partial(_one_each, format, dtype, 3, 64, 384), bug="B034"),
        case(
            "lopsided",
            partial(_lopsided, format, dtype),
            "all tokens to one expert",
            "an expert without tokens",
        ),
        case("weights", partial(_odd_weights, format, dtype), "weight 0", small=True),
        case("ranks", partial(_other_ranks, format, dtype), "experts of another rank"),
    ]


def _quantized_experts(act: str, format: str) -> list[OpCase]:
    words = needs(act, "act:bf16", f"weights:{format}")
    return [
        OpCase(
            "moe_experts",
            f"{format}+{act}",
            name,
            partial(_mixture, format, torch.bfloat16, rows, 8, 256, 384, 3),
            requires=words,
            small=rows > 1,
            options={"act": act},
        )
        for name, rows in (("one", 1), ("rows", 23))
    ]


def _route(
    dtype: torch.dtype,
    rows: int,
    width: int,
    experts: int,
    topk: int,
    renormalize: bool,
    draw: Draw,
) -> Arguments:
    return {
        "x": draw.normal(rows, width, dtype=dtype),
        "weight": draw.normal(experts, width) * width**-0.5,
        "topk": topk,
        "renormalize": renormalize,
        "routed_scale": 1.0 if renormalize else 2.5,
    }


def _route_ties(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Whole numbers, so that logits are exact; many experts are equal, also at the border."""
    weight = small_integers(draw, 32, 64, dtype=torch.float32) / 64
    twin = draw.integers(32, high=6)
    weight = weight[twin]
    x = small_integers(draw, 24, 64, dtype=dtype)
    x[0] = 0  # all logits are 0
    rest = {"topk": 4, "renormalize": True, "routed_scale": 1.0}
    return {"x": x, "weight": weight, **rest}


def _route_negative(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Logits -50 - 0.1 i, each a single product."""
    weight = torch.zeros(128, 32)
    weight[:, 7] = -50 - 0.1 * torch.arange(128)
    x = torch.zeros(3, 32, dtype=dtype)
    x[:, 7] = torch.tensor([1.0, 0.5, 2.0]).to(dtype)
    return {"x": x, "weight": weight, "topk": 4, "renormalize": True, "routed_scale": 1.0}


def _route_broken(dtype: torch.dtype, draw: Draw) -> Arguments:
    args = _route(dtype, 6, 128, 64, 4, True, draw)
    x = args["x"].clone()
    x[1] = torch.nan
    x[4, 17] = torch.nan
    return {**args, "x": x}


def _mixture(
    format: str,
    dtype: torch.dtype,
    rows: int,
    experts: int,
    width: int,
    inner: int,
    topk: int,
    draw: Draw,
) -> Arguments:
    """Distinct experts a row, with weights that add up to 1."""
    ids = torch.zeros(rows, topk, dtype=torch.int64)
    for row in range(rows):
        ids[row] = draw.permutation(experts)[:topk]
    weights = draw.uniform(rows, topk, low=0.1)
    return {
        "x": draw.normal(rows, width, dtype=dtype),
        "w13": quantized(format, 1.5 * draw.normal(experts, 2 * inner, width) * width**-0.5),
        "w2": quantized(format, draw.normal(experts, width, inner) * inner**-0.5, False),
        "weights": weights / weights.sum(-1, keepdim=True),
        "ids": ids,
    }


def _one_each(
    format: str, dtype: torch.dtype, experts: int, width: int, inner: int, draw: Draw
) -> Arguments:
    """Row t goes to expert t alone: a wrong row names the expert."""
    args = _mixture(format, dtype, experts, experts, width, inner, 1, draw)
    return {**args, "ids": torch.arange(experts).unsqueeze(-1), "weights": torch.ones(experts, 1)}


def _lopsided(format: str, dtype: torch.dtype, draw: Draw) -> Arguments:
    args = _mixture(format, dtype, 33, 4, 128, 96, 1, draw)
    return {**args, "ids": torch.full((33, 1), 2)}


def _odd_weights(format: str, dtype: torch.dtype, draw: Draw) -> Arguments:
    """Weights of 0, of which one stands beside a row of NaN; and a weight that is NaN, which spoils
    its row.
    """
    args = _mixture(format, dtype, 7, 5, 160, 128, 2, draw)
    weights, x = args["weights"].clone(), args["x"].clone()
    weights[0, 1] = 0
    weights[2] = 0
    weights[4] = 0
    x[4] = torch.nan
    weights[5, 0] = torch.nan
    return {**args, "weights": weights, "x": x}


def _other_ranks(format: str, dtype: torch.dtype, draw: Draw) -> Arguments:
    """The third of four ranks with four experts each. Some rows have no choice here."""
    args = _mixture(format, dtype, 13, 4, 128, 160, 4, draw)
    ids = torch.stack([draw.permutation(16)[:4] for _ in range(13)])
    ids[3] = torch.tensor([0, 7, 12, 15])
    ids[4] = torch.tensor([8, 9, 10, 11])
    return {**args, "ids": ids, "first_expert": 8}
