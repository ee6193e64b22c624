"""Scores of the indexer against float64 on the stored keys."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import INDEX_IDS, index_layout
from ml4core.compose.ops import COMPOSED, indexer

from . import references as reference
from .bytes_reference import index_scale
from .references import e4m3_code, e4m3_value
from .support import INF, NAN, Check, Draw, assert_close, corner_cases, make_cache, poison

indexer_logits = COMPOSED["indexer_logits"]

DIM, HEADS, SCALE = 32, 4, 0.07
RAGGED = [[1], [64], [3, 4, 5], [], [17, 18], [0], [48]]


def quantised_query(q: Tensor) -> Tensor:
    """Each (token, head) through E4M3 with the scale of an index key, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        values = q[t, h].float().tolist()
        scale = index_scale(values)
        codes = [e4m3_code(v / scale, "e4m3fn") for v in values]
        out[t, h] = torch.tensor([e4m3_value(c, "e4m3fn") * scale for c in codes])
    return out


class Batch:
    def __init__(
        self,
        visible: list[list[int]],
        id: str = "planar_f32",
        block_size: int = 16,
        pages: int = 4,
        strided: bool = False,
        padding: int = 0,
    ) -> None:
        draw = Draw(1)
        layout = index_layout(id, DIM)
        requests = len(visible)
        blocks = requests * pages + 1
        rows = draw.normal(blocks, block_size, DIM)
        self.cache: KVCache = make_cache(layout, rows, strided=strided)
        self.stored = layout.unpack(self.cache.parts, None).flatten(0, 1).double()
        order = draw.permutation(blocks)[: requests * pages]
        self.table = order.to(torch.int32).view(requests, pages)
        starts = list(itertools.accumulate((len(v) for v in visible), initial=0))
        self.query_start = torch.tensor(starts, dtype=torch.int32)
        flat = [n for rows_of in visible for n in rows_of] + [0] * padding
        self.visible = torch.tensor(flat, dtype=torch.int32)
        self.max_rows = max(len(v) for v in visible)
        self.block_size, self.columns = block_size, pages * block_size

    def slots(self, row: int) -> list[int]:
        request = reference.request_of(self.query_start.tolist(), row)
        if request is None:
            return []
        size = self.block_size
        seen = range(min(int(self.visible[row]), self.columns))
        return [int(self.table[request, p // size]) * size + p % size for p in seen]

    def run(self, q: Tensor, weights: Tensor, max_rows: int | None = None) -> Tensor:
        rows = max_rows or self.max_rows
        return indexer_logits(
            q, weights, SCALE, self.cache, self.table, self.query_start, self.visible, rows
        )


def check_logits(
    batch: Batch, dtype: torch.dtype = torch.float32, max_rows: int | None = None, sign: float = 0
) -> None:
    draw = Draw(2)
    rows = batch.visible.shape[0]
    q = draw.normal(rows, HEADS, DIM, dtype=dtype)
    weights = draw.normal(rows, HEADS)
    if sign:
        weights = weights.abs() * sign
    seen = [batch.slots(t) for t in range(rows)]
    unseen = set(range(batch.stored.shape[0])) - {s for row in seen for s in row}
    poison(batch.cache, sorted(unseen))
    scores = batch.run(q, weights, max_rows)
    assert scores.shape == (rows, batch.columns)
    assert scores.dtype == torch.float32
    used = q.double() if batch.cache.layout.fp8 is None else quantised_query(q)
    for t, slots in enumerate(seen):
        want = torch.full((batch.columns,), -INF, dtype=torch.float64)
        size = torch.zeros(batch.columns, dtype=torch.float64)
        for column, slot in enumerate(slots):
            products = used[t] * batch.stored[slot]
            heads = weights[t].double() * SCALE * products.sum(-1).clamp(min=0)
            want[column] = heads.sum()
            size[column] = (weights[t].double().abs() * SCALE * products.abs().sum(-1)).sum()
        assert_close(scores[t], want, size, DIM * HEADS)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("id", INDEX_IDS)
def test_layouts(id: str, strided: bool) -> None:
    check_logits(Batch(RAGGED, id, strided=strided))


@pytest.mark.parametrize("id", INDEX_IDS)
def test_block_sizes(id: str) -> None:
    multiple = index_layout(id, DIM).block_multiple
    for block_size, pages in ((1, 70), (16, 5), (61, 2), (64, 2)):
        if block_size % multiple == 0:
            check_logits(Batch(RAGGED, id, block_size, pages))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("id", ["planar_f32", "fp32"])
def test_dtypes_and_padding(id: str, dtype: torch.dtype) -> None:
    check_logits(Batch(RAGGED, id, padding=3), dtype)
    check_logits(Batch(RAGGED, id), dtype, max_rows=20)


def test_any_scale_of_a_key_is_read() -> None:
    """Another writer's scales need not be powers of two."""
    batch = Batch([[64]])
    size = batch.block_size
    scales = batch.cache.parts[0][:, size * DIM :]
    factor = Draw(3).uniform(*scales.view(torch.float32).shape) + 0.5
    scales.copy_((scales.contiguous().view(torch.float32) * factor).view(torch.uint8))
    batch.stored = batch.cache.layout.unpack(batch.cache.parts, None).flatten(0, 1).double()
    check_logits(batch)


def test_tiles_of_requests_rows_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 2, 3):
        monkeypatch.setattr(
            indexer, "tile_size", lambda count, each, budget=0, size=size: min(count, size)
        )
        check_logits(Batch([[60, 61, 62, 63, 64], [5], [0, 33]]))


def test_a_visible_nan_shows_and_stays_in_its_column() -> None:
    batch = Batch([[64], [64]])
    poison(batch.cache, [batch.slots(0)[20]])
    scores = batch.run(Draw(4).normal(2, HEADS, DIM), Draw(5).normal(2, HEADS))
    assert scores.isnan().nonzero().tolist() == [[0, 20]]


@pytest.mark.parametrize("junk", [NAN, INF])
def test_a_row_without_weight_still_has_scores_of_its_own(junk: float) -> None:
    batch = Batch([[64], [64]], "fp32")
    weights = Draw(6).normal(2, HEADS)
    weights[0] = junk
    q = Draw(7).normal(2, HEADS, DIM)
    scores = batch.run(q, weights)
    assert torch.isfinite(scores[1]).all()


@pytest.mark.parametrize("id", INDEX_IDS)
def test_a_positive_factor_of_the_query_keeps_the_order(id: str) -> None:
    """Each score is linear in the query's length: a power of two changes nothing else."""
    batch = Batch([[64]], id)
    q, weights = Draw(8).normal(1, HEADS, DIM), Draw(9).normal(1, HEADS)
    assert torch.equal(batch.run(q * 4, weights), batch.run(q, weights) * 4)


def length_zero() -> None:
    check_logits(Batch([[0]] * 32))
    check_logits(Batch([[0], [0], [5], [0]], padding=2))


CORNERS: dict[str, dict[str, Check]] = {
    "indexer_logits": {
        "length 0": length_zero,
        "ragged lengths": lambda: check_logits(Batch(RAGGED)),
        "page edge": lambda: check_logits(Batch([[15], [16], [17], [64], [70]])),
        "negative weights": lambda: check_logits(Batch(RAGGED), sign=-1),
        "several rows a request": lambda: check_logits(Batch([[3, 4, 5, 6], [1], [60, 61]])),
    }
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
