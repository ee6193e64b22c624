"""Layouts that the oracle doesn't know, a plugin's own above all: judged by what they promise."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_conformance import compare
from ml4core_conformance.cache_inputs import SOFTMAX, Role, int32
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.draw import Draw
from ml4core_conformance.layout_bench import (
    GAP,
    SETTING,
    Bench,
    bench,
    known_ids,
    latent_width,
    pages_of,
)
from ml4core_conformance.oracle.attention import attend, expected_attention
from ml4core_conformance.oracle.expected import Float
from ml4core_conformance.placement import on_cpu
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import tolerance

_IDS = torch.tensor([-3.0, -2.0, -1.5, -1.0, 1.0, 1.5, 2.0, 3.0])
"""Values that every format of 4 bits or more keeps apart, under any scale."""
_BLOCKS = 3


def checks() -> list[Check]:
    doc = _private.__doc__ or ""
    return [Check("layout.private", "layouts", _private, doc, unit="layout.private")]


def _private(subject: Subject) -> None:
    """A private layout is a bijection: rows of unique values come back from pack and unpack, each
    token's bytes are its own, and the backend's ops read and write what pack and unpack say.
    A session offers no layout that the capabilities don't declare. A failure loses rows in
    transfers, or mixes those of two tokens.
    """
    undeclared = set(subject.session.layouts) - {
        name for prefix, _ in SETTING.values() for name in subject.capabilities.names(prefix)
    }
    if undeclared:
        raise CheckFailed(f"the session offers undeclared layouts: {', '.join(sorted(undeclared))}")
    for role, (prefix, _) in SETTING.items():
        for id in subject.capabilities.names(prefix):
            if id not in known_ids(role):
                _judge(subject, role, id)


def _judge(subject: Subject, role: Role, id: str) -> None:
    try:
        opened = bench(subject, role, id)
    except KeyError:
        raise CheckFailed(f"{id!r} is declared, but a session opened for it lacks it") from None
    layout = opened.layout
    if layout.role != role or layout.id != id:
        raise CheckFailed(f"layout {id!r} says that it is {layout.role} {layout.id!r}")
    size = opened.block_size
    draw = Draw(subject.seeds[0], id)
    rows = _unique_rows(draw, _BLOCKS * size, layout.width)
    pages = _filled(opened, rows)
    cost = pages.nbytes / (_BLOCKS * size)
    if cost != layout.bytes_per_token:
        raise CheckFailed(f"{id!r} says {layout.bytes_per_token} bytes a token, and takes {cost:g}")
    _same(id, _unpacked(pages), rows, "after pack and unpack")
    _disjoint(opened, pages, rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    _same(id, opened.gather(pages, order), rows[order], "read by gather_kv of a packed page")

    cache, whole = opened.allocate(_BLOCKS, guard=1, stride=2)
    opened.write(cache, order, rows[order])
    _same(id, _unpacked(cache), rows, "unpacked of a page that the backend wrote")
    outside = [page for page in range(2 * _BLOCKS + 2) if page % 2 == 0]
    if (pages_of(whole)[outside] != GAP).any():
        raise CheckFailed(f"{id!r}: a write changed bytes of pages that are not the cache's")
    if role == "latent":
        _attend(subject, opened, pages, draw)


def _attend(subject: Subject, opened: Bench, cache: KVCache, draw: Draw) -> None:
    """Attention over the rows that the layout unpacks."""
    keys, width = _unpacked(cache).double(), latent_width(opened.layout)
    slots = draw.permutation(len(keys))[:40].view(2, 20)
    q = draw.normal(2, 8, opened.layout.width, dtype=opened.dtype)
    given = (q, slots.to(torch.int32), int32([20, 7]))
    q_device, slots_device, lens = (one.to(opened.device) for one in given)
    out, lse = opened.ops["sparse_mla"](q_device, cache, slots_device, lens, SOFTMAX)
    rows = [
        attend(q[t].double(), keys[slots[t, :length]], SOFTMAX, width)
        for t, length in enumerate((20, 7))
    ]
    want = expected_attention(q, rows, opened.layout.width).results
    for name, found in (("out", on_cpu(out)), ("lse", on_cpu(lse))):
        due = want[name]
        assert isinstance(due, Float)
        where = f"sparse_mla over pages of {opened.layout.id}"
        compare.anomalies(name, found, due, where)
        bound = tolerance("sparse_mla", opened.layout.id, due.dtype)
        subject.measure(compare.elements(name, found, due, bound, where))


def _unique_rows(draw: Draw, count: int, width: int) -> Tensor:
    rows = _IDS[draw.integers(count, width, high=len(_IDS))]
    rows[:, ::8] = 3.0  # so that blocks have one largest value, and scales of one kind
    return rows


def _filled(opened: Bench, rows: Tensor) -> KVCache:
    """A cache with the packed rows [blocks * block_size, width]."""
    cache, _ = opened.allocate(_BLOCKS)
    shaped = rows.view(_BLOCKS, opened.block_size, -1).to(opened.device)
    parts = opened.layout.pack(shaped, cache.scale)
    for mine, packed in zip(cache.parts, parts, strict=True):
        mine.copy_(packed)
    return cache


def _unpacked(cache: KVCache) -> Tensor:
    """Rows fp32 [blocks * block_size, width] on the CPU."""
    rows: Tensor = on_cpu(cache.layout.unpack(cache.parts, cache.scale))
    return rows.flatten(0, 1)


def _same(id: str, found: Tensor, want: Tensor, where: str) -> None:
    """Raises ``CheckFailed`` unless each value is nearest to the one that was stored."""
    if found.shape != want.shape:
        raise CheckFailed(f"{id!r}: rows are {list(found.shape)}, wanted {list(want.shape)}")
    nearest = _IDS[(found.unsqueeze(-1).nan_to_num(1e9) - _IDS).abs().argmin(-1)]
    wrong = nearest != want
    if wrong.any():
        row, value = (int(i) for i in wrong.nonzero()[0])
        raise CheckFailed(
            f"{id!r}: {int(wrong.sum())} values are others {where}, first row {row}, value "
            f"{value}: found {float(found[row, value]):.6g}, wanted is {float(want[row, value]):g}"
        )


def _disjoint(opened: Bench, base: KVCache, rows: Tensor) -> None:
    """Another row in one token changes bytes of its page, and none that another token changes."""
    before = pages_of(base)
    owner = torch.full(before.shape, -1, dtype=torch.int64)
    size = opened.block_size
    for token in range(size, 2 * size):
        changed = rows.clone()
        changed[token] = -changed[token]
        cache = _filled(opened, changed)
        differs = pages_of(cache) != before
        if not differs.any():
            raise CheckFailed(f"{opened.layout.id!r}: token {token} leaves no trace in its page")
        page, byte = (int(i) for i in differs.nonzero()[0])
        if not bool(differs[1].any()) or differs[[0, 2]].any():
            raise CheckFailed(
                f"{opened.layout.id!r}: token {token} is of page 1 and changes byte {byte} of page "
                f"{page}"
            )
        twice = differs & (owner >= 0)
        # A byte may hold values of two tokens, half each; a row has many, and most are its own.
        if int(twice.sum()) * 2 > int(differs.sum()):
            other = int(owner[twice][0])
            raise CheckFailed(
                f"{opened.layout.id!r}: tokens {other} and {token} change the same bytes"
            )
        owner[differs] = token
