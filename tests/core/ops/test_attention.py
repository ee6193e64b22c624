"""Attention over chosen slots, and the join of parts, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import LATENT_IDS, latent_layout
from ml4core.compose.ops import COMPOSED

from . import references as reference
from .support import INF, NAN, Check, Draw, assert_close, corner_cases, make_cache, poison

sparse_mla, merge_lse = COMPOSED["sparse_mla"], COMPOSED["merge_lse"]

LATENT, ROPE = 128, 16
SCALE = 0.11


def cache_of(
    id: str = "fp32", blocks: int = 6, block_size: int = 16, strided: bool = False
) -> tuple[KVCache, Tensor]:
    """A cache of random rows, and what is stored, [slots, width]."""
    layout = latent_layout(id, LATENT, ROPE)
    rows = Draw(1).normal(blocks, block_size, layout.width)
    cache = make_cache(layout, rows, strided=strided, scale=0.5 if "e4m3" in id else None)
    return cache, layout.unpack(cache.parts, cache.scale).flatten(0, 1)


def valid_of(slots: list[int], length: int, capacity: int) -> list[int]:
    return [s for s in slots[: max(length, 0)] if 0 <= s < capacity]


def check_sparse(
    cache: KVCache, stored: Tensor, q: Tensor, slots: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor]:
    """All slots not selected hold NaN while the op runs; then they are put back."""
    capacity = stored.shape[0]
    chosen = [
        valid_of(row, length, capacity)
        for row, length in zip(slots.tolist(), lens.tolist(), strict=True)
    ]
    backup = [part.clone() for part in cache.parts]
    poison(cache, sorted(set(range(capacity)) - {s for row in chosen for s in row}))
    out, lse = sparse_mla(q, cache, slots, lens, SCALE)
    for part, before in zip(cache.parts, backup, strict=True):
        part.copy_(before)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    for t, row in enumerate(chosen):
        want, want_lse, size, score_size = reference.attention(q[t], stored[row], LATENT, SCALE)
        assert_close(out[t], want, size, len(row) + q.shape[-1])
        assert_close(lse[t], want_lse, score_size, len(row) + q.shape[-1])
    return out, lse


def random_case(
    rows: int,
    heads: int,
    k: int,
    capacity: int,
    dtype: torch.dtype = torch.float32,
    rope: int = ROPE,
) -> tuple[Tensor, Tensor, Tensor]:
    draw = Draw(rows * 100 + k)
    q = draw.normal(rows, heads, LATENT + rope, dtype=dtype)
    slots = torch.stack([draw.permutation(capacity)[:k] for _ in range(rows)]).to(torch.int32)
    return q, slots, draw.integers(0, k + 1, rows).to(torch.int32)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 61, 64])
@pytest.mark.parametrize("id", LATENT_IDS)
def test_layouts_and_pages(id: str, block_size: int, strided: bool) -> None:
    cache, stored = cache_of(id, 4 if block_size > 1 else 90, block_size, strided)
    q, slots, lens = random_case(3, 2, 37, stored.shape[0])
    check_sparse(cache, stored, q, slots, lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [ROPE, 0])
def test_queries_with_and_without_rope(rope: int, dtype: torch.dtype) -> None:
    """The tail of a row that the query doesn't reach may hold anything."""
    cache, stored = cache_of()
    if rope == 0:
        cache.parts[0][..., LATENT:] = NAN
    check_sparse(cache, stored, *random_case(5, 3, 40, stored.shape[0], dtype, rope))


@pytest.mark.parametrize("rows", [1, 64, 65, 200])
def test_the_tail_behind_the_length_is_not_read(rows: int) -> None:
    """B016."""
    cache, stored = cache_of()
    q, slots, _ = random_case(rows, 1, 30, stored.shape[0])
    lens = torch.full((rows,), 11, dtype=torch.int32)
    want = sparse_mla(q, cache, slots, lens, SCALE)
    for tail in (-1, 0, 2**31 - 1):
        slots[:, 11:] = tail
        got = sparse_mla(q, cache, slots, lens, SCALE)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("valid", [1, 63, 64, 65, 729])
