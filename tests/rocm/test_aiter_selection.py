"""AITER's index scores and top-k against a fake, and beside our own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout

from .fake_aiter import Fake

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

BLOCK = 16


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keys(random: torch.Generator, layout: str = "tiled16_f32", blocks: int = 6) -> KVCache:
    found = index_layout(layout)
    rows = torch.randn(blocks, BLOCK, 128, generator=random)
    return KVCache(found, BLOCK, found.pack(rows, None))


@pytest.mark.parametrize("each", [1, 2, 3, 5])
def test_windows_of_any_length(aiter: Fake, each: int) -> None:
    """B009: of a window's rows each sees a key more; the library is told one length for all."""
    from ml4core_rocm.kernels.aiter_logits import paged_scores
    from ml4core_rocm.kernels.indexer_logits import indexer_logits

    random = draw(each)
    cache = keys(random)
    table = torch.tensor([[3, 1], [4, 5]], dtype=torch.int32)
    last = torch.tensor([[29], [each]], dtype=torch.int32)
    visible = (last - torch.arange(each - 1, -1, -1, dtype=torch.int32)).flatten()
    q, weights = torch.randn(2 * each, 4, 128, generator=random), torch.ones(2 * each, 4)
    found = paged_scores(q, weights, 0.1, cache, table, visible, each)
    start = torch.tensor([0, each, 2 * each], dtype=torch.int32)
    want = indexer_logits(q, weights, 0.1, cache, table, start, visible, each)
    for t, seen in enumerate(visible.tolist()):
        assert torch.allclose(found[t, :seen], want[t, :seen], rtol=1e-5, atol=1e-6)
    lengths = aiter.last("deepgemm_fp8_paged_mqa_logits")["context_lens"]
    assert lengths.tolist() == last.flatten().tolist()


