"""Inputs of the indexer's scores, and of the choice of the largest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ml4core_conformance.cache_inputs import (
    BLOCK,
    Variant,
    block_size,
    block_table,
    int32,
    pages,
    poisoned,
    query_start,
    variants,
    visible_slots,
)
from ml4core_conformance.case import Arguments, OpCase
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.layouts import KEY


def _logits(
    draw: Draw,
    variant: Variant,
    visible: Sequence[Sequence[int]],
    *,
    heads: int = 32,
    padding: int = 0,
    columns: int = 2,
    page_stride: int = 1,
    poison: bool = False,
    sizes: Sequence[float] = (),
    sign: int = 0,
) -> Arguments:
    """Requests whose rows see so many keys, then ``padding`` rows of no request.

    ``sizes`` multiply the queries row by row; ``sign`` is that of every weight, 0 for both.
    """
    size = block_size(variant.layout, BLOCK, "index")
    longest = [max(each, default=0) for each in visible]
    needed = [-(-length // size) for length in longest]
    blocks = sum(needed) + 2
    cache = pages(draw, "index", variant.layout, blocks, size, page_stride=page_stride)
    table = block_table(draw, needed, max(columns, *needed), blocks)
    if poison:
        cache = poisoned(cache, visible_slots(table, size, longest))
    rows = [len(each) for each in visible]
    total = sum(rows) + padding
    q = draw.normal(total, heads, KEY)
    for t, factor in enumerate(sizes):
        q[t] *= factor
    weights = draw.normal(total, heads)
    return {
        "q": q.to(variant.dtype),
        "weights": weights.abs() * sign if sign else weights,
        "scale": KEY**-0.5 * heads**-0.5,
        "cache": cache,
        "block_table": table,
        "query_start": query_start(rows),
        "visible": int32([n for each in visible for n in each] + [0] * padding),
        "max_rows": max(rows),
    }


def _logits_cases(variant: Variant) -> list[OpCase]:
    def case(
        name: str,
        *corners: str,
        visible: Sequence[Sequence[int]],
        small: bool = True,
        bugs: tuple[str, ...] = (),
        **more: object,
    ) -> OpCase:
        make = partial(_logits, variant=variant, visible=visible, **more)  # type: ignore[arg-type]
        return OpCase(
            "indexer_logits",
            variant.name,
            name,
            make,
            frozenset(corners),
            variant.requires,
            small,
            bugs=bugs,
        )

    depths = [list(range(60, 60 + n)) for n in range(1, 7)]
    return [
        case("ragged", "ragged lengths", "length 0", visible=[[1], [70], [0], [128]], columns=3),
        case("page-edge", "page edge", visible=[[63], [64], [65], [127], [129]]),
        case("negative", "negative weights", visible=[[40], [66]], sign=-1),
        case("depths", "several rows a request", visible=depths, bugs=("B009",)),
        case("zero", "length 0", visible=[[0]] * 8, bugs=("B011",)),
        case("mixed-zero", "length 0", visible=[[0], [0], [5], [0]], bugs=("B011",)),
        case("padding", visible=[[20, 21], [50]], padding=3),
        case("poisoned", visible=[[70], [3], [64, 65]], columns=4, poison=True),
        case("strided", visible=[[70], [128]], page_stride=3, bugs=("B031",)),
        case("sizes", visible=[[30]] * 5, sizes=(0.0, 1e-6, 1e-3, 500.0, 3e4)),
        case("heads1", visible=[[66]], heads=1),
        case("heads64", visible=[[66], [9]], heads=64),
        case("prefill", visible=[list(range(50, 120)), [9, 10]], small=False, bugs=("B007",)),
        case("large", visible=[[4099, 4100]], small=False, heads=64, columns=66),
    ]


def _scores(draw: Draw, rows: Sequence[int], columns: int, k: int) -> Arguments:
    return {"scores": draw.normal(len(rows), columns), "visible": int32(rows), "k": k}


def _lengths(draw: Draw) -> Arguments:
    """Junk behind what is visible would be chosen first, or told as NaN."""
    arguments = _scores(draw, [300, 65, 64, 63, 1, 0], 300, 64)
    junk = (math.inf, math.nan, 1e30)
    for t, seen in enumerate(arguments["visible"].tolist()):
        arguments["scores"][t, seen:] = junk[t % 3]
    return arguments


def _ties(draw: Draw, columns: int, high: int, k: int, rows: int) -> Arguments:
    """Equal scores, and ``high`` larger ones somewhere: B003."""
    scores = torch.full((rows, columns), 0.5)
    for t in range(rows):
        scores[t, draw.permutation(columns)[:high]] = 1 + draw.uniform(high)
    return {"scores": scores, "visible": int32([columns] * rows), "k": k}


def _few_values(draw: Draw) -> Arguments:
    """Whole numbers: many ties at the border, zeros of both signs among them."""
    scores = draw.integers(6, 257, low=-3, high=4).float()
    scores[scores == 0] *= -1  # some -0.0
    scores[:, ::2] = torch.where(scores[:, ::2] == 0, 0.0, scores[:, ::2])
    return {"scores": scores, "visible": int32([257, 200, 129, 128, 64, 31]), "k": 100}


def _minus_infinity(draw: Draw) -> Arguments:
    scores = torch.full((4, 90), -math.inf)
    scores[1, 7], scores[2, 60:] = 3.0, draw.normal(30)
    scores[3] = draw.normal(90)
    return {"scores": scores, "visible": int32([90, 90, 80, 90]), "k": 32}


def _not_a_number(draw: Draw) -> Arguments:
    """30 % NaN, some infinities; a row of NaN alone; NaN of either sign and any payload. B001."""
    scores = draw.normal(5, 5000)
    junk = draw.uniform(5000)
    scores[0] = torch.where(junk < 0.3, math.nan, scores[0])
    scores[0, 3], scores[0, 77], scores[0, 4999] = math.inf, -math.inf, math.inf
    scores[1] = math.nan
    scores[2, 2500:] = math.nan  # behind what is visible
    bits = torch.tensor([-1, 0x7FC00001, 0x7F800001, -0x7FFFFF], dtype=torch.int32)
    scores[3, :4] = bits.view(torch.float32)
    scores[4, 1000:] = math.nan  # fewer numbers than k
    return {"scores": scores, "visible": int32([5000, 5000, 2500, 5000, 3000]), "k": 2048}


def _few_numbers(draw: Draw) -> Arguments:
    scores = draw.normal(4, 70)
    scores[0, ::2], scores[1, 1:], scores[2, :] = math.nan, math.nan, math.nan
    scores[3, 5] = math.nan
    return {"scores": scores, "visible": int32([70, 70, 3, 5]), "k": 64}


def _magnitudes(draw: Draw) -> Arguments:
    """Denormals, the largest numbers and infinities are in order; neighbours differ by a bit."""
    values: list[float] = [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1e-38,
        -1e-38,
        3.4e38,
        -3.4e38,
        math.inf,
        -math.inf,
    ]
    row = torch.cat((torch.tensor(values), draw.normal(54)))
    near = (1.0 + torch.arange(64) * 2.0**-23)[draw.permutation(64)]
    scores = torch.stack((row[draw.permutation(64)], near, -near))
    return {"scores": scores, "visible": int32([64, 64, 63]), "k": 20}


def _topk_cases() -> list[OpCase]:
    def case(
        name: str,
        make: Callable[[Draw], Arguments],
        k: int,
        *corners: str,
        bugs: tuple[str, ...] = (),
    ) -> OpCase:
        return OpCase(
            "topk",
            "scores",
            name,
            make,
            frozenset(corners),
            small=k < 2048,
            bugs=bugs,
            limits={"max_topk": k},
        )

    edges = ("fewer than k visible", "visible = k", "length 0")
    return [
        case("lengths", _lengths, 64, *edges),
        case("k1", partial(_scores, rows=[50, 1, 0, 2], columns=50, k=1), 1, "visible = k"),
        case("k=S", partial(_scores, rows=[40, 39, 1], columns=40, k=40), 40, "visible = k"),
        case("k>S", partial(_scores, rows=[40, 39, 0], columns=40, k=64), 64, "k > S"),
        case("ties", partial(_ties, columns=400, high=10, k=64, rows=3), 64, "ties at the border"),
        case("few-values", _few_values, 100, "ties at the border", "fewer than k visible"),
        case("minus-infinity", _minus_infinity, 32, "all -inf"),
        case("few-numbers", _few_numbers, 64, "NaN", bugs=("B001",)),
        case("magnitudes", _magnitudes, 20),
        case(
            "ties2048",
            partial(_ties, columns=6100, high=100, k=2048, rows=7),
            2048,
            "ties at the border",
            bugs=("B003",),
        ),
        case("nan2048", _not_a_number, 2048, "NaN", bugs=("B001",)),
        case("long", partial(_scores, rows=[65539, 2048, 2049, 9000], columns=65539, k=2048), 2048),
    ]


def cases() -> list[OpCase]:
    logits = [case for variant in variants("index") for case in _logits_cases(variant)]
    return [*logits, *_topk_cases()]