def test_what_is_not_selected_never_reaches_the_output(valid: int) -> None:
    """B020: bitwise the same, whatever lies there."""
    layout = latent_layout("fp8_ds_mla", LATENT, ROPE)
    cache = make_cache(layout, Draw(2).normal(14, 64, layout.width))
    q = Draw(3).normal(2, 2, layout.width)
    slots = torch.full((2, 800), -1, dtype=torch.int32)
    slots[:, :valid] = Draw(4).permutation(14 * 64)[:valid].to(torch.int32)
    lens = torch.full((2,), 800, dtype=torch.int32)
    want = sparse_mla(q, cache, slots, lens, SCALE)
    others = sorted(set(range(14 * 64)) - set(slots[0].tolist()))
    poison(cache, others)
    got = sparse_mla(q, cache, slots, lens, SCALE)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 3e38])
def test_any_value_may_lie_in_an_unselected_row(junk: float) -> None:
    cache, stored = cache_of()
    q, slots, lens = random_case(3, 2, 20, stored.shape[0])
    want = sparse_mla(q, cache, slots, lens, SCALE)
    used = {s for row, n in zip(slots.tolist(), lens.tolist(), strict=True) for s in row[:n]}
    poison(cache, sorted(set(range(stored.shape[0])) - used), junk)
    for got, clean in zip(sparse_mla(q, cache, slots, lens, SCALE), want, strict=True):
        assert torch.equal(got, clean)


def test_a_selected_nan_shows() -> None:
    cache, _ = cache_of()
    q, slots, _ = random_case(2, 2, 5, 96)
    poison(cache, slots[1, :1])
    out, lse = sparse_mla(q, cache, slots, torch.tensor([0, 5]), SCALE)
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert not out[0].isnan().any()


@pytest.mark.parametrize("size", [1, 3, 100])
def test_tiles_of_rows(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, stored = cache_of()
    case = random_case(7, 2, 25, stored.shape[0])
    monkeypatch.setattr("ml4core.compose.ops.attention.tile_size", lambda count, each: size)
    check_sparse(cache, stored, *case)


def test_large_scores_do_not_overflow() -> None:
    cache, stored = cache_of()
    q, slots, lens = random_case(3, 2, 25, stored.shape[0])
    check_sparse(cache, stored, q * 1000, slots, lens.clamp(min=1))


def place(valid: list[int], where: list[int], k: int) -> Tensor:
    slots = torch.full((1, k), -1, dtype=torch.int32)
    slots[0, where] = torch.tensor(valid, dtype=torch.int32)
    return slots


def leading_invalid() -> None:
    """B014: where the invalid slots stand makes no difference."""
    cache, stored = cache_of()
    q = Draw(5).normal(1, 2, LATENT + ROPE)
    valid = Draw(6).permutation(96)[:24].tolist()
    k = torch.tensor([192], dtype=torch.int32)
    places = {
        "front": list(range(24)),
        "behind 16": list(range(16, 40)),
        "behind 128": list(range(128, 152)),
        "back": list(range(168, 192)),
        "alternating": list(range(1, 49, 2)),
        "shuffled": Draw(7).permutation(192)[:24].tolist(),
    }
    for where in places.values():
        check_sparse(cache, stored, q, place(valid, where, 192), k)


def one_valid() -> None:
    cache, stored = cache_of()
    q = Draw(8).normal(1, 3, LATENT + ROPE)
    for where in (0, 60, 63):
        out, _ = check_sparse(
            cache, stored, q, place([17], [where], 64), torch.tensor([64], dtype=torch.int32)
        )
        torch.testing.assert_close(out[0], stored[17, :LATENT].expand(3, -1))


def no_valid() -> None:
    cache, stored = cache_of()
    q = Draw(9).normal(2, 2, LATENT + ROPE)
    slots = torch.full((2, 40), -1, dtype=torch.int32)
    out, lse = check_sparse(cache, stored, q, slots, torch.tensor([40, 7], dtype=torch.int32))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


def length_zero() -> None:
    """B011: no length, or one among zeros."""
    cache, stored = cache_of()
    q, slots, _ = random_case(32, 1, 12, stored.shape[0])
    for some in (0, 5):
        lens = torch.zeros(32, dtype=torch.int32)
        lens[9] = some
        check_sparse(cache, stored, q, slots, lens)


def hostile_slots() -> None:
    cache, stored = cache_of()
    q, slots, _ = random_case(3, 2, 30, stored.shape[0])
    slots[:, ::3] = torch.tensor([[-1], [96], [2**31 - 1]], dtype=torch.int32)
    slots[:, 1::3] = torch.tensor([[-(2**31)], [-2], [97]], dtype=torch.int32)
    lens = torch.tensor([30, 2**31 - 1, -5], dtype=torch.int32)
    check_sparse(cache, stored, q, slots, lens)


def heads() -> None:
    cache, stored = cache_of()
    for count in (1, 8, 64):
        check_sparse(cache, stored, *random_case(2, count, 20, stored.shape[0]))


def poisoned() -> None:
    for id in LATENT_IDS:
        cache, stored = cache_of(id)
        check_sparse(cache, stored, *random_case(3, 2, 20, stored.shape[0]))


def part_of(keys: int, seed: int) -> tuple[Tensor, Tensor]:
    """out [T, N, L] and lse [T, N] of attention over that many random keys."""
    draw = Draw(seed)
    scores, values = draw.normal(3, 2, keys) * 5, draw.normal(keys, 8)
    if keys == 0:
        return torch.zeros(3, 2, 8), torch.full((3, 2), -INF)
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


def check_merge(outs: Tensor, lses: Tensor, dtype: torch.dtype = torch.float32) -> None:
    outs = outs.to(dtype)
    got, lse = merge_lse(outs, lses)
    assert got.dtype == dtype
    assert lse.dtype == torch.float32
    used = torch.where((lses == -INF).unsqueeze(-1), 0.0, outs.double())
    want_lse = torch.logsumexp(lses.double(), 0)
    weights = torch.exp(lses.double() - want_lse).nan_to_num(0.0)
    want = (weights.unsqueeze(-1) * used).sum(0)
    size = (weights.unsqueeze(-1) * used.abs()).sum(0) * (1 + lses.nan_to_num(0, 0, 0).abs().max())
    assert_close(got, want, size, len(outs) + 4)
    assert_close(lse, want_lse, 1 + want_lse.nan_to_num(0, 0, 0).abs(), len(outs))


def parts_of(*counts: int) -> tuple[Tensor, Tensor]:
    parts = [part_of(keys, seed) for seed, keys in enumerate(counts)]
    return torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(5,), (3, 9), (1, 0, 7, 2), (4, 4, 4, 4, 0, 4, 4, 4)])
