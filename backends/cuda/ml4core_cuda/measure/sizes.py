"""Sizes of launches that are worth a try, as data: what a search goes through."""

from __future__ import annotations

from itertools import product

Sizes = dict[str, int]


def grid(**values: tuple[int, ...]) -> tuple[Sizes, ...]:
    """Every combination."""
    names = list(values)
    return tuple(dict(zip(names, each, strict=True)) for each in product(*values.values()))


_MANY_HEADS = ((64, 1, 1), (64, 0, 1), (64, 1, 0), (32, 1, 1), (32, 0, 1))
"""Keys of a tile, whether they are decoded in integers, and asked for ahead."""
_FEW_HEADS = ((128, 1, 1), (128, 0, 1), (128, 0, 0))
"""The same for up to 32 heads, of which the kernel has no other tile."""
_BY_SLOTS = (
    *((16, 16, 4, 1), (16, 32, 4, 1), (16, 32, 8, 1), (16, 64, 8, 1), (16, 128, 8, 1)),
    *((32, 32, 4, 1), (32, 32, 8, 1), (32, 64, 8, 1), (64, 32, 8, 1), (64, 64, 8, 1)),
)
"""Heads, keys, warps and stages of the form that serves all rows."""


def sparse_mla(rows: int, heads: int, keys: int, units: int = 132) -> tuple[Sizes, ...]:
    """Tiles of each form, and splits for a half, one and two programs a multiprocessor."""
    tile = 64 if heads > 32 else max(16, heads)
    found: dict[tuple[int, ...], Sizes] = {}
    for block, integers, fetch in _MANY_HEADS if heads > 32 else _FEW_HEADS:
        for wave in (0.5, 1):
            splits = _splits(rows * -(-heads // tile), keys, block, wave, units)
            sizes = dict(heads=tile, keys=block, splits=splits, warps=8, stages=1, form=1)
            sizes |= dict(integers=integers, fetch=fetch)
            found[tuple(sizes.values())] = sizes
    for wave in (0.5, 1):
        splits = _splits(rows * -(-heads // tile), keys, 64, wave, units)
        sizes = dict(heads=64 if heads > 32 else max(8, heads), keys=64, splits=splits)
        sizes |= dict(warps=8, stages=1, form=2)
        found[tuple(sizes.values())] = sizes
    for tile, block, warps, stages in _BY_SLOTS:
        if tile > 16 and tile > heads:
            continue
        for wave in (1, 2, 3):
            splits = _splits(rows * -(-heads // tile), keys, block, wave, units)
            sizes = dict(heads=tile, keys=block, splits=splits, warps=warps, stages=stages, form=0)
            found[tuple(sizes.values())] = sizes
    return tuple(found.values())


def _splits(programs: int, keys: int, block: int, wave: float, units: int) -> int:
    return max(1, min(-(-keys // block), int(wave * units) // programs))


WINDOW_MLA = tuple(
    dict(queries=q, keys=k, waves=v, warps=w, stages=s)
    for q, k, w, s in (
        (16, 32, 4, 2),
        (16, 64, 8, 2),
        (32, 32, 8, 1),
        (32, 64, 8, 1),
        (64, 16, 8, 2),
        (64, 32, 8, 2),
        (64, 64, 8, 2),
    )
    for v in (1, 2)
)
INDEXER_LOGITS = (
    *(
        dict(keys=64, columns=256, waves=v, warps=w, stages=1, paged=1)
        for w in (4, 8)
        for v in (1, 2, 4, 6, 10)
    ),
    *(
        dict(keys=k, columns=256, waves=v, warps=w, stages=3, paged=0)
        for k, w in ((128, 4), (128, 8))
        for v in (2, 4)
    ),
)


def topk(rows: int, columns: int) -> tuple[Sizes, ...]:
    """Programs a row of the spread form, with warps of its second and third launch; parts of a row
    for the sieve; the tournament is a candidate beside them.
    """
    most = min(128, columns // 512, 528 // rows)
    spread = tuple(
        dict(sieve=1, parts=p, warps=w, ends=e)
        for p in [1 << n for n in range(1, 8) if 1 << n <= most][-3:]
        for w, e in ((4, 8), (8, 8), (8, 16), (16, 16))
    )
    parts = (1, 4) if columns <= 1 << 16 else (1, 16)
    sieve = tuple(
        dict(sieve=1, parts=0, entries=max(1 << 13, columns // p), warps=w)
        for p in parts
        if p == 1 or rows * p <= 264
        for w in (8, 16)
    )
    found = {tuple(one.items()): one for one in (*spread, *sieve)}
    return (*found.values(), dict(sieve=0, first=16384, part=4096, each=1024))


GEMM_ROW = tuple(
    dict(columns=c, block=b, warps=4, stages=s)
    for c, b in ((4, 2048), (8, 512), (8, 1024), (8, 2048), (16, 512), (16, 1024), (32, 512))
    for s in (1, 3, 4)
)
"""A thread holds 8 columns of some rows, so that a block of 1,024 fills four warps."""
MOE_ROW = GEMM_ROW


def gemm_tile(rows: int) -> tuple[Sizes, ...]:
    """Of a few rows, and of as many as fill the matrix units."""
    if rows <= 64:
        many = max(16, rows)
        return tuple(
            dict(columns=c, rows=many, parts=p, warps=w, stages=s)
            for c, w in ((64, 4), (128, 4), (128, 8))
            for p in (1, 2, 4, 8)
            for s in (3, 5)
        )
    return tuple(
        dict(columns=c, rows=r, parts=1, warps=w, stages=s)
        for c, r, w in ((128, 128, 8), (128, 256, 8), (128, 64, 4), (64, 128, 4), (128, 128, 4))
        for s in (3, 4)
    )


def gemm_many(codes: bool) -> tuple[Sizes, ...]:
    """Of ``many_rows``: two tiles of the weight against one of codes, or the other way about."""
    shapes = ((128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 8, 4), (64, 128, 4, 2))
    if not codes:
        shapes = ((128, 128, 8, 2), (64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 4, 3))
    return tuple(
        dict(rows=r, columns=c, group=g, warps=w, stages=s)
        for r, c, w, s in shapes
        for g in (4, 8, 16)
    )


MOE_FP4 = tuple(
    dict(columns=c, chunks=k, warps=w, registers=r)
    for c, k, w, r in (
        *((16, 1, 2, 0), (16, 1, 4, 0), (16, 1, 8, 0), (16, 1, 8, 80), (16, 1, 16, 64)),
        *((16, 2, 2, 0), (16, 2, 4, 0), (16, 2, 8, 80), (32, 1, 1, 0), (32, 1, 2, 0)),
        *((32, 1, 2, 96), (32, 1, 4, 0), (32, 1, 4, 104), (32, 1, 8, 0), (32, 1, 8, 128)),
        *((32, 2, 2, 0), (32, 2, 4, 0), (64, 1, 1, 0), (64, 1, 2, 0), (64, 1, 4, 0)),
    )
)

FP4_TURNS = tuple(
    dict(columns=c, warps=w, chunks=k, stages=s)
    for c, w, k, s in (
        *((32, 2, 2, 3), (32, 2, 2, 2), (32, 2, 1, 4), (32, 2, 4, 2), (32, 4, 2, 2)),
        *((32, 4, 1, 4), (32, 1, 4, 2), (64, 2, 2, 2), (64, 2, 1, 3), (16, 2, 4, 3)),
    )
)


MOE_MANY = tuple(
    dict(columns=c, rows=r, warps=w, stages=s)
    for c, r, w, s in (
        *((128, 128, 8, 3), (128, 128, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4)),
        *((128, 64, 4, 2), (128, 64, 4, 3)),
    )
)
"""Of ``many_experts``."""


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
