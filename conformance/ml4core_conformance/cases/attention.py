"""Inputs of attention over chosen slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ml4core_conformance.cache_inputs import (
    BLOCK,
    SOFTMAX,
    Variant,
    block_size,
    int32,
    pages,
    poisoned,
    variants,
)
from ml4core_conformance.case import Arguments, OpCase
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.layouts import LATENT, ROPE

_WIDTH = LATENT + ROPE
_HOSTILE = (-(2**31), -123456, -1, 2**31 - 1)
"""And the first slot behind the cache."""
_HEADS = (1, 2, 4, 12, 16, 24, 32, 48, 64, 128)


def _base(
    draw: Draw,
    variant: Variant,
    rows: int,
    heads: int,
    keys: int,
    *,
    blocks: int = 4,
    width: int = _WIDTH,
    scale: float = SOFTMAX,
    mean: float = 0.0,
    page_stride: int = 1,
) -> Arguments:
    """Distinct slots in any order, all of them counted."""
    size = block_size(variant.layout, BLOCK)
    cache = pages(draw, "latent", variant.layout, blocks, size, mean=mean, page_stride=page_stride)
    slots = torch.stack([draw.permutation(blocks * size)[:keys] for _ in range(rows)])
    return {
        "q": draw.normal(rows, heads, width, dtype=variant.dtype),
        "cache": cache,
        "slots": slots.to(torch.int32),
        "lens": torch.full((rows,), keys, dtype=torch.int32),
        "scale": scale,
    }


def _lengths(draw: Draw, variant: Variant, rows: Sequence[int], keys: int, heads: int) -> Arguments:
    """Rows of these lengths, with slots behind that look valid."""
    arguments = _base(draw, variant, len(rows), heads, keys)
    return {**arguments, "lens": int32(rows)}


def _tails(
    draw: Draw, variant: Variant, rows: int, keys: int = 72, longest: int = 60, blocks: int = 4
) -> Arguments:
    """Behind each row's length another kind of junk: B016."""
    arguments = _base(draw, variant, rows, 8, keys, blocks=blocks)
    slots = arguments["slots"]
    arguments["lens"] = draw.integers(rows, low=20, high=longest, dtype=torch.int32)
    for t, length in enumerate(arguments["lens"].tolist()):
        if t % 4 != 3:  # every fourth keeps slots that look valid
            slots[t, length:] = (-1, 0, 2**31 - 1)[t % 4]
    return arguments


def _placed(draw: Draw, variant: Variant) -> Arguments:
    """The same keys at the front, at the back, between -1, and one key alone: B014."""
    arguments = _base(draw, variant, 7, 8, 192)
    keys = arguments["slots"][0, :64].clone()
    slots = torch.full_like(arguments["slots"], -1)
    slots[0, :64] = keys
    slots[1, 16:80] = keys
    slots[2, 64:128] = keys
    slots[3, 128:] = keys
    slots[4, 1:128:2] = keys
    slots[5, -1] = keys[0]
    slots[6, 0] = keys[0]
    q = arguments["q"][:1].expand(7, -1, -1).clone()
    return {**arguments, "q": q, "slots": slots}


def _empty(draw: Draw, variant: Variant) -> Arguments:
    """No valid slot, length 0, and a row that has keys."""
    arguments = _base(draw, variant, 4, 8, 66)
    arguments["slots"][1] = -1
    arguments["slots"][2] = torch.where(torch.arange(66) % 2 == 0, -1, 2**31 - 1)
    return {**arguments, "lens": int32([0, 66, 66, 65])}


def _hostile(draw: Draw, variant: Variant) -> Arguments:
    arguments = _base(draw, variant, 3, 8, 70)
    cache, slots = arguments["cache"], arguments["slots"]
    junk = (*_HOSTILE, cache.parts[0].shape[0] * cache.block_size, 10**6)
    for t in range(3):
        where = draw.permutation(70)[:30]
        slots[t, where] = int32([junk[i % len(junk)] for i in range(30)])
    slots[2, :6] = int32(junk)
    return {**arguments, "lens": int32([70, 41, 70])}