def test_merge(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    check_merge(*parts_of(*counts), dtype)


def test_the_order_of_parts_does_not_matter() -> None:
    outs, lses = parts_of(3, 0, 9, 40)
    out, lse = merge_lse(outs, lses)
    order = [2, 0, 3, 1]
    again = merge_lse(outs[order], lses[order])
    torch.testing.assert_close(out, again[0])
    torch.testing.assert_close(lse, again[1])


def empty_part() -> None:
    """B070: the other side comes back exactly."""
    outs, lses = parts_of(7, 0)
    for order in ([0, 1], [1, 0]):
        out, lse = merge_lse(outs[order], lses[order])
        assert torch.equal(out, outs[0])
        assert torch.equal(lse, lses[0])


def all_empty() -> None:
    out, lse = merge_lse(*parts_of(0, 0, 0))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


def nan_in_an_empty_part() -> None:
    for junk in (NAN, INF, -INF):
        outs, lses = parts_of(7, 0)
        outs[1] = junk
        out, lse = merge_lse(outs, lses)
        assert torch.equal(out, outs[0])
        assert torch.equal(lse, lses[0])
        out, lse = merge_lse(outs[1:], lses[1:])
        assert torch.equal(out, torch.zeros_like(out))


CORNERS: dict[str, dict[str, Check]] = {
    "sparse_mla": {
        "no valid slot": no_valid,
        "leading -1": leading_invalid,
        "one valid slot": one_valid,
        "length 0": length_zero,
        "hostile slots": hostile_slots,
        "poisoned unselected rows": poisoned,
        "heads 1, 8, 64": heads,
    },
    "merge_lse": {
        "one part": lambda: check_merge(*parts_of(6)),
        "empty part": empty_part,
        "all parts empty": all_empty,
        "NaN in an empty part": nan_in_an_empty_part,
    },
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
