"""Where a token's values lie in a page: views of a cache array, indexed by page and token.

The functions here call methods of the arrays only, so that no array library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ml4core.api.layouts import KVField, KVLayout, KVPart

if TYPE_CHECKING:
    from torch import Tensor

_VALUE_BITS = {
    **{"e2m1": 4, "e4m3fn": 8, "e4m3fnuz": 8, "ue8m0": 8, "ue8m0x4": 32},
    **{"bfloat16": 16, "float32": 32},
}
_PART_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4, "uint32": 4}

TILE = 16
"""Tokens, and bytes, of a tile in the order ``tiled16``."""


def field_slice(part: KVPart, field: KVField) -> slice:
    """Where a field lies among a token's ``[part width]`` values of the part's dtype."""
    if field.dtype not in _VALUE_BITS:
        known = ", ".join(_VALUE_BITS)
        raise ValueError(f"field {field.name!r} has dtype {field.dtype!r}; known: {known}")
    unit = _PART_BYTES[part.dtype]
    start, size = field.offset, -(-field.count * _VALUE_BITS[field.dtype] // 8)
    if start % unit or size % unit:
        raise ValueError(
            f"field {field.name!r} takes bytes {start}..{start + size}, which do not fall on the "
            f"{unit}-byte values of part {part.name!r}"
        )
    return slice(start // unit, (start + size) // unit)


def part_fields(layout: KVLayout, index: int) -> tuple[KVField, ...]:
    """The fields of part ``index`` in order of offset."""
    mine = (field for field in layout.fields if field.part == index)
    return tuple(sorted(mine, key=lambda field: field.offset))


def token_views(
    layout: KVLayout, index: int, array: Tensor, block_size: int
) -> Sequence[tuple[slice, Tensor]]:
    """Views of part ``index``, which together hold each value of a token once.

    ``array`` is ``[blocks, ...]`` as ``KVPart.shape`` says; pages may be strided. Each entry is the
    slice of the token's values and a writable view, either ``[blocks, block_size, n]``, or, where
    values lie in tiles, ``[blocks, block_size / 16, 16, n / 16, 16]``.
    """
    part = layout.parts[index]
    if part.order == "row":
        return ((slice(0, part.width), array),)
    if part.order == "lanes":
        return ((slice(0, part.width), array.transpose(1, 2)),)
    views = []
    for field in part_fields(layout, index):
        where = field_slice(part, field)
        size = where.stop - where.start
        region = array[:, block_size * where.start : block_size * where.stop]
        # Scales stay in linear order in either layout: only FP8 values are tiled.
        if part.order == "tiled16" and field.dtype in ("e4m3fn", "e4m3fnuz"):
            tiles = region.view(-1, block_size // TILE, size // TILE, TILE, TILE)
            views.append((where, tiles.transpose(2, 3)))
        else:
            views.append((where, region.view(-1, block_size, size)))
    return views


def page_tokens(layout: KVLayout, index: int, array: Tensor, block_size: int) -> Tensor:
    """All tokens ``[blocks, block_size, part width]`` of part ``index``; may be a view."""
    views = token_views(layout, index, array, block_size)
    tokens = [v if v.dim() == 3 else v.flatten(3).flatten(1, 2) for _, v in views]
    if len(tokens) == 1:
        return tokens[0]
    joined = array.new_empty((*tokens[0].shape[:2], layout.parts[index].width))
    for (where, _), values in zip(views, tokens, strict=True):
        joined[..., where] = values
    return joined
