"""Attention over the latest keys of each row's request, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import LATENT_IDS, latent_layout
from ml4core.compose.ops import COMPOSED, window

from . import references as reference
from .support import INF, NAN, Check, Draw, assert_close, corner_cases, make_cache, poison

window_mla = COMPOSED["window_mla"]

LATENT, ROPE = 128, 16
SCALE = 0.13


class Batch:
    """Requests with pages of their own in one cache; each row given by its visible length."""

    def __init__(
        self,
        visible: list[list[int]],
        id: str = "fp32",
        block_size: int = 16,
        pages: int = 5,
        strided: bool = False,
        padding: int = 0,
        seed: int = 1,
    ) -> None:
        draw = Draw(seed)
        layout = latent_layout(id, LATENT, ROPE)
        requests = len(visible)
        blocks = requests * pages + 2
        rows = draw.normal(blocks, block_size, layout.width)
        scale = 0.5 if "e4m3" in id else None
        self.cache: KVCache = make_cache(layout, rows, strided=strided, scale=scale)
        self.stored = layout.unpack(self.cache.parts, self.cache.scale).flatten(0, 1)
        order = draw.permutation(blocks)[: requests * pages]
        self.table = order.to(torch.int32).view(requests, pages)
        starts = list(itertools.accumulate((len(v) for v in visible), initial=0))
        self.query_start = torch.tensor(starts, dtype=torch.int32)
        flat = [n for rows_of in visible for n in rows_of] + [0] * padding
        self.visible = torch.tensor(flat, dtype=torch.int32)
        self.max_rows = max(len(v) for v in visible)
        self.block_size, self.columns = block_size, pages * block_size

    def slot(self, request: int, position: int) -> int:
        page = self.table[request, position // self.block_size]
        return int(page) * self.block_size + position % self.block_size

    def seen(self, row: int, length: int | None) -> list[int]:
        """The slots that a row attends to."""
        request = reference.request_of(self.query_start.tolist(), row)
        if request is None:
            return []
        end = min(int(self.visible[row]), self.columns)
        start = 0 if length is None else max(0, end - length)
        return [self.slot(request, p) for p in range(start, end)]

    def run(self, q: Tensor, length: int | None, max_rows: int | None = None) -> tuple[Tensor, ...]:
        return window_mla(
            q,
            self.cache,
            self.table,
            self.query_start,
            self.visible,
            max_rows or self.max_rows,
            SCALE,
            length,
        )


def check_window(
    batch: Batch,
    length: int | None,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    rope: int = ROPE,
    max_rows: int | None = None,
) -> None:
    rows = batch.visible.shape[0]
    q = Draw(2).normal(rows, heads, LATENT + rope, dtype=dtype)
    seen = [batch.seen(t, length) for t in range(rows)]
    used = {slot for row in seen for slot in row}
    poison(batch.cache, sorted(set(range(batch.stored.shape[0])) - used))
    out, lse = batch.run(q, length, max_rows)
    assert out.dtype == dtype
    assert out.shape == (rows, heads, LATENT)
    assert lse.dtype == torch.float32
    for t, slots in enumerate(seen):
        keys = batch.stored[slots]
        want, want_lse, size, score_size = reference.attention(q[t], keys, LATENT, SCALE)
        assert_close(out[t], want, size, len(slots) + q.shape[-1])
        assert_close(lse[t], want_lse, score_size, len(slots) + q.shape[-1])


RAGGED = [[1], [80], [3, 4, 5], [], [17, 18], [64], [0, 0]]
LENGTHS = [None, 1, 4, 16, 60, 1000]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("id", LATENT_IDS)
def test_layouts(id: str, length: int | None) -> None:
    check_window(Batch(RAGGED, id), length)
    check_window(Batch(RAGGED, id, strided=True, padding=3), length)


@pytest.mark.parametrize("length", [None, 7, 30])
@pytest.mark.parametrize(("block_size", "pages"), [(1, 80), (16, 5), (61, 2), (64, 2)])
def test_block_sizes(block_size: int, pages: int, length: int | None) -> None:
    check_window(Batch(RAGGED, block_size=block_size, pages=pages), length)


@pytest.mark.parametrize("length", [None, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 8])
def test_heads_and_dtypes(heads: int, dtype: torch.dtype, length: int | None) -> None:
    check_window(Batch(RAGGED, padding=2), length, heads, dtype)
    check_window(Batch(RAGGED), length, heads, dtype, rope=0)


@pytest.mark.parametrize("length", [None, 9])
def test_padded_rows_behind_a_request_with_keys(length: int | None) -> None:
    """B018: what comes back for them was computed, and is nothing of a neighbour's."""
    check_window(Batch([[5], [60, 61, 62]], padding=4), length)
    check_window(Batch([[60]], padding=1), length)


@pytest.mark.parametrize("length", [None, 9])
def test_a_bound_on_rows_that_no_request_reaches(length: int | None) -> None:
    check_window(Batch(RAGGED), length, max_rows=50)


