"""Cache layouts that are written, read or declared wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, KVLayout
from ml4core.api.known_layouts import INDEX_IDS, LATENT_IDS, index_layout, latent_layout
from ml4core.formats import e4m3
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import After, AlteredSession, Change, Changed, Op, Ops

_VALUES, _TILES = 512, 4
"""E4M3 values of a row of fp8_ds_mla, and their scales."""
_SHIFT = 16


def mutants() -> list[Mutant]:
    changes: Sequence[tuple[str, str, Change, tuple[str, ...]]] = (
        (
            "last-byte-wrong",
            "The last byte of a written row has another last bit.",
            Ops(kv_write=Written(last_byte_wrong)),
            ("layout.bytes[kv_write/*]", "layout.golden[kv/*]"),
        ),
        (
            "scale-rounded-down",
            "The scale of 128 values is the next smaller power of two, and large values saturate.",
            Ops(kv_write=Written(scale_rounded_down)),
            ("layout.bytes[kv_write/fp8_ds_mla*]", "layout.golden[kv/fp8_ds_mla]"),
        ),
        (
            "one-byte-more",
            "A write goes on for one byte behind its row.",
            Ops(kv_write=one_byte_more),
            ("layout.canary[kv/*]", "layout.canary[kv_write/*]"),
        ),
        (
            "last-slot-written",
            "Slot -1 is the last one of the cache.",
            Ops(kv_write=last_slot, indexer_write=last_slot),
            ("layout.canary[kv/*]", "layout.canary[indexer_write/*]"),
        ),
        (
            "own-byte-order",
            "Rows begin with their last bytes, for its writer and its readers alike.",
            Ops(
                kv_write=Written(turned),
                gather_kv=ReadTurned(0),
                sparse_mla=ReadTurned(1),
                window_mla=ReadTurned(1),
            ),
            ("layout.golden[kv/*]", "layout.cross_read[kv/*]"),
        ),
        (
            "nan-read-as-zero",
            "Codes of NaN are read as 0.",
            Ops(gather_kv=nan_as_zero),
            ("layout.codes[kv/e4m3*]",),
        ),
        (
            "nan-tiles-read-as-zero",
            "Codes of NaN in tiles of their own scale are read as 0.",
            Ops(gather_kv=nan_as_zero),
            ("layout.codes[kv/fp8_ds_mla]",),
        ),
        (
            "read-as-bf16",
            "Rows of fp32 are read as bfloat16.",
            Ops(gather_kv=After(as_bf16)),
            ("layout.codes[kv/fp32]",),
        ),
        (
            "other-flavour",
            "Codes of e4m3fn are read as those of e4m3fnuz.",
            Ops(gather_kv=other_flavour),
            ("layout.codes[kv/e4m3]",),
        ),
        (
            "any-tag",
            "A cache of unknown layout is taken for a known one of the same shape.",
            Ops(gather_kv=any_tag),
            ("layout.tag[kv/*]", "layout.tag[index/*]"),
        ),
        (
            "near-rows",
            "Rows beyond 2^31 bytes are looked for where 32 bits can point.",
            Ops(gather_kv=near_rows),
            ("layout.addresses[kv/*]",),
        ),
        (
            "wide-rows",
            "A row takes the bytes of two.",
            Allocating(wide_rows),
            ("layout.size[kv/*]",),
        ),
        (
            "packs-otherwise",
            "The layout that travels with a cache packs pages from their end.",
            Allocating(packs_otherwise),
            ("layout.pack[kv/*]", "layout.pack[index/*]"),
        ),
        (
            "secret-layout",
            "It offers a layout of its own that it doesn't declare.",
            secret_layout,
            ("layout.private",),
        ),
    )
    return [Mutant(name, doc, Changed(change), dies) for name, doc, change, dies in changes]


@dataclass(frozen=True)
class Written:
    """Makes a write of latent rows whose bytes uint8 [n, bytes a token] are changed on the way."""

    change: Callable[[Tensor, KVLayout], Tensor]

    def __call__(self, honest: Op) -> Op:
        def call(cache: KVCache, slots: Tensor, *rows: Any) -> None:
            honest(cache, slots, *rows)
            real = slots[slots >= 0]
            page, token = real // cache.block_size, real % cache.block_size
            tokens = _tokens(cache)
            tokens[page, token] = self.change(tokens[page, token], cache.layout)

        return call


@dataclass(frozen=True)
class ReadTurned:
    """Makes a reader of caches in their own byte order; ``at`` is the place of the cache."""

    at: int

    def __call__(self, honest: Op) -> Op:
        def call(*args: Any) -> Any:
            given = list(args)
            cache = given[self.at]
            if cache.layout.role == "latent":
                rows = _tokens(cache).roll(-_SHIFT, -1).view(cache.parts[0].dtype)
                given[self.at] = replace(cache, parts=(rows, *cache.parts[1:]))
            return honest(*given)

        return call


@dataclass(frozen=True)
class Allocating:
    """The change of a session whose caches are changed when they are allocated."""

    change: Callable[[KVCache], KVCache]

    def __call__(self, session: AlteredSession) -> None:
        allocate = session.inner.alloc_kv

        def call(layout: KVLayout, blocks: int, block_size: int) -> KVCache:
            return self.change(allocate(layout, blocks, block_size))

        session.alloc_kv = call  # type: ignore[attr-defined]


def _tokens(cache: KVCache) -> Tensor:
    """The bytes uint8 [blocks, block_size, bytes a token] of latent rows: the cache's memory."""
    return cache.parts[0].view(torch.uint8)