def _poisoned(
    draw: Draw, variant: Variant, counts: Sequence[int], keys: int, blocks: int
) -> Arguments:
    """Every row of the cache that isn't counted is NaN, those behind a row's length too: B020."""
    arguments = _base(draw, variant, len(counts), 8, keys, blocks=blocks)
    slots = arguments["slots"]
    kept = [slot for t, n in enumerate(counts) for slot in slots[t, :n].tolist()]
    dead = torch.tensor(sorted(set(range(blocks * arguments["cache"].block_size)) - set(kept)))
    for t, n in enumerate(counts):
        if len(dead):
            slots[t, n:] = dead[torch.arange(keys - n) % len(dead)].to(torch.int32)
        else:
            slots[t, n:] = -1
    cache = poisoned(arguments["cache"], kept)
    return {**arguments, "cache": cache, "lens": int32(counts)}


def _peaked(draw: Draw, variant: Variant) -> Arguments:
    """Scores far apart: one key has all the weight, others underflow."""
    arguments = _base(draw, variant, 3, 8, 65, scale=0.5)
    arguments["q"] = (arguments["q"] * torch.tensor([0.2, 1.0, 6.0]).view(3, 1, 1)).to(
        variant.dtype
    )
    return arguments


def _alike(draw: Draw, variant: Variant) -> Arguments:
    """A query of zeros: every key has the same weight."""
    arguments = _base(draw, variant, 2, 8, 96, mean=0.5)
    arguments["q"][0] = 0
    return arguments


def _large(draw: Draw, variant: Variant) -> Arguments:
    """2,048 keys whose values don't cancel: what is added up in few bits drifts."""
    return _base(draw, variant, 2, 8, 2048, blocks=34, mean=0.5)


def _cases(variant: Variant) -> list[OpCase]:
    def case(
        name: str,
        make: partial[Arguments],
        *corners: str,
        heads: int = 8,
        keys: int = 192,
        small: bool = True,
        bugs: tuple[str, ...] = (),
    ) -> OpCase:
        return OpCase(
            "sparse_mla",
            variant.name,
            name,
            make,
            frozenset(corners),
            variant.requires,
            small,
            {},
            bugs,
            {"max_heads": heads, "max_topk": keys},
        )

    def made(function: Callable[..., Arguments], **more: object) -> partial[Arguments]:
        return partial(function, variant=variant, **more)

    found = [
        case(
            "lengths",
            made(_lengths, rows=[70, 33, 1], keys=70, heads=8),
            "one valid slot",
            bugs=("B018", "B120"),
        ),
        case("placed", made(_placed), "leading -1", "one valid slot", bugs=("B014",)),
        case("empty", made(_empty), "no valid slot", "length 0"),
        case("hostile", made(_hostile), "hostile slots"),
        case(
            "poisoned",
            made(_poisoned, counts=[1, 63, 64, 65, 100], keys=128, blocks=4),
            "poisoned unselected rows",
            bugs=("B016", "B020"),
        ),
        case("peaked", made(_peaked)),
        case("alike", made(_alike)),
        case("no-rope", made(_base, rows=2, heads=8, keys=40, width=LATENT)),
        case("strided", made(_base, rows=2, heads=8, keys=77, page_stride=2), bugs=("B031",)),
        case("prefill65", made(_tails, rows=65), bugs=("B016",), small=False),
        case("prefill200", made(_tails, rows=200), bugs=("B016",), small=False),
        case(
            "poisoned2048",
            made(_poisoned, counts=[729, 2047], keys=2048, blocks=48),
            "poisoned unselected rows",
            keys=2048,
            small=False,
            bugs=("B020",),
        ),
        case("large", made(_large), keys=2048, small=False),
    ]
    if variant.name == "fp8_ds_mla+bf16":  # once, as it is slow
        wide = made(_tails, rows=65, keys=2048, longest=101, blocks=34)
        found.append(case("prefill65x2048", wide, keys=2048, small=False, bugs=("B016",)))
    for heads in _HEADS:
        make = made(_lengths, rows=[64, 31], keys=64, heads=heads)
        found.append(
            case(f"heads{heads}", make, "heads 1, 8, 64", heads=heads, small=heads in (1, 64))
            if heads in (1, 64)
            else case(f"heads{heads}", make, heads=heads, small=False, bugs=("B126",))
        )
    return found


def cases() -> list[OpCase]:
    return [case for variant in variants("latent") for case in _cases(variant)]
