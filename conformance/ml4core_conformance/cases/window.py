"""Inputs of attention over the latest keys, and of the join of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from ml4core_conformance.cache_inputs import (
    ACTS,
    BLOCK,
    SOFTMAX,
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
from ml4core_conformance.oracle.layouts import LATENT, ROPE

BUGS = ("B070", "B120")


def _window(
    draw: Draw,
    variant: Variant,
    visible: Sequence[Sequence[int]],
    *,
    window: int | None = None,
    padding: int = 0,
    columns: int = 3,
    heads: int = 8,
    width: int = LATENT + ROPE,
    page_stride: int = 1,
    poison: bool = False,
    mean: float = 0.0,
) -> Arguments:
    """Requests whose rows see so many keys, then ``padding`` rows of no request."""
    size = block_size(variant.layout, BLOCK)
    longest = [max(each, default=0) for each in visible]
    needed = [-(-length // size) for length in longest]
    blocks = sum(needed) + 2
    cache = pages(draw, "latent", variant.layout, blocks, size, page_stride=page_stride, mean=mean)
    table = block_table(draw, needed, max(columns, *needed), blocks)
    if poison:
        # Keys that some row of the request sees: behind the first row's window, before the end.
        ends = visible_slots(table, size, longest)
        firsts = [0 if window is None else max(0, min(each) - window) for each in visible]
        before = set(visible_slots(table, size, firsts))
        cache = poisoned(cache, [slot for slot in ends if slot not in before])
    rows = [len(each) for each in visible]
    total = sum(rows) + padding
    seen = [n for each in visible for n in each] + [0] * padding
    return {
        "q": draw.normal(total, heads, width, dtype=variant.dtype),
        "cache": cache,
        "block_table": table,
        "query_start": query_start(rows),
        "visible": int32(seen),
        "max_rows": max(rows),
        "scale": SOFTMAX,
        "window": window,
    }


def _window_cases(variant: Variant) -> list[OpCase]:
    def case(
        name: str,
        *corners: str,
        visible: Sequence[Sequence[int]],
        small: bool = True,
        **more: object,
    ) -> OpCase:
        make = partial(_window, variant=variant, visible=visible, **more)  # type: ignore[arg-type]
        words = frozenset(corners)
        heads = {"max_heads": int(str(more.get("heads", 8)))}
        return OpCase(
            "window_mla", variant.name, name, make, words, variant.requires, small, limits=heads
        )

    edge = [[63], [64], [65], [128], [129], [1]]
    return [
        case("ragged", "length 0", "ragged lengths", visible=[[0], [1], [70], [130]]),
        case("page-edge", "page edge", visible=edge),
        case("window-edge", "window edge", visible=[[63], [64], [65], [66], [127]], window=64),
        case("window1", "window edge", visible=[[1], [2], [65], [64]], window=1),
        case("block", "rows of one request with equal visible", visible=[[90] * 3, [7] * 3]),
        case("verify", visible=[[60, 61, 62, 63, 64, 65], [3], [100, 101]], window=33),
        case("zero", "length 0", visible=[[0], [0]], window=8),
        case("padding", visible=[[20, 21], [50]], padding=3),
        case("poisoned", visible=[[70], [64, 65], [3]], window=20, poison=True),
        case("poisoned-all", visible=[[70], [64, 65], [3]], poison=True),
        case("strided", visible=[[70], [130]], page_stride=2, window=100),
        case("no-rope", visible=[[70], [5]], width=LATENT),
        case("heads1", visible=[[66]], heads=1),
        case("heads64", visible=[[66], [9]], heads=64),
        case("prefill", visible=[list(range(30, 100)), [4, 5]], window=41, small=False),
        case("large", visible=[[2100, 2101]], window=2048, small=False, mean=0.5),
    ]


def _parts(
    draw: Draw,
    dtype: torch.dtype,
    parts: int,
    empty: Sequence[tuple[int, int]] = (),
    spread: float = 3.0,
    fill: float = 0.0,
) -> Arguments:
    """``empty`` are (part, row) without keys, whose outs hold ``fill``."""
    outs = draw.normal(parts, 3, 4, LATENT, dtype=dtype)
    lses = spread * draw.normal(parts, 3, 4)
    for part, row in empty:
        lses[part, row] = -math.inf
        outs[part, row] = fill
    return {"outs": outs, "lses": lses}


def _quarters(draw: Draw, dtype: torch.dtype) -> Arguments:
    """Scores 0 and ln 3: weights 1/4 and 3/4, in base e alone. B120."""
    outs = draw.normal(2, 4, 8, LATENT, dtype=dtype)
    lses = torch.tensor([0.0, math.log(3.0)]).view(2, 1, 1).expand(2, 4, 8).contiguous()
    return {"outs": outs, "lses": lses}


def _merge_cases(act: str, dtype: torch.dtype) -> list[OpCase]:
    every = [(part, row) for part in range(8) for row in range(3)]
    some = [(part, row) for part, row in every if (part + row) % 3]

    def case(name: str, *corners: str, **more: object) -> OpCase:
        make = partial(_parts, dtype=dtype, **more)  # type: ignore[arg-type]
        requires = frozenset({f"act:{act}"})
        return OpCase("merge_lse", act, name, make, frozenset(corners), requires, True, bugs=BUGS)

    both = ("NaN in an empty part", "all parts empty")
    return [
        OpCase(
            "merge_lse",
            act,
            "quarters",
            partial(_quarters, dtype=dtype),
            frozenset(),
            frozenset({f"act:{act}"}),
            True,
            bugs=BUGS,
        ),
        case("one", "one part", parts=1),
        case("one-empty", "one part", "empty part", parts=1, empty=[(0, 1)]),
        case("eight", "empty part", parts=8, empty=some),
        case("far", parts=3, spread=60.0),
        case("all-empty", "all parts empty", parts=8, empty=every),
        case("nan", *both, parts=3, empty=[(0, 0), (1, 1), (2, 1), (0, 1)], fill=math.nan),
        case("inf", "empty part", parts=2, empty=[(0, 0), (1, 2)], fill=math.inf),
    ]


def cases() -> list[OpCase]:
    windows = [case for variant in variants("latent") for case in _window_cases(variant)]
    merges = [case for act, dtype in ACTS.items() for case in _merge_cases(act, dtype)]
    return [*windows, *merges]
