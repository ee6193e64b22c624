"""A cache carries its layout, and whoever reads or writes it looks at that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_conformance.cache_inputs import SCALE, SOFTMAX, Role, int32
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.layout_bench import SETTING, Bench, bench
from ml4core_conformance.layout_compare import equal_rows
from ml4core_conformance.oracle.layouts import INDEX_LAYOUTS, KEY, LATENT_LAYOUTS, ByteLayout
from ml4core_conformance.subject import Subject

_UNKNOWN = "x-another/rows"


def checks() -> list[Check]:
    doc = _tag.__doc__ or ""
    found = []
    kinds: tuple[tuple[Role, tuple[str, ...], set[str]], ...] = (
        ("latent", tuple(LATENT_LAYOUTS), {"op:kv_write", "op:sparse_mla", "op:gather_kv"}),
        ("index", tuple(INDEX_LAYOUTS), {"op:indexer_write", "op:indexer_logits", "op:gather_kv"}),
    )
    for role, ids, ops in kinds:
        prefix = SETTING[role][0]
        for id in ids:
            words = ops | {f"{prefix}:{id}"}
            found.append(
                Check(
                    "layout.tag",
                    "layouts",
                    partial(_tag, role=role, id=id),
                    doc,
                    variant=f"{prefix}/{id}",
                    requires=frozenset(words),
                    unit=f"{prefix}/{id}",
                    bugs=("B021",),
                )
            )
    return found


def _tag(subject: Subject, role: Role, id: str) -> None:
    """Ops refuse, by ``ValueError``, a cache whose layout they don't know; one of another known
    layout of the same shape they refuse, or read by its tag. A failure reads bytes as what they are
    not, as between peers that store different flavours of FP8.
    """
    opened = bench(subject, role, id)
    cache, _ = opened.allocate(2)
    for part in cache.parts:
        part.zero_()
    unknown = replace(opened.layout, id=_UNKNOWN, encode=None, decode=None)
    for op, call in _calls(opened, replace(cache, layout=unknown)):
        if _refuses(op, call) is not None:
            raise CheckFailed(f"{op} takes a cache of layout {_UNKNOWN!r} as one of {id!r}")
    layouts = LATENT_LAYOUTS if role == "latent" else INDEX_LAYOUTS
    for other in layouts.values():
        made = latent_layout(other.id) if role == "latent" else index_layout(other.id)
        if other.id != id and made.parts == opened.layout.parts:
            _read_as(opened, replace(cache, layout=made), other)


def _read_as(opened: Bench, cache: KVCache, layout: ByteLayout) -> None:
    """Reads a page of the other layout that holds every code."""
    size, count = opened.block_size, min(opened.block_size, 4)
    slots = torch.arange(count)
    tokens = layout.encode(torch.ones(count, layout.width), SCALE)
    tokens[:, :KEY] = torch.arange(count * KEY).view(count, KEY).to(torch.uint8)
    pages = torch.zeros(2, size * layout.token_bytes, dtype=torch.uint8)
    layout.put(pages, size, slots, tokens)
    cache.parts[0].copy_(layout.array(pages, size).to(opened.device))
    scale = None if not layout.scaled else torch.tensor([SCALE], device=opened.device)
    tagged = replace(cache, scale=scale)
    found = _refuses("gather_kv", lambda: opened.gather(tagged, slots))
    if found is not None:
        due = layout.decode(tokens, SCALE if layout.scaled else 1.0)
        equal_rows(
            found, due, slots, f"a cache of layout {layout.id!r}, read for {opened.layout.id!r}"
        )


def _refuses(op: str, call: Callable[[], Any]) -> Any:
    """None if the call ends with ``ValueError``; else what it returned, or True."""
    try:
        found = call()
    except ValueError:
        return None
    except Exception as error:
        raise CheckFailed(
            f"{op} of a foreign cache ends with {type(error).__name__}, wanted is ValueError that "
            f"names the layout: {error}"
        ) from error
    return True if found is None else found


def _calls(opened: Bench, cache: KVCache) -> Iterator[tuple[str, Callable[[], object]]]:
    ops, device, dtype = opened.ops, opened.device, opened.dtype
    width = opened.layout.width
    slots = torch.tensor([0, 1], device=device)
    yield "gather_kv", lambda: ops["gather_kv"](cache, slots.to(torch.int32))
    rows = torch.ones(2, width, dtype=dtype, device=device)
    yield (
        "indexer_write" if opened.layout.role == "index" else "kv_write",
        lambda: opened.write(cache, slots, rows),
    )
    lens = int32([1, 2]).to(device)
    if opened.layout.role == "latent":
        q = torch.ones(2, 8, width, dtype=dtype, device=device)
        chosen = slots.to(torch.int32).expand(2, 2).contiguous()
        yield "sparse_mla", lambda: ops["sparse_mla"](q, cache, chosen, lens, SOFTMAX)
        return
    q = torch.ones(2, 32, KEY, dtype=dtype, device=device)
    weights = torch.ones(2, 32, device=device)
    table, start = int32([1]).view(1, 1).to(device), int32([0, 2]).to(device)
    given = (q, weights, KEY**-0.5, cache, table, start, lens, 2)
    yield "indexer_logits", lambda: ops["indexer_logits"](*given)
