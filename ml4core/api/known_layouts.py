"""The open cache layouts, by id.

Latent rows are ``latent`` values, then ``rope`` values. At 512 and 64:

    fp8_ds_mla   656 B   512 e4m3fn; 4 float32 scales, one for 128 values each; 64 bfloat16
    e4m3         576 B   576 e4m3fn, one scale for the whole cache
    e4m3fnuz     576 B   576 e4m3fnuz, one scale for the whole cache
    bf16       1,152 B   576 bfloat16
    fp32       2,304 B   576 float32
    nvfp4_ds_mla 352 B   512 e2m1, two a byte; 64 e4m3fn; 32 e4m3fn scales, one for 16 latent values
                         each: group s has its scale at byte 8 (s % 4) + s // 4 of them

Index keys, at 128 values:

    planar_f32       132 B   e4m3fn of the whole page, then a float32 scale for each token
    planar_ue8m0x4   132 B   the same, the scale as four equal E8M0 bytes
    tiled16_f32      132 B   as planar_f32, the values in tiles of 16 tokens x 16 bytes
    lane33_ue8m0     132 B   128 e4m3fn, an E8M0 scale, 3 bytes of zero; byte 0 of every token of
                             the page, then byte 1, and so on: [33, 4, block size]
    fp32             512 B   128 float32
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from ml4core.api.layouts import KVField, KVLayout, KVPart
from ml4core.api.pages import TILE, page_tokens, token_views

if TYPE_CHECKING:
    from torch import Tensor

    from ml4core.api.row_codecs import RowCodec

LATENT_IDS = ("fp8_ds_mla", "e4m3", "e4m3fnuz", "bf16", "fp32", "nvfp4_ds_mla")
INDEX_IDS = ("planar_f32", "planar_ue8m0x4", "tiled16_f32", "lane33_ue8m0", "fp32")

PER_TENSOR = "one per-tensor scale"
"""``scale_rule`` of the layouts that read ``KVCache.scale``."""

_SCALED = 128  # values that a scale of fp8_ds_mla serves
_PERMUTED = 64  # latent values, four scales of nvfp4_ds_mla, that lie a quarter of all apart
_ANY_WIDTH = ("e4m3", "e4m3fnuz", "bf16", "fp32")


@cache
def latent_layout(id: str, latent: int = 512, rope: int = 64) -> KVLayout:
    """The layout of latent rows called ``id``. Equal arguments give the same object.

    Raises ``ValueError`` for an unknown id, for ``fp8_ds_mla`` of a latent that is not a multiple
    of 128, and for ``nvfp4_ds_mla`` of one that is not a multiple of 64.
    """
    if id not in LATENT_IDS:
        raise ValueError(f"unknown latent layout {id!r}; known: {', '.join(LATENT_IDS)}")
    width = latent + rope
    if id == "fp8_ds_mla":
        if latent % _SCALED:
            raise ValueError(
                f"fp8_ds_mla keeps a scale for {_SCALED} values, and a latent of {latent} is not "
                f"a multiple of that; layouts that hold it: {', '.join(_ANY_WIDTH)}"
            )
        scales = latent // _SCALED
        return _layout(
            id,
            "latent",
            width,
            KVPart("rows", "uint8", latent + 4 * scales + 2 * rope),
            (
                KVField("latent", 0, "e4m3fn", 0, latent),
                KVField("scale", 0, "float32", latent, scales),
                KVField("rope", 0, "bfloat16", latent + 4 * scales, rope),
            ),
            lambda: _codecs().ds_mla(latent),
            fp8="e4m3fn",
            scale_rule="2**ceil(log2(max(amax / 448, 1e-4))) of 128 values",
        )
    if id == "nvfp4_ds_mla":
        if latent % _PERMUTED:
            raise ValueError(
                f"nvfp4_ds_mla permutes the scales of {_PERMUTED} values, and a latent of {latent} "
                f"is not a multiple of that; layouts that hold it: {', '.join(_ANY_WIDTH)}"
            )
        codes, scales = latent // 2, latent // 16
        return _layout(
            id,
            "latent",
            width,
            KVPart("rows", "uint8", codes + rope + scales),
            (
                KVField("latent", 0, "e2m1", 0, latent),
                KVField("rope", 0, "e4m3fn", codes, rope),
                KVField("scale", 0, "e4m3fn", codes + rope, scales),
            ),
            lambda: _codecs().nvfp4_ds_mla(latent),
            fp8="e4m3fn",
            scale_rule="the least e4m3fn number not below max(amax / 6, 2**-9) of 16 values",
        )
    if id in ("e4m3", "e4m3fnuz"):
        flavour: Literal["e4m3fn", "e4m3fnuz"] = "e4m3fn" if id == "e4m3" else "e4m3fnuz"
        return _layout(
            id,
            "latent",
            width,
            KVPart("rows", "uint8", width),
            (
                KVField("latent", 0, flavour, 0, latent),
                KVField("rope", 0, flavour, latent, rope),
            ),
            lambda: _codecs().per_tensor(flavour),
            fp8=flavour,
            scale_rule=PER_TENSOR,
        )
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if id == "bf16" else "float32"
    size = 2 if id == "bf16" else 4
    return _layout(
        id,
        "latent",
        width,
        KVPart("rows", dtype, width),
        (
            KVField("latent", 0, dtype, 0, latent),
            KVField("rope", 0, dtype, size * latent, rope),
        ),
        lambda: _codecs().wide(dtype),
    )


@cache
def index_layout(id: str, head_dim: int = 128) -> KVLayout:
    """The layout of index keys called ``id``. Equal arguments give the same object.

    Raises ``ValueError`` for an unknown id, and for ``tiled16_f32`` of a ``head_dim`` that is not a
    multiple of 16.
    """
    if id not in INDEX_IDS:
        raise ValueError(f"unknown index layout {id!r}; known: {', '.join(INDEX_IDS)}")
    if id == "fp32":
        return _layout(
            id,
            "index",
            head_dim,
            KVPart("keys", "float32", head_dim),
            (KVField("key", 0, "float32", 0, head_dim),),
            lambda: _codecs().wide("float32"),
        )
    tiled = id == "tiled16_f32"
    if tiled and head_dim % TILE:
        raise ValueError(f"{id} needs a head_dim that is a multiple of {TILE}, got {head_dim}")
    form = {"planar_ue8m0x4": "ue8m0x4", "lane33_ue8m0": "ue8m0"}.get(id, "f32")
    order: Literal["planar", "tiled16", "lanes"] = "tiled16" if tiled else "planar"
    if id == "lane33_ue8m0":
        order = "lanes"
    return _layout(
        id,
        "index",
        head_dim,
        KVPart("keys", "uint8", head_dim + 4, order),
        (
            KVField("key", 0, "e4m3fn", 0, head_dim),
            KVField("scale", 0, "float32" if form == "f32" else form, head_dim, 1),
        ),
        lambda: _codecs().index_key(form),
        fp8="e4m3fn",
        scale_rule="2**ceil(log2(max(amax, 1e-4) / 448)) of a key",
        block_multiple=TILE if tiled else 1,
    )


def _codecs() -> Any:
    # Sizes and names are wanted where there is no torch, so it is loaded when rows are touched.
    from ml4core.api import row_codecs

    return row_codecs


def _layout(
    id: str,
    role: Literal["latent", "index"],
    width: int,
    part: KVPart,
    fields: tuple[KVField, ...],
    codec: Callable[[], RowCodec],
    **more: Any,
) -> KVLayout:
    """A layout of one part. A field without values, as rope may be, is left out."""
    fields = tuple(field for field in fields if field.count)

    def encode(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        if rows.shape[-1] != width:
            raise ValueError(
                f"a row of layout {id!r} has {width} values, got {rows.shape[-1]} in shape "
                f"{list(rows.shape)}"
            )
        return (codec().encode(rows, scale),)

    def decode(tokens: tuple[Tensor, ...], scale: Tensor | None) -> Tensor:
        return codec().decode(tokens[0], scale)

    def pack(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        blocks, block_size = rows.shape[:2]
        layout.check_block_size(block_size)
        (tokens,) = encode(rows, scale)
        array = tokens.new_empty(part.shape(blocks, block_size))
        for where, view in token_views(layout, 0, array, block_size):
            view.copy_(tokens[..., where].reshape(view.shape))
        return (array,)

    def unpack(arrays: tuple[Tensor, ...], scale: Tensor | None) -> Tensor:
        (array,) = arrays
        block_size = array[0].numel() // part.width
        # A copy, since unquantised tokens are their own rows.
        return decode((page_tokens(layout, 0, array, block_size).clone(),), scale)

    layout = KVLayout(
        id, role, width, (part,), fields, pack, unpack, encode=encode, decode=decode, **more
    )
    return layout
