"""KV cache layouts as data, exact to the byte, and the cache object that carries its layout.

The open layouts are made by ``ml4core.api.known_layouts``; a private one is a ``KVLayout`` of the
plugin's own, with an id ``x-<dist>/<name>``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

_ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float32": 4, "uint32": 4}


@dataclass(frozen=True)
class KVField:
    """A run of equal values inside a token's bytes.

    Attributes:
        part: index of the array it lies in.
        dtype: ``e2m1`` (two values a byte), ``e4m3fn``, ``e4m3fnuz``, ``ue8m0``, ``ue8m0x4``,
            ``float32`` or ``bfloat16``.
        offset: bytes. In a ``row`` or ``lanes`` part from the start of the token; in a ``planar``
            or ``tiled16`` part the field's region starts at ``block_size * offset`` of the page.
        count: values a token.
    """

    name: str
    part: int
    dtype: str
    offset: int
    count: int


@dataclass(frozen=True)
class KVPart:
    """One array of a layout.

    - ``row``: ``[blocks, block_size, width]``, a token's values together.
    - ``planar``: ``[blocks, block_size * width]`` uint8: each field of the whole page in turn.
    - ``tiled16``: as planar, with the values in tiles of 16 tokens x 16 bytes.
    - ``lanes``: ``[blocks, width, block_size]``, the first value of every token, then the second.
    """

    name: str
    dtype: Literal["uint8", "bfloat16", "float32", "uint32"]
    width: int
    order: Literal["row", "planar", "tiled16", "lanes"] = "row"

    @property
    def bytes_per_token(self) -> int:
        return self.width * _ITEMSIZE[self.dtype]

    def shape(self, blocks: int, block_size: int) -> tuple[int, ...]:
        if self.order == "row":
            return (blocks, block_size, self.width)
        if self.order == "lanes":
            return (blocks, self.width, block_size)
        return (blocks, block_size * self.width)


@dataclass(frozen=True)
class KVLayout:
    """How a group's rows lie in memory.

    Attributes:
        id: the name that travels with each cache; readers compare it.
        role: ``latent`` (canonical row: latent, then rope) or ``index`` (canonical row: the key).
        width: values of a canonical row.
        fp8: the E4M3 flavour, None without FP8.
        scale_rule: how scales come about, in words.
        block_multiple: what ``block_size`` must be a multiple of.
        pack: ``(rows [blocks, block_size, width] float, scale) -> arrays``, quantising.
        unpack: ``(arrays, scale) -> rows [blocks, block_size, width] fp32``.
            ``scale`` is the cache's per-tensor scale ([1] fp32) or None.
        encode: ``(rows [..., width] float, scale) -> tokens [..., part width]`` of each part, a
            token's fields in order of offset whatever the part's order. The composed ops write and
            read single rows by it and by ``decode``; they refuse a layout without.
        decode: ``(tokens, scale) -> rows [..., width] fp32``.
    """

    id: str
    role: Literal["latent", "index"]
    width: int
    parts: tuple[KVPart, ...]
    fields: tuple[KVField, ...]
    pack: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
    unpack: Callable[[tuple[Tensor, ...], Tensor | None], Tensor]
    fp8: Literal["e4m3fn", "e4m3fnuz"] | None = None
    scale_rule: str = ""
    block_multiple: int = 1
    encode: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]] | None = None
    decode: Callable[[tuple[Tensor, ...], Tensor | None], Tensor] | None = None

    @property
    def bytes_per_token(self) -> int:
        return sum(part.bytes_per_token for part in self.parts)

    def check_block_size(self, block_size: int) -> None:
        """Raises ``ValueError`` if pages of this size can't be laid out."""
        if block_size < 1 or block_size % self.block_multiple:
            raise ValueError(
                f"layout {self.id!r} needs a block size that is a multiple of "
                f"{self.block_multiple}, got {block_size}"
            )


@dataclass(frozen=True)
class KVCache:
    """A paged cache of one layer: arrays, and the layout that says how to read them.

    Attributes:
        parts: one array for each part of the layout; dimension 0 is the page and may be strided.
        scale: [1] fp32 per-tensor scale, for layouts that have one.
    """

    layout: KVLayout
    block_size: int
    parts: tuple[Tensor, ...]
    scale: Tensor | None = None

    @property
    def blocks(self) -> int:
        return int(self.parts[0].shape[0])

    @property
    def nbytes(self) -> int:
        return sum(prod(part.shape) * part.element_size() for part in self.parts)

    def require(self, *layout_ids: str) -> None:
        """Raises ``ValueError`` unless the layout is one of these. Each reader and writer calls
        it.
        """
        if self.layout.id not in layout_ids:
            raise ValueError(
                f"this reader knows the cache layouts {', '.join(layout_ids)}; the cache is "
                f"{self.layout.id!r}"
            )
