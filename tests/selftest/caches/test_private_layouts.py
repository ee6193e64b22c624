"""Private layouts are judged by what they promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache, KVLayout
from ml4core.api.known_layouts import latent_layout
from ml4core_conformance.check import Status

from .wrapped import (
    Change,
    Op,
    Wrapped,
    backend,
    dies,
    verdict,
)

PRIVATE = "x-test/turned"


def private(order: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> KVLayout:
    """bf16 rows whose tokens are stored in another order: [blocks, block_size, width]."""
    known = latent_layout("bf16")
    return replace(
        known,
        id=PRIVATE,
        pack=lambda rows, scale: (order(known.pack(rows, scale)[0]).contiguous(),),
        unpack=lambda arrays, scale: known.unpack((back(arrays[0]),), scale),
    )


def _flip(x: Tensor) -> Tensor:
    return x.flip(1)


def with_private(layout: KVLayout, ops: Mapping[str, Change]) -> Wrapped:
    words = frozenset({f"kv:{PRIVATE}"})
    return backend(ops, words, layouts={layout.id: layout})


def _turned(op: Op) -> Op:
    """An op of known layouts on slots of the private one: tokens of a page run backwards."""

    def call(*args: Any) -> Any:
        cache_at = next(i for i, arg in enumerate(args) if isinstance(arg, KVCache))
        cache = args[cache_at]
        if cache.layout.id != PRIVATE:
            return op(*args)
        size = cache.block_size
        slots = args[cache_at + 1]
        moved = torch.where(slots < 0, slots, slots // size * size + size - 1 - slots % size)
        known = replace(cache, layout=latent_layout("bf16"))
        return op(*args[:cache_at], known, moved, *args[cache_at + 2 :])

    return call


TURNED = {"kv_write": _turned, "gather_kv": _turned, "sparse_mla": _turned}


def test_an_honest_private_layout_passes() -> None:
    honest = with_private(private(_flip, _flip), TURNED)
    assert verdict(honest, "layout.private") == (Status.PASS, "")


@pytest.mark.parametrize(
    ("layout", "ops", "words"),
    [
        (private(_flip, lambda x: x), TURNED, "after pack and unpack"),
        (private(lambda x: x[:, :1].expand_as(x), lambda x: x), TURNED, "after pack and unpack"),
        (private(_flip, _flip), TURNED | {"gather_kv": lambda op: op}, "gather_kv"),
        (private(_flip, _flip), TURNED | {"kv_write": lambda op: op}, "wrote"),
        (private(_flip, _flip), TURNED | {"sparse_mla": lambda op: op}, "out"),
    ],
)
def test_wrong_private_layouts_die(layout: KVLayout, ops: Mapping[str, Change], words: str) -> None:
    dies(with_private(layout, ops), "layout.private", words)


def test_an_undeclared_private_layout_dies() -> None:
    layout = private(_flip, _flip)
    dies(backend(layouts={layout.id: layout}), "layout.private", "undeclared")