def test_paged_scores_are_ours(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_logits import paged_scores
    from ml4core_rocm.kernels.indexer_logits import indexer_logits

    random = draw(8)
    cache = keys(random)
    table = torch.tensor([[3, 1], [0, 4], [2, 0]], dtype=torch.int32)
    visible = torch.tensor([20, 21, 5, 6, 0, 0], dtype=torch.int32)  # the last request is padding
    q = torch.randn(6, 4, 128, generator=random)
    weights = torch.randn(6, 4, generator=random)
    found = paged_scores(q, weights, 0.1, cache, table, visible, 2)
    start = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    want = indexer_logits(q, weights, 0.1, cache, table, start, visible, 2)
    for t, seen in enumerate(visible.tolist()):
        assert torch.allclose(found[t, :seen], want[t, :seen], rtol=1e-5, atol=1e-6)
    assert aiter.last("deepgemm_fp8_paged_mqa_logits")["Preshuffle"] is True


def test_pages_of_another_order_are_refused(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_logits import paged_scores

    random = draw(9)
    q, weights = torch.zeros(1, 4, 128), torch.zeros(1, 4)
    ints = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="planar_f32"):
        paged_scores(q, weights, 0.1, keys(random, "planar_f32"), ints[None], ints, 1)
    found = index_layout("tiled16_f32")
    odd = KVCache(found, 48, found.pack(torch.zeros(1, 48, 128), None))
    with pytest.raises(ValueError, match="48 keys"):
        paged_scores(q, weights, 0.1, odd, ints[None], ints, 1)


def test_gathered_scores_are_ours(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_logits import gathered_keys, run_scores
    from ml4core_rocm.kernels.indexer_logits import indexer_logits

    random = draw(10)
    cache = keys(random)
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    visible = torch.tensor([18, 19, 20, 7], dtype=torch.int32)
    request = torch.tensor([0, 0, 0, 1])
    q = torch.randn(4, 4, 128, generator=random)
    weights = torch.randn(4, 4, generator=random)
    starts = torch.tensor([0, 20, 27], dtype=torch.int32)
    gathered = gathered_keys(cache, table, starts, 40, 32)  # more memory than keys
    begins = starts[request]
    ends = begins + visible
    found = run_scores(q, weights, 0.1, gathered, begins, ends)
    want = indexer_logits(
        q, weights, 0.1, cache, table, torch.tensor([0, 3, 4], dtype=torch.int32), visible, 3
    )
    for t, seen in enumerate(visible.tolist()):
        own = found[t, int(begins[t]) : int(ends[t])]
        assert torch.allclose(own, want[t, :seen], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="powers of two"):
        run_scores(q[:, :3], weights[:, :3], 0.1, gathered, begins, ends)


def test_topk_is_stable_and_relative_to_the_row(aiter: Fake) -> None:
    """B001, B003: NaN is never chosen and is told; of equal scores the first ones are, in order."""
    from ml4core_rocm.kernels.aiter_topk import topk_rows, topk_windows

    random = draw(11)
    scores = torch.randint(0, 50, (3, 5000), generator=random).float()  # ties at the border
    scores[2, 100] = float("nan")
    begins = torch.tensor([700, 10, 0], dtype=torch.int32)
    ends = torch.tensor([4700, 1500, 3000], dtype=torch.int32)
    positions, lens, has_nan = topk_rows(scores.clone(), begins, ends, 4000)
    assert has_nan.tolist() == [False, False, True]
    assert lens.tolist() == [2048, 1490, 2048]
    for t in range(2):
        own = scores[t, begins[t] : ends[t]].tolist()
        want = sorted(sorted(range(len(own)), key=lambda s, own=own: (-own[s], s))[:2048])
        assert positions[t].tolist() == want + [-1] * (2048 - len(want))
    assert 100 not in positions[2].tolist()
    assert aiter.last("top_k_per_row_prefill")["stable"] is True
    visible = torch.tensor([2999, 3000, 0, 0], dtype=torch.int32)
    four = scores[torch.tensor([0, 0, 1, 1])]
    positions, lens, has_nan = topk_windows(four, visible, 2)
    assert lens.tolist() == [2048, 2048, 0, 0]
    for t in range(2):
        own = four[t, : visible[t]].tolist()
        want = sorted(sorted(range(len(own)), key=lambda s, own=own: (-own[s], s))[:2048])
        assert positions[t].tolist() == want
    assert positions[2:].eq(-1).all()
    assert not has_nan.any()


@pytest.mark.parametrize("column", [0, 63, 64, 599])
def test_nan_is_looked_for_in_a_rows_own_run(
    aiter: Fake, monkeypatch: pytest.MonkeyPatch, column: int
) -> None:
    """Wherever it stands there; what lies outside, as memory that no score was written to, is
    neither read nor changed, and no copy is made.
    """
    from ml4core_rocm.kernels import aiter_topk
    from ml4core_rocm.kernels.aiter_topk import topk_rows, topk_windows

    monkeypatch.setattr(aiter_topk, "_TILE", 64)
    scores = torch.randn(4, 1000, generator=draw(12))
    begins = torch.tensor([300, 0, 300, 9], dtype=torch.int32)
    ends = torch.tensor([900, 1000, 900, 9], dtype=torch.int32)
    scores[0, 300 + column] = float("nan")
    for t in range(4):
        scores[t, : begins[t]] = scores[t, ends[t] :] = float("nan")
    before = scores.clone()
    positions, _, has_nan = topk_rows(scores, begins, ends, 1000)
    assert has_nan.tolist() == [True, False, False, False]
    assert scores[0, 300 + column] == -torch.inf
    scores[0, 300 + column] = float("nan")
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))
    assert aiter.last("top_k_per_row_prefill")["logits"] is scores
    visible = ends - begins
    windows = torch.full((4, 1000), float("nan"))
    for t, seen in enumerate(visible.tolist()):
        windows[t, :seen] = before[t, begins[t] : ends[t]]
    other, _, has_nan = topk_windows(windows, visible, 1)
    assert torch.equal(other, positions)
    assert has_nan.tolist() == [True, False, False, False]


def test_a_row_of_a_wide_array_costs_its_own_run(
    aiter: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of scores of prompts only as many tiles are launched as the longest run may have."""
    from ml4core_rocm.kernels import aiter_topk

    grids: list[tuple[int, int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            grids.append(grid)
            return lambda *given, **named: None

    monkeypatch.setattr(aiter_topk, "nan_kernel", Kernel())
    scores = torch.zeros(3, 1 << 20)
    ends = torch.tensor([4, 5000, 9000], dtype=torch.int32)
    aiter_topk.topk_rows(scores, ends - 4, ends, 8192)
    assert grids == [(3, 2)]
