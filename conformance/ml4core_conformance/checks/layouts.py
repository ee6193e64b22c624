"""Cache layouts, byte by byte: what is written, what is read, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ml4core.api import Refused
from ml4core_conformance import golden
from ml4core_conformance.cache_inputs import SCALE, Role, nan_byte
from ml4core_conformance.check import Check, CheckFailed, Measure, NotRun
from ml4core_conformance.draw import Draw
from ml4core_conformance.layout_bench import SETTING, Bench, bench, pages_of
from ml4core_conformance.layout_compare import equal_bytes, equal_rows, read_by_score, some_rows
from ml4core_conformance.oracle.layouts import INDEX_LAYOUTS, LATENT_LAYOUTS, ByteLayout
from ml4core_conformance.placement import on_cpu
from ml4core_conformance.published import published_model
from ml4core_conformance.subject import Subject

_BLOCK_SIZES = (1, 16, 61, 64, 128)
"""Page sizes that are tried; a backend may refuse any but its own default."""
_PUBLISHED = {"fp8_ds_mla": 47_136, "e4m3": 42_096, "e4m3fnuz": 42_096, "bf16": 78_384}
"""Bytes a token of the published model, with index keys of 132 bytes."""


def checks() -> list[Check]:
    known: tuple[tuple[Role, Mapping[str, ByteLayout]], ...] = (
        ("latent", LATENT_LAYOUTS),
        ("index", INDEX_LAYOUTS),
    )
    return [
        _check(family, role, id, judge)
        for role, layouts in known
        for id in layouts
        for family, judge in _FAMILIES.items()
    ]


def _check(family: str, role: Role, id: str, judge: Callable[[Subject, Role, str], None]) -> Check:
    prefix = SETTING[role][0]
    write = "kv_write" if role == "latent" else "indexer_write"
    read = "sparse_mla" if role == "latent" else "indexer_logits"
    ops = {"gather_kv", write, read} if family not in ("layout.size", "layout.pack") else set()
    return Check(
        family,
        "layouts",
        lambda subject: judge(subject, role, id),
        judge.__doc__ or "",
        variant=f"{prefix}/{id}",
        requires=frozenset({f"{prefix}:{id}"} | {f"op:{op}" for op in ops}),
        unit=f"{prefix}/{id}",
        bugs=_BUGS.get(family, ()),
    )


def _golden(subject: Subject, role: Role, id: str) -> None:
    """Rows written by the backend are, byte by byte, the committed golden pages, and it reads those
    pages as the oracle does. A failure means that no other backend can read its pages.
    """
    want = golden.load(role, id)
    opened = _opened(subject, role, id, golden.block_size(role, id))
    layout, size = opened.known, opened.block_size
    cache, _ = opened.allocate(golden.BLOCKS)
    for part in cache.parts:
        part.zero_()
    opened.write(cache, want.slots, want.rows)
    equal_bytes(layout, size, pages_of(cache), want.pages, "of the golden page")
    tokens = layout.get(want.pages, size, want.slots)
    rows = layout.decode(tokens, want.scale)
    equal_rows(opened.gather(opened.holding(want.pages), want.slots), rows, want.slots, "golden")


def _cross_read(subject: Subject, role: Role, id: str) -> None:
    """The oracle reads what the backend wrote, and the backend reads what the oracle wrote, at
    every page size that the backend opens. A failure is a layout that agrees with itself alone.
    """
    for opened in _page_sizes(subject, role, id):
        layout, size = opened.known, opened.block_size
        blocks = max(3, -(-12 // size))
        where = f"{size} tokens a page"
        draw = Draw(subject.seeds[0], f"{role}/{id}/{size}")
        slots = draw.permutation(blocks * size)[:9]
        slots[:2] = torch.tensor([0, blocks * size - 1])
        slots = torch.unique(slots)
        rows = some_rows(draw, len(slots), layout, opened.dtype)
        cache, _ = opened.allocate(blocks)
        opened.write(cache, slots, rows)
        scale = SCALE if layout.scaled else 1.0
        own = layout.decode(layout.get(pages_of(cache), size, slots), scale)
        equal_rows(own, layout.decode(layout.encode(rows, scale), scale), slots, where)

        pages = torch.zeros(blocks, size * layout.token_bytes, dtype=torch.uint8)
        every = torch.arange(blocks * size)
        stored = draw.normal(len(every), layout.width)
        layout.put(pages, size, every, layout.encode(stored, scale))
        cache = opened.holding(pages)
        due = layout.decode(layout.get(pages, size, slots), scale)
        equal_rows(opened.gather(cache, slots), due, slots, f"{where}, gather_kv")
        read_by_score(subject, opened, pages, draw)


def _codes(subject: Subject, role: Role, id: str) -> None:
    """Every byte is read as the layout's own kind of number: all 256 codes of its flavour of E4M3,
    scales of many sizes. A failure means e4m3fn read as e4m3fnuz, or a scale misread.
    """
    opened = _opened(subject, role, id)
    layout, size = opened.known, opened.block_size
    count = max(2, 512 // layout.width + 1)
    blocks = -(-count // size)
    draw = Draw(subject.seeds[0], f"{role}/{id}/codes")
    rows = draw.normal(count, layout.width) * torch.exp2(draw.integers(count, 1, low=-8, high=9))
    scale = SCALE if layout.scaled else 1.0
    tokens = layout.encode(rows, scale)
    if layout.dtype == "uint8":
        # Bytes of a token that are E4M3, or two of E2M1.
        values = min(layout.width, layout.token_bytes, 512)
        codes = torch.arange(count * values) % 256
        tokens[:, :values] = codes.view(count, values).to(torch.uint8)
    pages = torch.full((blocks, size * layout.token_bytes), nan_byte(layout), dtype=torch.uint8)
    slots = torch.arange(count)
    layout.put(pages, size, slots, tokens)
    found = opened.gather(opened.holding(pages), slots)
    equal_rows(found, layout.decode(tokens, scale), slots, "codes 0 to 255")


def _canary(subject: Subject, role: Role, id: str) -> None:
    """A write changes the bytes of its tokens and none else: other slots, pages of another layer
    that lie between, pages before and after. A failure corrupts someone else's cache.
    """
    for opened in _page_sizes(subject, role, id):
        layout, size = opened.known, opened.block_size
        draw = Draw(subject.seeds[0], f"{role}/{id}/{size}/canary")
        for slots in ([0, 3 * size - 1], [size - 1, -1, size], [-1, -1, 2 * size]):
            real = torch.tensor(slots)
            cache, whole = opened.allocate(3, guard=2, stride=2)
            before = pages_of(whole)
            opened.write(cache, real, some_rows(draw, len(slots), layout, opened.dtype, True))
            spoilt = pages_of(whole) != before
            table = torch.tensor(layout.offsets(size))
            for slot in slots:
                if slot >= 0:
                    spoilt[2 + slot // size * 2, table[slot % size]] = False
            if spoilt.any():
                page, byte = (int(i) for i in spoilt.nonzero()[0])
                inside = 2 <= page < 8 and page % 2 == 0
                token = int((table == byte).nonzero()[0, 0])
                place = f"slot {(page - 2) // 2 * size + token}" if inside else _outside(page)
                raise CheckFailed(
                    f"a write to slots {slots} changed {int(spoilt.sum())} bytes of others, first "
                    f"byte {byte} of page {page - 2} from the cache's first: {place}; {layout.id}, "
                    f"{size} tokens a page"
                )


def _outside(page: int) -> str:
    if page < 2 or page >= 8:
        return "a guard page before or behind the cache"
    return "a page between those of the cache, another layer's"


def _pack(subject: Subject, role: Role, id: str) -> None:
    """The layout that travels with a cache packs and unpacks as the oracle does. A failure spoils
    transfers and host copies of pages.
    """
    opened = _opened(subject, role, id)
    layout, size = opened.known, opened.block_size
    draw = Draw(subject.seeds[0], f"{role}/{id}/pack")
    cache, _ = opened.allocate(2)
    if cache.layout.id != id or cache.layout.role != role or cache.layout.width != layout.width:
        raise CheckFailed(f"alloc_kv for {id!r} gave a cache of layout {cache.layout.id!r}")
    rows = some_rows(draw, 2 * size, layout, torch.float32, finite=True)
    scale = SCALE if layout.scaled else 1.0
    want = torch.zeros(2, size * layout.token_bytes, dtype=torch.uint8)
    layout.put(want, size, torch.arange(2 * size), layout.encode(rows, scale))
    device_rows = rows.view(2, size, -1).to(opened.device)
    parts = cache.layout.pack(device_rows, cache.scale)
    found = torch.cat([layout.pages(on_cpu(part)) for part in parts], -1)
    equal_bytes(layout, size, found, want, "packed by the layout")
    back = on_cpu(cache.layout.unpack(parts, cache.scale)).flatten(0, 1)
    due = layout.decode(layout.encode(rows, scale), scale)
    equal_rows(back, due, torch.arange(2 * size), "unpacked by the layout")


def _size(subject: Subject, role: Role, id: str) -> None:
    """A token costs the bytes of the layout, and a whole model what its table of layers says:
    47,136, 42,096 or 78,384. A failure plans or allocates another number of tokens.
    """
    opened = _opened(subject, role, id)
    layout = opened.known
    blocks = 5
    cache, _ = opened.allocate(blocks)
    found = cache.nbytes / (blocks * opened.block_size)
    subject.measure(
        Measure(f"bytes a token of {id}", abs(found - layout.token_bytes), 0.0, "alloc_kv")
    )
    model = published_model()
    if role == "latent" and id in _PUBLISHED:
        keys = INDEX_LAYOUTS["planar_f32"].token_bytes
        total = len(model.kv_owners) * found + len(model.index_owners) * keys
        wrong = abs(total - _PUBLISHED[id])
        subject.measure(Measure("bytes a token of 72 layers", wrong, 0.0, "63 caches, 44 indexers"))


def _addresses(subject: Subject, role: Role, id: str) -> None:
    """Rows beyond 2^31 bytes are written and read where they are. A failure means 32-bit offsets:
    wrong rows, or a crash, once the pool is large.
    """
    opened = _opened(subject, role, id)
    layout, size = opened.known, opened.block_size
    page = size * layout.token_bytes
    blocks = 2**31 // page + 3
    try:
        cache = opened.session.alloc_kv(opened.layout, blocks, size)
    except MemoryError as error:
        raise NotRun(f"needs {blocks * page / 2**30:.1f} GiB on the device: {error}") from None
    slots = torch.tensor([blocks * size - 1, (blocks - 2) * size, 0])
    rows = some_rows(
        Draw(subject.seeds[0], f"{role}/{id}/far"), 3, layout, opened.dtype, finite=True
    )
    opened.write(cache, slots, rows)
    scale = 1.0 if cache.scale is None else float(cache.scale)
    due = layout.decode(layout.encode(rows, scale), scale)
    equal_rows(opened.gather(cache, slots), due, slots, "beyond 2^31 bytes")
    for row, slot in enumerate(slots.tolist()):
        one = layout.pages(on_cpu(cache.parts[0][slot // size : slot // size + 1]))
        token = layout.decode(layout.get(one, size, torch.tensor([slot % size])), scale)
        equal_rows(token, due[row : row + 1], slots[row : row + 1], "beyond 2^31 bytes")


_FAMILIES: Mapping[str, Callable[[Subject, Role, str], None]] = {
    "layout.size": _size,
    "layout.pack": _pack,
    "layout.golden": _golden,
    "layout.cross_read": _cross_read,
    "layout.codes": _codes,
    "layout.canary": _canary,
    "layout.addresses": _addresses,
}
_BUGS = {
    "layout.size": ("B027",),
    "layout.codes": ("B021",),
    "layout.canary": ("B031",),
    "layout.cross_read": ("B023",),
}


def _opened(subject: Subject, role: Role, id: str, block_size: int | None = None) -> Bench:
    """A bench, of the wanted page size where the layout can have it. ``NotRun`` if refused."""
    layout = (LATENT_LAYOUTS if role == "latent" else INDEX_LAYOUTS)[id]
    size = block_size or subject.deployment().block_size
    size = -(-size // layout.multiple) * layout.multiple
    try:
        return bench(subject, role, id, size)
    except Refused as refused:
        raise NotRun(f"no session with {size} tokens a page: {refused}") from None


def _page_sizes(subject: Subject, role: Role, id: str) -> Iterator[Bench]:
    """A bench for each page size that the backend opens; the default must be one."""
    yield _opened(subject, role, id)
    layout = (LATENT_LAYOUTS if role == "latent" else INDEX_LAYOUTS)[id]
    own = subject.deployment().block_size
    for size in _BLOCK_SIZES:
        if size % layout.multiple or size == own:
            continue
        try:
            opened = bench(subject, role, id, size)
        except Refused:
            continue
        yield opened
