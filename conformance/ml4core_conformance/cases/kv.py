"""Inputs of the ops that write and read cache rows, and of ``to_slots``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ml4core_conformance.cache_inputs import (
    BLOCK,
    SCALE,
    Role,
    Variant,
    block_size,
    int32,
    pages,
    poisoned,
    raw_pages,
    tie_free,
    variants,
)
from ml4core_conformance.case import Arguments, OpCase, Pages
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.layouts import (
    INDEX_LAYOUTS,
    LATENT,
    LATENT_LAYOUTS,
    ByteLayout,
    byte_layout,
)

_BLOCKS = 3
_EXTREMES = "amax 0, 448, denormal, inf, NaN"

# Values at the start of a row of zeros, and of a row of small numbers.
_ROWS: tuple[tuple[float, ...], ...] = (
    (0.0, -0.0, 0.0),
    (448.0, 3.0, -448.0),
    (449.0, 500.0, 0.1),
    (1e-40, -1e-45, 0.0),
    (1e-4, -1e-5, 1e-8),
    (448 * 2.0**-13, 2.0**-13, -(2.0**-20)),  # the least scale of fp8_ds_mla, met exactly
    (math.inf, 2.0, -math.inf),
    (448.0, 17.0, 19.0, 21.0, -17.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10)),  # ties of E4M3
    (3e38, -1e38, 1.0),
    (6.0, 0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, -5.0),  # ties of E2M1
)
_NAN_ROW = (math.nan, 2.0, -1.0)
# With one scale for all, what counts is the quotient: the edges of E4M3 in both flavours.
_QUOTIENTS = (448.0, 464.0, 465.0, 1000.0, -1000.0, 240.0, 248.0, 250.0, 224.0, -0.0, 2.0**-10)


def _role(op: str) -> Role:
    return "index" if op == "indexer_write" else "latent"


def _layout(op: str, variant: Variant) -> ByteLayout:
    return byte_layout(_role(op), variant.layout)


def _write(op: str, cache: Pages, slots: list[int], rows: Tensor) -> Arguments:
    arguments: Arguments = {"cache": cache, "slots": torch.tensor(slots, dtype=torch.int64)}
    if op == "indexer_write":
        return {**arguments, "key": rows}
    return {
        **arguments,
        "latent": rows[:, :LATENT].contiguous(),
        "rope": rows[:, LATENT:].contiguous(),
    }


def _rows(draw: Draw, op: str, variant: Variant, count: int, spread: float = 3.0) -> Tensor:
    layout = _layout(op, variant)
    rows = (spread * draw.normal(count, layout.width)).to(variant.dtype)
    return tie_free(rows, variant.layout) if layout.role == "latent" else rows


def _cache(draw: Draw, op: str, variant: Variant, blocks: int = _BLOCKS) -> Pages:
    size = block_size(variant.layout, BLOCK, _role(op))
    return raw_pages(draw, _role(op), variant.layout, blocks, size)


def _edges(draw: Draw, op: str, variant: Variant, stride: int = 1) -> Arguments:
    cache = replace(_cache(draw, op, variant), page_stride=stride)
    size = cache.block_size
    slots = [3 * size - 1, -1, 0, size - 1, size, -1, 2 * size - 1, size + 7]
    return _write(op, cache, slots, _rows(draw, op, variant, len(slots)))


def _skipped(draw: Draw, op: str, variant: Variant) -> Arguments:
    return _write(op, _cache(draw, op, variant), [-1] * 3, _rows(draw, op, variant, 3))


def _many(draw: Draw, op: str, variant: Variant) -> Arguments:
    cache = _cache(draw, op, variant, 5)
    slots = draw.permutation(5 * cache.block_size)[:131]
    return _write(op, cache, slots.tolist(), _rows(draw, op, variant, 131))


def _extremes(draw: Draw, op: str, variant: Variant) -> Arguments:
    layout = _layout(op, variant)
    starts = [*_ROWS]
    if layout.dtype == "uint8":  # what bits a wide NaN has is not said
        starts.append(_NAN_ROW)
    rows = torch.zeros(2 * len(starts), layout.width)
    rows[1::2] = 2e-3 * draw.normal(len(starts), layout.width)
    for i, start in enumerate(starts):
        rows[2 * i : 2 * i + 2, : len(start)] = torch.tensor(start)
    if layout.scaled:
        # In fp32, as a backend sees it, and with the middles taken out that SCALE can't meet.
        edges = torch.tensor(_QUOTIENTS) * (1 + 1e-2 * torch.tensor(_QUOTIENTS).sign()) * SCALE
        rows = tie_free(rows, variant.layout)
        rows[0, : len(edges)] = tie_free(edges, variant.layout)
    elif layout.role == "latent":
        rows = tie_free(rows.to(variant.dtype).float(), variant.layout)
    if op == "kv_write" and layout.dtype == "uint8":
        rows[:, LATENT:] = rows[:, LATENT:].nan_to_num(0.0, 1.0, -1.0)
    slots = draw.permutation(2 * BLOCK)[: len(rows)].tolist()
    return _write(op, _cache(draw, op, variant), slots, rows.to(variant.dtype))


def _no_rope(draw: Draw, op: str, variant: Variant) -> Arguments:
    arguments = _edges(draw, op, variant)
    return {name: value for name, value in arguments.items() if name != "rope"}


def _no_rows(draw: Draw, op: str, variant: Variant) -> Arguments:
    return _write(op, _cache(draw, op, variant), [], _rows(draw, op, variant, 0))


def _write_cases(op: str, variant: Variant) -> list[OpCase]:
    def case(
        name: str, make: Callable[..., Arguments], *corners: str, bugs: tuple[str, ...] = ()
    ) -> OpCase:
        return OpCase(
            op,
            variant.name,
            name,
            partial(make, op=op, variant=variant),
            frozenset(corners),
            variant.requires,
            small=name != "many",
            bugs=bugs,
        )

    found = [
        case("edges", _edges, "slot -1", "last slot of a page"),
        case("skipped", _skipped, "all slots -1"),
        case("extremes", _extremes, _EXTREMES, bugs=("B023",)),
        case("strided", partial(_edges, stride=3), "strided pages", bugs=("B031",)),
        case("many", _many),
    ]
    if op == "kv_write":
        found.append(case("no-rope", _no_rope, "no rope"))
    return found


def _gather(draw: Draw, role: Role, id: str, stride: int = 1) -> Arguments:
    size = block_size(id, BLOCK, role)
    cache = pages(draw, role, id, 4, size, page_stride=stride)
    slots = [4 * size - 1, -1, 0, size - 1, size, -1, 2 * size, 3 * size - 1, 17, -7]
    kept = [slot for slot in slots if slot >= 0]
    return {"cache": poisoned(cache, kept), "slots": int32(slots)}


def _gather_table(draw: Draw, role: Role, id: str) -> Arguments:
    size = block_size(id, BLOCK, role)
    cache = pages(draw, role, id, 3, size)
    slots = draw.integers(5, 7, high=3 * size, dtype=torch.int32)
    slots[1, 2:] = -1
    return {"cache": cache, "slots": slots}


def _gather_cases() -> list[OpCase]:
    found = []
    kinds: tuple[tuple[Role, str, Mapping[str, ByteLayout]], ...] = (
        ("latent", "kv", LATENT_LAYOUTS),
        ("index", "index", INDEX_LAYOUTS),
    )
    for role, prefix, known in kinds:
        for id in known:
            variant, requires = f"{prefix}.{id}", frozenset({f"{prefix}:{id}"})
            make = partial(_gather, role=role, id=id)
            for name, made, corners in (
                ("edges", make, {"slot -1", "page edge"}),
                ("strided", partial(make, stride=2), {"strided pages"}),
                ("table", partial(_gather_table, role=role, id=id), set()),
            ):
                found.append(
                    OpCase("gather_kv", variant, name, made, frozenset(corners), requires, True)
                )
    return found


def _to_slots(draw: Draw, size: int, rows: int, k: int, columns: int) -> Arguments:
    table = draw.permutation(3 * columns).view(3, columns).to(torch.int32) + 5
    positions = draw.integers(rows, k, high=columns * size, dtype=torch.int32)
    positions[0, : min(k, 4)] = int32([0, size - 1, size, columns * size - 1])[:k]
    positions[1, k // 2 :] = -1
    positions[2] = -1
    requests = draw.integers(rows, high=3)
    return {
        "positions": positions,
        "block_table": table,
        "row_request": requests,
        "block_size": size,
    }


def _far_slots(draw: Draw) -> Arguments:
    """Slots near the largest int32."""
    table = torch.tensor([[2**31 // 64 - 1, 0], [2**25 - 1, 7]], dtype=torch.int32)
    positions = torch.tensor([[63, 64, -1], [0, 62, 127]], dtype=torch.int32)
    return {
        "positions": positions,
        "block_table": table,
        "row_request": torch.tensor([1, 0]),
        "block_size": 64,
    }


def _to_slots_cases() -> list[OpCase]:
    corners = frozenset({"-1", "page edge", "all -1"})
    made = [
        (
            f"block{size}",
            partial(_to_slots, size=size, rows=5, k=k, columns=4),
            corners,
            {"max_topk": k},
        )
        for size, k in ((1, 4), (16, 7), (61, 33), (64, 64))
    ]
    cases = [
        OpCase("to_slots", "int32", name, make, words, small=True, limits=limits)
        for name, make, words, limits in made
    ]
    long = partial(_to_slots, size=64, rows=9, k=2048, columns=40)
    cases.append(OpCase("to_slots", "int32", "k2048", long, corners, limits={"max_topk": 2048}))
    cases.append(OpCase("to_slots", "int32", "far", _far_slots, small=True))
    return cases


def cases() -> list[OpCase]:
    writes = [
        case
        for op in ("kv_write", "indexer_write")
        for variant in variants(_role(op))
        for case in _write_cases(op, variant)
    ]
    return [*writes, *_gather_cases(), *_to_slots_cases()]
