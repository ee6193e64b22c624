"""What the suite's cases don't reach: splits, rounds of top-k, long chunks, slots in one go."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout, latent_layout

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

BLOCK = 16


def latents(device: torch.device, blocks: int, draw: torch.Generator) -> KVCache:
    layout = latent_layout("fp8_ds_mla")
    parts = layout.pack(torch.randn(blocks, BLOCK, layout.width, generator=draw), None)
    return KVCache(layout, BLOCK, tuple(part.to(device) for part in parts))


def attended(q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = 0.04 * (q.double() @ keys.double().T)
    return torch.softmax(scores, -1) @ keys[:, :512].double(), torch.logsumexp(scores, -1)


@pytest.mark.parametrize(
    ("splits", "form", "integers"), [(1, 0, 0), (5, 0, 0), (1, 1, 1), (2, 1, 0), (3, 1, 1)]
)
def test_splits_join_to_the_whole(
    device: torch.device, splits: int, form: int, integers: int
) -> None:
    from ml4core_cuda.kernels import sparse_mla as module
    from ml4core_cuda.tuned import forced, sizes_of

    draw = torch.Generator().manual_seed(splits)
    cache = latents(device, 16, draw)
    keys, warps = (128, 8) if form else (32, 4)
    tiling = module.Tiling(16, keys, splits, warps, 2 - form, form=form, integers=integers)
    q = torch.randn(3, 8, 576, generator=draw).bfloat16()
    slots = torch.stack([torch.randperm(256, generator=draw)[:160] for _ in range(3)]).int()
    lens = torch.tensor([160, 33, 0], dtype=torch.int32)  # the last splits have no key
    with forced("sparse_mla", module.shape_key("fp8_ds_mla", 3, 8, 160), sizes_of(tiling)):
        out, lse = module.sparse_mla(q.to(device), cache, slots.to(device), lens.to(device), 0.04)
    rows = cache.layout.unpack(cache.parts, None).flatten(0, 1).cpu()
    for t in range(2):
        want, sums = attended(q[t], rows[slots[t, : lens[t]].long()])
        assert float((out[t].cpu().double() - want).norm() / want.norm()) < 4e-3
        assert torch.allclose(lse[t].cpu().double(), sums, rtol=1e-5, atol=1e-5)
    assert not out[2].any()
    assert bool(torch.isneginf(lse[2]).all())


@pytest.mark.parametrize("integers", [0, 1])
def test_many_heads_meet_keys_in_one_tile(device: torch.device, integers: int) -> None:
    from ml4core_cuda.kernels import sparse_mla as module
    from ml4core_cuda.tuned import forced, sizes_of

    draw = torch.Generator().manual_seed(7)
    cache = latents(device, 8, draw)
    tiling = module.Tiling(64, 32, 2, 8, 1, form=1, integers=integers)
    q = torch.randn(2, 40, 576, generator=draw).bfloat16()
    slots = torch.stack([torch.randperm(128, generator=draw)[:70] for _ in range(2)]).int()
    slots[0, ::7] = torch.tensor([-1, 128, 2**31 - 1, -(2**31), -1, 10**6, 128, -9, 128, -1]).int()
    lens = torch.tensor([70, 41], dtype=torch.int32)
    with forced("sparse_mla", module.shape_key("fp8_ds_mla", 2, 40, 70), sizes_of(tiling)):
        out, lse = module.sparse_mla(q.to(device), cache, slots.to(device), lens.to(device), 0.04)
    rows = cache.layout.unpack(cache.parts, None).flatten(0, 1).cpu()
    for t in range(2):
        own = slots[t, : lens[t]].long()
        want, sums = attended(q[t], rows[own[(own >= 0) & (own < 128)]])
        assert float((out[t].cpu().double() - want).norm() / want.norm()) < 4e-3
        assert torch.allclose(lse[t].cpu().double(), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [8, 64])
def test_a_key_with_nan_spoils_the_rows_that_see_it(device: torch.device, heads: int) -> None:
    from ml4core_cuda.kernels import sparse_mla as module
    from ml4core_cuda.tuned import forced, sizes_of

    draw = torch.Generator().manual_seed(heads)
    cache = latents(device, 4, draw)
    cache.parts[0].view(4 * BLOCK, -1)[9, 333] = 0xFF
    q = torch.randn(2, heads, 576, generator=draw).bfloat16().to(device)
    slots = torch.arange(20, dtype=torch.int32, device=device).repeat(2, 1)
    lens = torch.tensor([20, 9], dtype=torch.int32, device=device)
    tile, keys = (64, 64) if heads > 32 else (16, 128)
    for sizes in (
        module.Tiling(tile, keys, 1, 8, 1, form=1, integers=0),
        module.Tiling(tile, keys, 1, 8, 1, form=1, integers=1),
        module.Tiling(heads, 64, 1, 8, 1, form=2),  # the default where it isn't served
    ):
        key = module.shape_key("fp8_ds_mla", 2, heads, 20)
        with forced("sparse_mla", key, sizes_of(sizes)):
            out, lse = module.sparse_mla(q, cache, slots, lens, 0.04)
        assert bool(out[0].isnan().any(-1).all())
        assert bool(lse[0].isnan().all())
        assert not out[1].isnan().any()


def test_scores_by_pages_are_those_of_any_tile(device: torch.device) -> None:
    from ml4core_cuda.kernels import indexer_logits as module
    from ml4core_cuda.tuned import forced

    draw = torch.Generator().manual_seed(4)
    layout = index_layout("planar_f32")
    parts = layout.pack(torch.randn(6, 64, 128, generator=draw), None)
    cache = KVCache(layout, 64, tuple(part.to(device) for part in parts))
    q = torch.randn(6, 8, 128, generator=draw).to(device)
    weights = torch.randn(6, 8, generator=draw).to(device)
    table = torch.tensor([[1, 2, -1], [3, 99, 4]], dtype=torch.int32, device=device)
    start = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)  # the last row is nobody's
    visible = torch.tensor([60, 61, 62, 191, 192, 7], dtype=torch.int32, device=device)
    found = []
    for paged in (1, 0):
        sizes = {"paged": paged, "keys": 64, "waves": 1}
        with forced("indexer_logits", module.shape_key(6, 8, 192, 3), sizes):
            found.append(module.indexer_logits(q, weights, 0.1, cache, table, start, visible, 3))
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert bool(torch.isneginf(found[0][5]).all())


@pytest.mark.parametrize("kind", ["normal", "tied", "crowded"])
def test_topk_by_a_sieve(device: torch.device, kind: str) -> None:
    """Long enough for a second reading; scores that tie at the border; more that reach the floor
    than the list holds. In one part and in two.
    """
    from ml4core_cuda.kernels import topk as module
    from ml4core_cuda.tuned import forced

    draw = torch.Generator().manual_seed(5)
    columns, k = 4200, 300
    scores = torch.randn(2, columns, generator=draw)
    if kind == "tied":
        scores = scores.clamp(max=1.0).relu()
        scores[0, 77] = float("nan")
        scores[1, ::2] = float("-inf")
    elif kind == "crowded":
        scores = scores.abs() + 10.0 * (torch.arange(columns) % 1024 < 290)
    visible = torch.tensor([columns, 4101], dtype=torch.int32)
    for entries in (8192, 4096):
        with forced("topk", module.shape_key(2, columns, k), {"entries": entries}):
            positions, lens, nans = module.topk(scores.to(device), visible.to(device), k)
        for t in range(2):
            own = scores[t, : visible[t]].nan_to_num(-1e9, float("inf"), float("-inf"))
            want = torch.sort(own, descending=True, stable=True)[1][:k].sort()[0]
            assert positions[t].tolist() == want.tolist()
        assert lens.tolist() == [k, k]
        assert nans.tolist() == [kind == "tied", False]


@pytest.mark.parametrize("tile", [256, 1024])
def test_topk_in_several_rounds(
    device: torch.device, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ml4core_triton.kernels import topk as module

    monkeypatch.setattr(module, "TILE", tile)
    draw = torch.Generator().manual_seed(tile)
    scores = torch.randint(-40, 40, (4, 3000), generator=draw).float()  # ties everywhere
    scores[2, ::3] = float("nan")
    visible = torch.tensor([3000, 700, 2999, 0], dtype=torch.int32)
    table = torch.randperm(4 * 188, generator=draw).view(4, 188).int()
    request = torch.tensor([2, 0, 1, 3])
    found = module.choose(
        *(scores.to(device), visible.to(device), 50, table.to(device), request.to(device), 16)
    )
    for t in range(4):
        own = scores[t, : visible[t]]
        order = [s for s in range(len(own)) if own[s] == own[s]]
        want = sorted(sorted(order, key=lambda s, own=own: (-float(own[s]), s))[:50])
        assert found.positions[t].tolist() == want + [-1] * (50 - len(want))
        assert int(found.lens[t]) == len(want)
        assert found.slots is not None
        pages = table[request[t]]
        slots = [int(pages[p // 16]) * 16 + p % 16 for p in want]
        assert found.slots[t].tolist() == slots + [-1] * (50 - len(want))
    assert found.has_nan.tolist() == [False, False, True, False]


def test_topk_refuses_what_no_tile_holds(device: torch.device) -> None:
    from ml4core_triton.kernels.topk import topk

    with pytest.raises(ValueError, match="top-k of 5000; the kernel keeps 1 to 4096"):
        topk(torch.zeros(1, 8, device=device), torch.ones(1, device=device).int(), 5000)


def test_scores_of_a_packed_scale_are_those_of_the_plain_one(device: torch.device) -> None:
    """UE8M0 scales, which only newer GPUs declare, by the same kernels."""
    from ml4core_cuda.kernels.indexer_logits import indexer_logits
    from ml4core_triton.kernels.indexer_write import indexer_write

    draw = torch.Generator().manual_seed(1)
    key = torch.randn(40, 128, generator=draw).to(device)
    slots = (torch.randperm(48, generator=draw)[:40] + BLOCK).to(device)
    found = []
    for id in ("planar_f32", "planar_ue8m0x4"):
        layout = index_layout(id)
        part = torch.zeros(layout.parts[0].shape(4, BLOCK), dtype=torch.uint8, device=device)
        cache = KVCache(layout, BLOCK, (part,))
        indexer_write(cache, slots, key)
        q = torch.randn(3, 4, 128, generator=torch.Generator().manual_seed(2)).to(device)
        weights = torch.ones(3, 4, device=device)
        table = torch.tensor([[1, 2, 3]], dtype=torch.int32, device=device)
        start = torch.tensor([0, 3], dtype=torch.int32, device=device)
        visible = torch.tensor([40, 41, 42], dtype=torch.int32, device=device)
        found.append(indexer_logits(q, weights, 0.1, cache, table, start, visible, 3))
        packed = layout.pack(torch.zeros(4, BLOCK, 128), None)[0]
        assert part.shape == packed.shape
    assert torch.equal(found[0], found[1])
    assert bool((found[0][0, :40] != 0).any())


def test_a_key_that_no_row_sees_may_hold_anything(device: torch.device) -> None:
    """Windows of one request that lie apart, NaN between them."""
    from ml4core_cuda.kernels.window_mla import window_mla

    draw = torch.Generator().manual_seed(3)
    cache = latents(device, 9, draw)
    rows = cache.layout.unpack(cache.parts, None).flatten(0, 1).cpu()
    part = cache.parts[0].clone()
    part.view(9 * BLOCK, -1)[BLOCK + 10 : BLOCK + 100] = 0xFF
    cache = dataclasses.replace(cache, parts=(part,))
    q = torch.randn(2, 8, 576, generator=draw).bfloat16()
    table = torch.arange(1, 9, dtype=torch.int32).view(1, 8)
    start = torch.tensor([0, 2], dtype=torch.int32)
    visible = torch.tensor([5, 104], dtype=torch.int32)
    out, _ = window_mla(
        *(q.to(device), cache, table.to(device), start.to(device), visible.to(device), 2, 0.04, 4)
    )
    for t in range(2):
        last = int(visible[t])
        want, _ = attended(q[t], rows[BLOCK + last - 4 : BLOCK + last])
        assert float((out[t].cpu().double() - want).norm() / want.norm()) < 4e-3


def test_layouts_that_are_not_read_are_named(device: torch.device) -> None:
    from ml4core_cuda.kernels.indexer_logits import indexer_logits
    from ml4core_triton.kernels.kv_write import kv_write
    from ml4core_triton.kernels.target import Target, ahead

    layout = latent_layout("e4m3fnuz")
    part = torch.zeros(layout.parts[0].shape(1, BLOCK), dtype=torch.uint8, device=device)
    cache = KVCache(layout, BLOCK, (part,))
    slots, latent = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 512)
    wanted = pytest.raises(
        ValueError, match="fp8_ds_mla, e4m3, bf16, fp32; the cache is 'e4m3fnuz'"
    )
    with ahead(Target("sm_90", 132)), wanted:
        kv_write(cache, slots.to(device), latent.to(device))
    tiled = index_layout("tiled16_f32")
    part = torch.zeros(tiled.parts[0].shape(1, BLOCK), dtype=torch.uint8, device=device)
    q, weights = torch.zeros(1, 32, 128, device=device), torch.zeros(1, 32, device=device)
    ints = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="the cache is 'tiled16_f32'"):
        indexer_logits(q, weights, 1.0, KVCache(tiled, BLOCK, (part,)), ints, ints[0], ints[0], 1)