def last_byte_wrong(tokens: Tensor, layout: KVLayout) -> Tensor:
    tokens = tokens.clone()
    tokens[:, -1] ^= 1
    return tokens


def scale_rounded_down(tokens: Tensor, layout: KVLayout) -> Tensor:
    if layout.id != "fp8_ds_mla":
        return tokens
    tokens = tokens.clone()
    end = _VALUES + 4 * _TILES
    values = 2 * e4m3.decode(tokens[:, :_VALUES], "e4m3fn")
    scale = tokens[:, _VALUES:end].contiguous().view(torch.float32) / 2
    tokens[:, :_VALUES] = e4m3.encode(values, "e4m3fn")
    tokens[:, _VALUES:end] = scale.view(torch.uint8)
    return tokens


def turned(tokens: Tensor, layout: KVLayout) -> Tensor:
    return tokens.roll(_SHIFT, -1)


def one_byte_more(honest: Op) -> Op:
    def call(cache: KVCache, slots: Tensor, *rows: Any) -> None:
        honest(cache, slots, *rows)
        part = cache.parts[0]
        memory = torch.empty(0, dtype=torch.uint8, device=part.device)
        memory.set_(part.untyped_storage())
        for slot in slots[slots >= 0].tolist():
            page, token = divmod(slot, cache.block_size)
            behind = part.storage_offset() + page * part.stride(0) + (token + 1) * part.stride(1)
            if behind * part.element_size() < len(memory):
                memory[behind * part.element_size()] ^= 1

    return call


def last_slot(honest: Op) -> Op:
    def call(cache: KVCache, slots: Tensor, *rows: Any) -> None:
        honest(cache, slots, *rows)
        if bool((slots < 0).any()):
            first = int((slots < 0).nonzero()[0, 0])
            last = slots.new_full((1,), cache.blocks * cache.block_size - 1)
            honest(cache, last, *(row[first : first + 1] for row in rows if row is not None))

    return call


def nan_as_zero(honest: Op) -> Op:
    def call(cache: KVCache, slots: Tensor) -> Tensor:
        rows: Tensor = honest(cache, slots)
        return torch.where(rows.isnan(), 0.0, rows)

    return call


def as_bf16(rows: Tensor) -> Tensor:
    return rows.bfloat16().float()


def other_flavour(honest: Op) -> Op:
    def call(cache: KVCache, slots: Tensor) -> Any:
        found = honest(cache, slots)
        return found / 2 if cache.layout.id == "e4m3" else found  # its bias is one more

    return call


def any_tag(honest: Op) -> Op:
    def call(cache: KVCache, slots: Tensor) -> Any:
        layout = cache.layout
        known = LATENT_IDS if layout.role == "latent" else INDEX_IDS
        if layout.id not in known:
            make = latent_layout if layout.role == "latent" else index_layout
            layout = next(one for one in map(make, known) if one.parts == layout.parts)
        return honest(replace(cache, layout=layout), slots)

    return call


def near_rows(honest: Op) -> Op:
    def call(cache: KVCache, slots: Tensor) -> Any:
        far = slots.long() * cache.layout.bytes_per_token >= 2**31
        return honest(cache, torch.where(far, slots - cache.block_size, slots))

    return call


def wide_rows(cache: KVCache) -> KVCache:
    if cache.layout.role == "index":
        return cache
    first = cache.parts[0]
    wide = torch.cat((first, torch.zeros_like(first)), -1)
    return replace(cache, parts=(wide, *cache.parts[1:]))


def packs_otherwise(cache: KVCache) -> KVCache:
    pack = cache.layout.pack

    def call(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        return pack(rows.flip(1), scale)

    return replace(cache, layout=replace(cache.layout, pack=call))


def secret_layout(session: AlteredSession) -> None:
    own = replace(latent_layout("fp32"), id="x-mutant/rows")
    session.layouts = {**session.inner.layouts, own.id: own}  # type: ignore[attr-defined]
