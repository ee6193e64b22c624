"""The cache layouts of TPUs. Their arrays are made of whole tiles of 4 x 128 bytes, one 32-bit word
deep, which is what a copy can move from anywhere in a page.

    x-ml4core-tpu/tiles_e4m3    640 B a token at 512 and 64
        latent  uint8 [pages, page, 512]: a token is one tile [4, 128] of E4M3
        rope    uint8 [pages, page, 128]: 64 E4M3, 64 zeros; four tokens are one tile
    x-ml4core-tpu/tiles_nope    512 B: the same without rope, for layers that have none

Values of latent and rope are the number over the cache's one scale. Index keys lie in the open
layout lane33_ue8m0, whose bytes uint8 [pages, 132, page] are [33, 4, page] in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ml4core.api import KVField, KVLayout, KVPart
from ml4core.api.known_layouts import PER_TENSOR, index_layout

if TYPE_CHECKING:
    from torch import Tensor

    from ml4core.api import LayerSpec, ModelSpec

TILES = "x-ml4core-tpu/tiles_e4m3"
TILES_NOPE = "x-ml4core-tpu/tiles_nope"
LANE33 = "lane33_ue8m0"

LANES = 128
TOGETHER = 4
"""Tokens whose rope parts share a tile."""
LATENT, ROPE = 512, 64
"""Published widths, for deployments without a model."""

Codec = Callable[["Tensor", "Tensor | None"], "tuple[Tensor, ...]"]


@cache
def tiles_layout(latent: int = 512, rope: int = 64) -> KVLayout:
    """Latent rows in tiles; ``tiles_nope`` where ``rope`` is 0. Equal arguments give the same
    object. ``ValueError`` for widths that no tile holds.
    """
    if not fits_tiles(latent, rope):
        raise ValueError(
            f"tiles hold latents of a multiple of {LANES} values and rope parts of {LANES} at "
            f"most, not {latent} and {rope}"
        )

    def encode(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        from ml4core.formats import kv_rows

        _check_width(rows, latent + rope)
        code = kv_rows.encode_e4m3(rows, 1.0 if scale is None else scale, "e4m3fn")
        if not rope:
            return (code,)
        tail = code.new_zeros(*code.shape[:-1], LANES)
        tail[..., :rope] = code[..., latent:]
        return code[..., :latent].contiguous(), tail

    def decode(tokens: tuple[Tensor, ...], scale: Tensor | None) -> Tensor:
        import torch

        from ml4core.formats import kv_rows

        code = tokens[0]
        if rope:
            code = torch.cat((code, tokens[1][..., :rope]), -1)
        return kv_rows.decode_e4m3(code, 1.0 if scale is None else scale, "e4m3fn")

    def pack(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        layout.check_block_size(rows.shape[1])
        return encode(rows, scale)

    parts = (KVPart("latent", "uint8", latent), KVPart("rope", "uint8", LANES))
    fields = (KVField("latent", 0, "e4m3fn", 0, latent), KVField("rope", 1, "e4m3fn", 0, rope))
    layout = KVLayout(
        TILES if rope else TILES_NOPE,
        "latent",
        latent + rope,
        parts if rope else parts[:1],
        fields if rope else fields[:1],
        pack,
        decode,
        fp8="e4m3fn",
        scale_rule=PER_TENSOR,
        block_multiple=TOGETHER,
        encode=encode,
        decode=decode,
    )
    return layout


def lane33_layout() -> KVLayout:
    """Index keys of 128 values along the lanes. Each call gives the same object."""
    return index_layout(LANE33)


def fits_tiles(latent: int, rope: int) -> bool:
    """Whether tiles hold rows of these widths."""
    return latent >= LANES and latent % LANES == 0 and 0 <= rope <= LANES


def widths_of(model: ModelSpec | None) -> tuple[int, int]:
    """Latent and largest rope width of a model's rows; the published ones where it has no layer."""
    if model is None or not model.layers:
        return LATENT, ROPE
    return model.layers[0].kv_lora_rank, max(layer.rope_dim for layer in model.layers)


def layouts_for(model: ModelSpec | None) -> Mapping[str, KVLayout]:
    """The private layouts by id at the model's widths; none of latents that no tile holds."""
    latent, rope = widths_of(model)
    if not fits_tiles(latent, rope):
        return MappingProxyType({})
    return MappingProxyType(
        {TILES: tiles_layout(latent, rope or ROPE), TILES_NOPE: tiles_layout(latent, 0)}
    )


def layer_bytes(layer: LayerSpec, page: Literal["latent", "index"]) -> int:
    """Bytes a token of what a layer owns: its latent in tiles, without the rope tile where the
    layer has no rope, or its index keys. 0 where it owns none.
    """
    if page == "latent":
        if not layer.owns_kv:
            return 0
        return tiles_layout(layer.kv_lora_rank, layer.rope_dim).bytes_per_token
    return lane33_layout().bytes_per_token if layer.owns_index else 0


def _check_width(rows: Tensor, width: int) -> None:
    if rows.shape[-1] != width:
        raise ValueError(f"a row has {width} values, got {rows.shape[-1]} in {list(rows.shape)}")
