"""Writing and gathering cache rows in every layout; positions to slots."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache, KVLayout
from ml4core.api.known_layouts import INDEX_IDS, LATENT_IDS, index_layout, latent_layout
from ml4core.compose.ops import COMPOSED

from . import bytes_reference as reference
from .support import INF, NAN, Check, Draw, corner_cases, make_cache, poison, raw

kv_write, indexer_write = COMPOSED["kv_write"], COMPOSED["indexer_write"]
gather_kv, to_slots = COMPOSED["gather_kv"], COMPOSED["to_slots"]

LATENT, ROPE, KEY = 128, 8, 32
SCALE = 0.75
ROLES = [("latent", id) for id in LATENT_IDS] + [("index", id) for id in INDEX_IDS]


def layout_of(role: str, id: str) -> KVLayout:
    return latent_layout(id, LATENT, ROPE) if role == "latent" else index_layout(id, KEY)


def filled(role: str, id: str, blocks: int, block_size: int, strided: bool = False) -> KVCache:
    layout = layout_of(role, id)
    rows = Draw(1).normal(blocks, block_size, layout.width)
    scale = SCALE if "e4m3" in id else None
    return make_cache(layout, rows, strided=strided, scale=scale)


def write(cache: KVCache, slots: Tensor, rows: Tensor) -> None:
    if cache.layout.role == "index":
        indexer_write(cache, slots, rows)
    else:
        kv_write(cache, slots, rows[:, :LATENT], rows[:, LATENT:])


def expected(cache: KVCache, slots: list[int], rows: Tensor) -> list[bytearray]:
    """The pages after the write, by the byte loop."""
    pages = reference.pages_of(cache.parts[0])
    size = cache.block_size
    if cache.layout.role == "index":
        token, offsets = reference.INDEX[cache.layout.id]
    else:
        token, offsets = reference.latent_token(cache.layout.id, LATENT), reference.row_offsets
    for slot, row in zip(slots, rows.tolist(), strict=True):
        if slot >= 0:
            data = token(row, SCALE)
            reference.write_token(pages, offsets(len(data), size, slot % size), slot // size, data)
    return pages


def check_write(role: str, id: str, block_size: int, slots: list[int], **more: bool) -> None:
    cache = filled(role, id, 3, block_size, **more)
    rows = Draw(2).normal(len(slots), cache.layout.width) * 3
    want = expected(cache, slots, rows)
    around = raw(cache)
    write(cache, torch.tensor(slots), rows)
    assert reference.pages_of(cache.parts[0]) == want
    changed = sum(a != b for a, b in zip(raw(cache), around, strict=True))
    written = sum(slot >= 0 for slot in slots)
    assert changed <= written * cache.layout.bytes_per_token


def block_sizes(id: str) -> tuple[int, ...]:
    return (16, 64) if id == "tiled16_f32" else (1, 16, 61)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("role", "id"), ROLES)
def test_writes_byte_by_byte(role: str, id: str, strided: bool) -> None:
    for block_size in block_sizes(id):
        last = 3 * block_size - 1
        check_write(role, id, block_size, [last, 0], strided=strided)
        check_write(role, id, block_size, [-1, last - 1, -1], strided=strided)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("role", "id"), ROLES)
def test_read_back(role: str, id: str, dtype: torch.dtype) -> None:
    cache = filled(role, id, 3, 16)
    rows = Draw(3).normal(4, cache.layout.width, dtype=dtype)
    write(cache, torch.tensor([47, 0, 16, 15]), rows)
    got = gather_kv(cache, torch.tensor([47, 0, 16, 15], dtype=torch.int32))
    pages = cache.layout.pack(rows.float().unsqueeze(1).expand(-1, 16, -1), cache.scale)
    assert torch.equal(got, cache.layout.unpack(pages, cache.scale)[:, 3])


EXTREMES = {
    "amax 0": [0.0, -0.0, 0.0],
    "448": [448.0, 3.0, -448.0],
    "above 448": [500.0, 449.0, 0.1],
    "denormal": [1e-40, -1e-45, 0.0],
    "below the floor": [1e-5, -1e-6, 1e-8],
    "inf": [INF, 2.0, -INF],
    "NaN": [NAN, 2.0, -1.0],
    "ties": [448.0, 17.0, 19.0],
    "largest": [3e38, -1e38, 1.0],
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize(("role", "id"), ROLES)
def test_extreme_values_byte_by_byte(role: str, id: str, case: str) -> None:
    """B023: finite overflow and infinities saturate, NaN stays NaN, neighbours are unharmed."""
    cache = filled(role, id, 1, 16)
    rows = torch.zeros(1, cache.layout.width)
    rows[0, :3] = torch.tensor(EXTREMES[case])
    want = expected(cache, [7], rows)
    write(cache, torch.tensor([7]), rows)
    assert reference.pages_of(cache.parts[0]) == want


def extremes(role: str) -> Check:
    def check() -> None:
        for kind, id in ROLES:
            if kind == role:
                for case in EXTREMES:
                    test_extreme_values_byte_by_byte(role, id, case)

    return check


def no_rope() -> None:
    """The tail is written as zeros, over whatever the page held."""
    for id in LATENT_IDS:
        cache = filled("latent", id, 2, 16)
        poison(cache, [5])
        latent = Draw(4).normal(1, LATENT)
        kv_write(cache, torch.tensor([5]), latent)
        row = gather_kv(cache, torch.tensor([5], dtype=torch.int32))[0]
        assert torch.equal(row[LATENT:], torch.zeros(ROPE)), id
        kv_write(cache, torch.tensor([6]), latent, torch.zeros(1, ROPE))
        assert torch.equal(gather_kv(cache, torch.tensor([6], dtype=torch.int32))[0], row), id


def all_skipped(role: str) -> Check:
    def check() -> None:
        for kind, id in ROLES:
            if kind == role:
                cache = filled(role, id, 2, 16)
                poison(cache, [0, 1])
                before = raw(cache)
                write(cache, torch.full((3,), -1), Draw(5).normal(3, cache.layout.width))
                assert raw(cache) == before, id

    return check


def each_layout(role: str, slots: list[int], strided: bool = False) -> Check:
    def check() -> None:
        for kind, id in ROLES:
            if kind == role:
                check_write(role, id, 16, slots, strided=strided)

    return check


def test_slots_beyond_the_cache_write_nothing() -> None:
    cache = filled("latent", "fp32", 2, 4)
    before = raw(cache)
    write(cache, torch.tensor([8, 2**40, -7]), Draw(6).normal(3, LATENT + ROPE))
    assert raw(cache) == before


def test_two_caches_in_one_block() -> None:
    """B031: rows of two layers side by side in each page of one allocation."""
    layout = latent_layout("fp8_ds_mla", LATENT, ROPE)
    width, size = layout.bytes_per_token, 4
    memory = torch.zeros(3, 2 * size * width + 132 * size, dtype=torch.uint8)
    views = [memory[:, i * size * width : (i + 1) * size * width] for i in range(2)]
    caches = [KVCache(layout, size, (view.view(3, size, width),)) for view in views]
    rows = Draw(7).normal(2, 3, LATENT + ROPE)
    slots = torch.tensor([0, 7, 11])
    for cache, own in zip(caches, rows, strict=True):
        kv_write(cache, slots, own[:, :LATENT], own[:, LATENT:])
    assert memory[:, 2 * size * width :].count_nonzero() == 0
    for cache, own in zip(caches, rows, strict=True):
        dense = make_cache(layout, torch.zeros(3, size, LATENT + ROPE))
        kv_write(dense, slots, own[:, :LATENT], own[:, LATENT:])
        ids = slots.to(torch.int32)
        assert torch.equal(gather_kv(cache, ids), gather_kv(dense, ids))


def test_offsets_beyond_two_gigabytes() -> None:
    """The pages of a view may lie further apart than an int32 counts bytes."""
    layout = latent_layout("fp32", 8, 0)
    far = 2**29 + 64  # in values of 4 bytes
    room = torch.empty(far + 64)  # untouched memory takes none
    array = room.as_strided((2, 4, 8), (far, 8, 1))
    cache = KVCache(layout, 4, (array,))
    rows = Draw(8).normal(2, 8)
    kv_write(cache, torch.tensor([7, 4]), rows)
    assert torch.equal(room[far + 24 : far + 32], rows[0])
    assert torch.equal(gather_kv(cache, torch.tensor([4, 7], dtype=torch.int32)), rows.flip(0))


def check_gather(role: str, id: str, block_size: int, slots: list[int], strided: bool) -> None:
    layout = layout_of(role, id)
    rows = Draw(9).normal(3, block_size, layout.width)
    scale = SCALE if "e4m3" in id else None
    cache = make_cache(layout, rows, strided=strided, scale=scale)
    stored = layout.unpack(layout.pack(rows, cache.scale), cache.scale).flatten(0, 1)
    want = torch.stack([stored[s] if s >= 0 else torch.zeros(layout.width) for s in slots])
    index = torch.tensor(slots, dtype=torch.int32)
    assert torch.equal(gather_kv(cache, index), want)
    assert torch.equal(gather_kv(cache, index.view(2, -1, 1)), want.view(2, -1, 1, layout.width))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("role", "id"), ROLES)
def test_gather(role: str, id: str, strided: bool) -> None:
    for block_size in block_sizes(id):
        last = 3 * block_size - 1
        check_gather(role, id, block_size, [last, 0, block_size, -1, 2, last - 1], strided)


def gather_skips() -> None:
    cache = filled("latent", "fp32", 2, 4)
    poison(cache, range(8))
    got = gather_kv(cache, torch.tensor([[-1, -5], [8, 2**31 - 1]], dtype=torch.int32))
    assert torch.equal(got, torch.zeros(2, 2, LATENT + ROPE))


def slots_reference(positions: Tensor, table: Tensor, request: Tensor, size: int) -> Tensor:
    out = torch.full_like(positions, -1)
    for t in range(positions.shape[0]):
        for j, p in enumerate(positions[t].tolist()):
            if p >= 0:
                out[t, j] = table[request[t], p // size] * size + p % size
    return out


def check_to_slots(positions: Tensor, block_size: int) -> None:
    draw = Draw(10)
    table = draw.permutation(12).to(torch.int32).view(3, 4)
    request = torch.tensor([2, 0, 0, 1])[: positions.shape[0]]
    got = to_slots(positions, table, request, block_size)
    assert got.dtype == torch.int32
    assert torch.equal(got, slots_reference(positions, table, request, block_size))


@pytest.mark.parametrize("block_size", [1, 16, 61, 64])
def test_to_slots(block_size: int) -> None:
    positions = Draw(11).integers(-1, 4 * block_size, 4, 9).to(torch.int32)
    check_to_slots(positions, block_size)


def test_to_slots_of_the_last_slot_an_int32_can_name() -> None:
    table = torch.tensor([[2**25 - 1]], dtype=torch.int32)
    got = to_slots(torch.tensor([[63]], dtype=torch.int32), table, torch.tensor([0]), 64)
    assert got.item() == 2**31 - 1


def test_roles_are_checked() -> None:
    latent, index = filled("latent", "fp32", 1, 4), filled("index", "fp32", 1, 4)
    with pytest.raises(ValueError, match="role 'latent'; 'fp32' has role 'index'"):
        kv_write(index, torch.tensor([0]), torch.zeros(1, KEY))
    with pytest.raises(ValueError, match="role 'index'; 'fp32' has role 'latent'"):
        indexer_write(latent, torch.tensor([0]), torch.zeros(1, KEY))


def test_a_layout_without_single_rows_is_refused() -> None:
    known = latent_layout("fp32", 8, 0)
    private = KVLayout(
        "x-acme/tiles", "latent", 8, known.parts, known.fields, known.pack, known.unpack
    )
    cache = KVCache(private, 4, (torch.zeros(2, 4, 8),))
    with pytest.raises(ValueError, match="'x-acme/tiles' states no encode and decode"):
        gather_kv(cache, torch.tensor([0], dtype=torch.int32))


def test_a_cache_scale_of_none_is_one() -> None:
    layout = latent_layout("e4m3", 8, 0)
    cache = make_cache(layout, torch.zeros(1, 4, 8))
    kv_write(cache, torch.tensor([1]), torch.full((1, 8), 3.0))
    assert gather_kv(cache, torch.tensor([1], dtype=torch.int32)).unique().tolist() == [3.0]


PAGE_EDGE = torch.tensor([[15, 16, 0, 63], [31, 32, 47, 48]], dtype=torch.int32)

CORNERS: dict[str, dict[str, Check]] = {
    "kv_write": {
        "slot -1": each_layout("latent", [-1, 20, -1, 3]),
        "last slot of a page": each_layout("latent", [15, 31, 47]),
        "all slots -1": all_skipped("latent"),
        "amax 0, 448, denormal, inf, NaN": extremes("latent"),
        "strided pages": each_layout("latent", [15, 16, 47, -1], strided=True),
        "no rope": no_rope,
    },
    "indexer_write": {
        "slot -1": each_layout("index", [-1, 20, -1, 3]),
        "last slot of a page": each_layout("index", [15, 31, 47]),
        "all slots -1": all_skipped("index"),
        "amax 0, 448, denormal, inf, NaN": extremes("index"),
        "strided pages": each_layout("index", [15, 16, 47, -1], strided=True),
    },
    "gather_kv": {
        "slot -1": gather_skips,
        "page edge": lambda: check_gather("latent", "fp8_ds_mla", 16, [15, 16, 31, 32], False),
        "strided pages": lambda: check_gather("index", "tiled16_f32", 16, [15, 16, 47, 0], True),
    },
    "to_slots": {
        "-1": lambda: check_to_slots(torch.tensor([[3, -1, 2, -1]], dtype=torch.int32), 16),
        "page edge": lambda: check_to_slots(PAGE_EDGE, 16),
        "all -1": lambda: check_to_slots(torch.full((4, 3), -1, dtype=torch.int32), 16),
    },
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()


def test_the_extremes_hold_what_their_corner_names() -> None:
    assert all(v == 0 for v in EXTREMES["amax 0"])
    assert max(EXTREMES["448"]) == 448
    assert 0 < EXTREMES["denormal"][0] < torch.finfo(torch.float32).tiny
    assert INF in EXTREMES["inf"]
    assert math.isnan(EXTREMES["NaN"][0])
