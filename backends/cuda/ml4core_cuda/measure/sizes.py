"""Sizes of launches that are worth a try, as data: what a search goes through."""

from __future__ import annotations

from itertools import product

Sizes = dict[str, int]


def grid(**values: tuple[int, ...]) -> tuple[Sizes, ...]:
    """Every combination."""
    names = list(values)
    return tuple(dict(zip(names, each, strict=True)) for each in product(*values.values()))


_SPARSE = (
    (16, 32, 4, 2),
    (16, 64, 4, 2),
    (16, 64, 8, 2),
    (16, 128, 8, 1),
    (32, 32, 8, 1),
    (32, 64, 8, 1),
    (64, 32, 8, 2),
    (64, 64, 8, 2),
    (64, 64, 8, 1),
)
"""Heads, keys, warps and stages."""


def sparse_mla(rows: int, heads: int, keys: int, units: int = 132) -> tuple[Sizes, ...]:
    """Tiles, and splits for a half, one, two and three programs a multiprocessor."""
    found: dict[tuple[int, ...], Sizes] = {}
    for tile, block, warps, stages in _SPARSE:
        if tile > 16 and tile > heads:
            continue
        programs = rows * -(-heads // tile)
        for waves in (0.5, 1, 2, 3):
            splits = max(1, min(-(-keys // block), int(waves * units) // programs))
            sizes = dict(heads=tile, keys=block, splits=splits, warps=warps, stages=stages)
            found[tuple(sizes.values())] = sizes
    return tuple(found.values())


WINDOW_MLA = tuple(
    dict(queries=q, keys=k, waves=v, warps=w, stages=s)
    for q, k, w, s in (
        (16, 32, 4, 2),
        (16, 64, 8, 2),
        (32, 32, 8, 1),
        (32, 64, 8, 1),
        (64, 16, 8, 2),
    )
    for v in (1, 2)
)
INDEXER_LOGITS = tuple(
    dict(keys=k, columns=256, waves=v, warps=w, stages=s)
    for k, w in ((64, 4), (128, 4), (128, 8), (256, 8))
    for v in (1, 2, 4)
    for s in (1, 3, 4)
)
TOPK = (
    *(
        dict(first=f, part=p, each=e)
        for f in (8192, 16384)
        for p in (2048, 4096)
        for e in (512, 1024)
    ),
    dict(first=16384, part=8192, each=512),
    dict(first=32768, part=4096, each=1024),
)
GEMM_ROW = tuple(
    dict(columns=c, block=b, warps=w, stages=s)
    for c, b, w in (
        *((4, 1024, 4), (4, 2048, 4), (8, 512, 4), (8, 1024, 4)),
        *((16, 256, 4), (16, 512, 4), (16, 512, 8), (32, 256, 4)),
    )
    for s in (2, 4)
)
MOE_ROW = GEMM_ROW
EXPERT_ROWS = tuple(
    dict(columns=c, block=b, warps=w, stages=s)
    for c, b, w in (
        *((4, 256, 4), (4, 512, 4), (8, 256, 4), (8, 512, 4)),
        *((16, 256, 4), (16, 128, 4), (8, 256, 2), (32, 256, 8)),
    )
    for s in (3, 5)
)


def gemm_tile(rows: int) -> tuple[Sizes, ...]:
    """Of a few rows, and of as many as fill the matrix units."""
    if rows <= 64:
        many = max(16, rows)
        return tuple(
            dict(columns=c, rows=many, parts=p, warps=w, stages=s)
            for c, w in ((64, 4), (128, 8))
            for p in (1, 2, 4, 8)
            for s in (3, 4)
        )
    return tuple(
        dict(columns=c, rows=r, parts=1, warps=w, stages=s)
        for c, r, w in ((128, 128, 8), (128, 256, 8), (128, 64, 4), (64, 128, 4), (128, 128, 4))
        for s in (3, 4)
    )


def moe(rows: int, topk: int = 4, experts: int = 128) -> tuple[Sizes, ...]:
    """``rows`` of a tile about the rows of an expert."""
    mean = -(-rows * topk // experts)
    tiles = (16,) if mean <= 4 else ((16, 32) if mean <= 16 else (64, 128))
    return tuple(
        dict(columns=c, rows=r, warps=w, stages=s)
        for r in tiles
        for c, w in ((32, 4), (64, 4), (128, 4), (128, 8))
        for s in (2, 3, 4)
        if c * r <= 128 * 128
    )


def attn_inputs(rows: int) -> tuple[Sizes, ...]:
    if rows == 1:
        return tuple({**one, "parts": 1} for one in GEMM_ROW)
    return tuple(
        dict(columns=c, block=128, parts=p, warps=w, stages=s)
        for c, w in ((64, 4), (128, 4), (128, 8))
        for p in (1, 2, 4)
        for s in (3, 4)
    )
