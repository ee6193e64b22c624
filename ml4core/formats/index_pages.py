"""Bytes of a page of the index-key cache.

A page holds `block_size` tokens, each with 128 E4M3 values and a scale of 4 bytes. The values of
all tokens come first, then the scales of all tokens, one token after the other but for `lanes`.

Order of the values:
planar    token b, value d at b * 128 + d.
tiled16   tiles of 16 tokens x 16 values, [block_size / 16][128 / 16][16 tokens][16 values].
lanes     value d at d * block_size + b: each byte of all tokens in turn; the scales' bytes too.

Form of a scale:
f32       float32, little endian.
ue8m0x4   four equal E8M0 bytes.
ue8m0     one E8M0 byte and three zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.formats import e8m0
from ml4core.formats.blocks import check_multiple

VALUES = 128
SCALE_BYTES = 4
TOKEN_BYTES = VALUES + SCALE_BYTES
TILE = 16

ORDERS = ("planar", "tiled16", "lanes")
SCALE_FORMS = ("f32", "ue8m0x4", "ue8m0")


def page_bytes(block_size: int) -> int:
    """Bytes of a page of `block_size` tokens, without padding."""
    return block_size * TOKEN_BYTES


def value_offsets(block_size: int, order: str, device: torch.device | str | None = None) -> Tensor:
    """Byte offset int64 [block_size, 128] of each value from the start of its page.

    ValueError for an unknown order, or for `tiled16` where `block_size` is not a multiple of 16.
    """
    token = torch.arange(block_size, dtype=torch.int64, device=device).unsqueeze(1)
    value = torch.arange(VALUES, dtype=torch.int64, device=device).unsqueeze(0)
    if order == "planar":
        return token * VALUES + value
    if order == "lanes":
        return value * block_size + token
    if order == "tiled16":
        check_multiple(block_size, TILE, "the block size of a tiled16 page")
        tile = (token // TILE) * (TILE * VALUES) + (value // TILE) * (TILE * TILE)
        return tile + (token % TILE) * TILE + value % TILE
    raise ValueError(f"unknown order {order!r} of an index page; known: {', '.join(ORDERS)}")


def scale_offsets(
    block_size: int, device: torch.device | str | None = None, order: str = "planar"
) -> Tensor:
    """Byte offset int64 [block_size, 4] of each scale byte from the start of its page.

    It is the same in the orders `planar` and `tiled16`.
    """
    byte = torch.arange(block_size * SCALE_BYTES, dtype=torch.int64, device=device)
    if order == "lanes":
        byte = byte.view(SCALE_BYTES, block_size).T
    return (block_size * VALUES + byte).reshape(block_size, SCALE_BYTES)


def encode_scale(scale: Tensor, form: str) -> Tensor:
    """Bytes uint8 [..., 4] of float32 scales [...]. In E8M0 they must be powers of two."""
    if form == "f32":
        return scale.to(torch.float32).unsqueeze(-1).contiguous().view(torch.uint8)
    if form == "ue8m0x4":
        return e8m0.encode(scale).unsqueeze(-1).expand(*scale.shape, SCALE_BYTES).contiguous()
    if form == "ue8m0":
        return F.pad(e8m0.encode(scale).unsqueeze(-1), (0, SCALE_BYTES - 1))
    raise _unknown_form(form)


def decode_scale(stored: Tensor, form: str) -> Tensor:
    """float32 scales [...] of bytes uint8 [..., 4]."""
    if form == "f32":
        # A copy, because a slice of a page need not begin at a multiple of four.
        return stored.clone(memory_format=torch.contiguous_format).view(torch.float32).squeeze(-1)
    if form in ("ue8m0x4", "ue8m0"):
        return e8m0.decode(stored[..., 0])
    raise _unknown_form(form)


def pack_page(code: Tensor, scale: Tensor, order: str, form: str) -> Tensor:
    """Pages uint8 [..., block_size * 132] of tokens.

    `code` is uint8 [..., block_size, 128], `scale` float32 [..., block_size].
    """
    block_size = code.shape[-2]
    values = code.flatten(-2)[..., _inverse(value_offsets(block_size, order, code.device))]
    scales = encode_scale(scale, form)
    if order == "lanes":
        scales = scales.mT
    return torch.cat((values, scales.flatten(-2)), dim=-1)


def unpack_page(page: Tensor, order: str, form: str) -> tuple[Tensor, Tensor]:
    """The tokens of pages uint8 [..., block_size * 132].

    Bytes are uint8 [..., block_size, 128], scales float32 [..., block_size].
    """
    check_multiple(page.shape[-1], TOKEN_BYTES, "the size of an index page in bytes")
    block_size = page.shape[-1] // TOKEN_BYTES
    code = page[..., value_offsets(block_size, order, page.device)]
    return code, decode_scale(page[..., scale_offsets(block_size, page.device, order)], form)


def _inverse(offsets: Tensor) -> Tensor:
    """For each byte of the values, which value of `offsets` [block_size, 128] lies there."""
    return torch.argsort(offsets.flatten())


def _unknown_form(form: str) -> ValueError:
    return ValueError(
        f"unknown scale form {form!r} of an index page; known: {', '.join(SCALE_FORMS)}"
    )
