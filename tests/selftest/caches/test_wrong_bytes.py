"""Wrong layouts and writes die at the family that speaks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import latent_layout
from ml4core.formats import e4m3

from .wrapped import (
    Change,
    Op,
    backend,
    before,
    dies,
    page_off,
)


def _encoded(change: Callable[[Tensor, KVCache], Tensor]) -> Change:
    """A write whose token bytes are changed on the way, for layouts of one row a token."""

    def made(op: Op) -> Op:
        def write(cache: KVCache, slots: Tensor, *rows: Tensor) -> None:
            op(cache, slots, *rows)
            valid = slots[slots >= 0]
            page, offset = valid // cache.block_size, valid % cache.block_size
            cache.parts[0][page, offset] = change(cache.parts[0][page, offset], cache)

        return write

    return made


def _floor_scale(tokens: Tensor, cache: KVCache) -> Tensor:
    """Each scale half as large, codes twice: what overflows saturates."""
    scale = tokens[:, 512:528].contiguous().view(torch.float32)
    values = e4m3.decode(tokens[:, :512], "e4m3fn").unflatten(-1, (4, 128)) * 2
    tokens = tokens.clone()
    tokens[:, :512] = e4m3.encode(values.flatten(1), "e4m3fn")
    tokens[:, 512:528] = (scale / 2).view(torch.uint8)
    return tokens


def _truncated(tokens: Tensor, cache: KVCache) -> Tensor:
    tokens = tokens.clone()
    tokens[:, :512:16] -= (tokens[:, :512:16] & 0x7F > 0).to(torch.uint8)
    return tokens


def _last_slot(op: Op) -> Op:
    """Slot -1 is the last one, as an index of torch would be."""
    return lambda cache, slots, *rows: op(
        cache, torch.where(slots < 0, cache.blocks * cache.block_size - 1, slots), *rows
    )


def _one_byte_more(op: Op) -> Op:
    def write(cache: KVCache, slots: Tensor, *rows: Tensor) -> None:
        op(cache, slots, *rows)
        part = cache.parts[0]
        for slot in slots[slots >= 0].tolist():
            page, offset = divmod(slot, cache.block_size)
            memory = part.as_strided((part.untyped_storage().nbytes(),), (1,), 0)
            end = part.storage_offset() + page * part.stride(0) + (offset + 1) * part.stride(1)
            if end < len(memory):
                memory[end] ^= 1

    return write


def _swap(tokens: Tensor) -> Tensor:
    """Scales in front of the values."""
    return torch.cat((tokens[..., 512:528], tokens[..., :512], tokens[..., 528:]), -1)


def _unswap(tokens: Tensor) -> Tensor:
    return torch.cat((tokens[..., 16:528], tokens[..., :16], tokens[..., 528:]), -1)


def _swapped_reader(op: Op) -> Op:
    return lambda cache, slots: op(replace(cache, parts=(_unswap(cache.parts[0]),)), slots)


KV = "kv/fp8_ds_mla"
WRITE = "kv_write/fp8_ds_mla+bf16"
SWAPPED = {"kv_write": _encoded(lambda t, c: _swap(t)), "gather_kv": _swapped_reader}


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"kv_write": _encoded(_floor_scale)}, f"layout.bytes[{WRITE}]"),
        ({"kv_write": _encoded(_floor_scale)}, f"layout.golden[{KV}]"),
        ({"kv_write": _encoded(_truncated)}, f"layout.bytes[{WRITE}]"),
        ({"kv_write": _last_slot}, f"layout.canary[{WRITE}]"),
        ({"kv_write": _last_slot}, f"layout.canary[{KV}]"),
        ({"kv_write": _one_byte_more}, f"layout.canary[{KV}]"),
        ({"kv_write": _one_byte_more}, f"layout.canary[{WRITE}]"),
        (SWAPPED, f"layout.golden[{KV}]"),
        (SWAPPED, f"layout.cross_read[{KV}]"),
        ({"sparse_mla": before(page_off)}, f"layout.cross_read[{KV}]"),
        (SWAPPED, f"layout.codes[{KV}]"),
    ],
)
def test_wrong_bytes_die(changes: Mapping[str, Change], check: str) -> None:
    dies(backend(changes), check)


def test_the_other_flavour_dies() -> None:
    """B021: bytes of e4m3fn read as e4m3fnuz."""

    def other(op: Op) -> Op:
        return lambda cache, slots: op(replace(cache, layout=latent_layout("e4m3fnuz")), slots)

    dies(backend({"gather_kv": other}), "layout.codes[kv/e4m3]", "codes")


def test_a_page_size_of_its_own_dies() -> None:
    """A reader that takes every page for one of 64 tokens."""

    def fixed(op: Op) -> Op:
        def gather(cache: KVCache, slots: Tensor) -> Tensor:
            if cache.layout.id != "planar_f32" or cache.block_size % 2:
                return op(cache, slots)
            array = cache.parts[0].reshape(2 * cache.blocks, -1)
            half = replace(cache, parts=(array,), block_size=cache.block_size // 2)
            return op(half, slots)

        return gather

    dies(backend({"gather_kv": fixed}), "layout.cross_read[index/planar_f32]", "gather_kv")


def test_a_reader_of_whatever_it_is_given_dies() -> None:
    def blind(op: Op) -> Op:
        return lambda cache, slots: op(replace(cache, layout=latent_layout("e4m3")), slots)

    dies(backend({"gather_kv": blind}), "layout.tag[kv/e4m3]", "gather_kv", "x-another/rows")


def test_a_reader_of_one_flavour_alone_dies() -> None:
    def blind(op: Op) -> Op:
        def gather(cache: KVCache, slots: Tensor) -> Tensor:
            known = cache.layout.id == "e4m3fnuz"
            return op(replace(cache, layout=latent_layout("e4m3")) if known else cache, slots)

        return gather

    dies(backend({"gather_kv": blind}), "layout.tag[kv/e4m3]", "e4m3fnuz")


@pytest.mark.slow
def test_offsets_of_32_bits_die() -> None:
    def narrow(op: Op) -> Op:
        def gather(cache: KVCache, slots: Tensor) -> Tensor:
            far = slots.long() * cache.layout.bytes_per_token
            return op(cache, torch.where(far >= 2**31, slots - 64, slots).to(torch.int32))

        return gather

    dies(backend({"gather_kv": narrow}), f"layout.addresses[{KV}]", "2^31")


def _allocating(change: Callable[[KVCache], KVCache]) -> Any:
    return lambda inner: lambda layout, blocks, size: change(inner.alloc_kv(layout, blocks, size))


def test_wider_rows_die() -> None:
    def wider(cache: KVCache) -> KVCache:
        room = torch.zeros(*cache.parts[0].shape[:2], 704, dtype=torch.uint8)
        return replace(cache, parts=(room,))

    dies(backend(alloc_kv=_allocating(wider)), f"layout.size[{KV}]", "bytes a token")


def test_a_layout_that_packs_otherwise_dies() -> None:
    def other(cache: KVCache) -> KVCache:
        pack = cache.layout.pack
        layout = replace(cache.layout, pack=lambda rows, scale: (pack(rows, scale)[0].flip(1),))
        return replace(cache, layout=layout)

    dies(backend(alloc_kv=_allocating(other)), f"layout.pack[{KV}]", "packed by the layout")