@pytest.mark.parametrize("length", [None, 23])
def test_tiles_of_requests_rows_and_pages(
    length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_QUERY_ROWS", 4)  # two rows of two heads
    for size in (1, 2):
        monkeypatch.setattr(window, "tile_size", lambda count, each, size=size: min(count, size))
        check_window(Batch([[70, 71, 72, 73, 74], [5], [0, 33]]), length)


def test_both_ways_to_read_a_window_agree() -> None:
    batch = Batch(RAGGED, padding=1)
    q = Draw(3).normal(batch.visible.shape[0], 2, LATENT + ROPE)
    gathered = batch.run(q, 9)
    assert 9 * batch.max_rows <= batch.columns < 9 * 50
    by_pages = batch.run(q, 9, max_rows=50)
    for a, b in zip(gathered, by_pages, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("length", [None, 6])
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 3e38])
def test_a_later_key_never_reaches_an_earlier_row(junk: float, length: int | None) -> None:
    """Row 0 sees 10 keys, row 1 all; what key 10 holds is nothing to row 0."""
    batch = Batch([[10, 60]])
    q = Draw(4).normal(2, 2, LATENT + ROPE)
    clean = batch.run(q, length)
    poison(batch.cache, [batch.slot(0, p) for p in range(10, 60)], junk)
    dirty = batch.run(q, length)
    assert torch.equal(dirty[0][0], clean[0][0])
    assert torch.equal(dirty[1][0], clean[1][0])


def test_a_visible_nan_shows() -> None:
    batch = Batch([[10, 60]])
    poison(batch.cache, [batch.slot(0, 30)])
    out, _ = batch.run(Draw(5).normal(2, 2, LATENT + ROPE), None)
    assert out[1].isnan().all()
    assert not out[0].isnan().any()


@pytest.mark.parametrize("id", ["fp32", "fp8_ds_mla"])
def test_selected_keys_by_whole_pages_or_by_slots(id: str) -> None:
    """Two ways to read one selection; what is not selected holds NaN."""
    batch, draw, k = Batch(RAGGED, id, padding=2), Draw(8), 12
    rows = batch.visible.shape[0]
    positions = torch.full((rows, k), -1, dtype=torch.int32)
    slots, lens = positions.clone(), torch.zeros(rows, dtype=torch.int32)
    for t in range(rows):
        seen = batch.seen(t, None)
        chosen = sorted(draw.permutation(len(seen))[:k].tolist())
        positions[t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        slots[t, : len(chosen)] = torch.tensor([seen[p] for p in chosen], dtype=torch.int32)
        lens[t] = len(chosen)
    poison(batch.cache, sorted(set(range(batch.stored.shape[0])) - set(slots.flatten().tolist())))
    q = draw.normal(rows, 2, LATENT + ROPE)
    paged = (batch.table, batch.query_start, batch.visible, batch.max_rows)
    by_pages = window.selected_mla(q, batch.cache, *paged, SCALE, positions)
    by_slots = COMPOSED["sparse_mla"](q, batch.cache, slots, lens, SCALE)
    for a, b in zip(by_pages, by_slots, strict=True):
        assert torch.isfinite(a).equal(torch.isfinite(b))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("length", [None, 6])
def test_requests_together_and_alone(length: int | None) -> None:
    batch = Batch([[40, 41], [7, 8], [70, 71]])
    q = Draw(6).normal(6, 2, LATENT + ROPE)
    out, lse = batch.run(q, length)
    for r in range(3):
        rows = slice(2 * r, 2 * r + 2)
        alone = window_mla(
            q[rows],
            batch.cache,
            batch.table[r : r + 1],
            torch.tensor([0, 2], dtype=torch.int32),
            batch.visible[rows],
            2,
            SCALE,
            length,
        )
        torch.testing.assert_close(alone[0], out[rows])
        torch.testing.assert_close(alone[1], lse[rows])


def test_pages_outside_of_the_cache_behind_the_visible_keys() -> None:
    batch = Batch([[10], [12]])
    q = Draw(7).normal(2, 2, LATENT + ROPE)
    want = batch.run(q, None)
    batch.table[:, 1:] = torch.tensor([[-1, 2**31 - 1, 99, -(2**31)]], dtype=torch.int32)
    for got, clean in zip(batch.run(q, None), want, strict=True):
        assert torch.equal(got, clean)


def length_zero() -> None:
    for length in (None, 5):
        check_window(Batch([[0], [0, 0], [5], [0]], padding=2), length)
        check_window(Batch([[0], [0]]), length)


def both(batch: list[list[int]], *lengths: int | None) -> Check:
    def check() -> None:
        for length in lengths:
            check_window(Batch(batch), length)
            check_window(Batch(batch), length, max_rows=90)

    return check


CORNERS: dict[str, dict[str, Check]] = {
    "window_mla": {
        "length 0": length_zero,
        "window edge": both([[7], [8], [9], [1]], 8),
        "page edge": both([[15], [16], [17], [32], [80]], None, 16, 17, 15),
        "ragged lengths": both(RAGGED, None, 20),
        "rows of one request with equal visible": both([[50, 50, 50], [9, 9]], None, 20),
    }
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
