"""``sparse_mla`` over ``fp8_ds_mla`` by warps that decode while others attend, as Hopper runs it.

Its programs share two halves of memory, so loops of many tiles are what may go wrong.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import latent_layout

pytestmark = pytest.mark.accelerator

BLOCK, BLOCKS = 16, 160
SLOTS = BLOCK * BLOCKS
NONE = torch.tensor([-1, SLOTS, 2**31 - 1, -(2**31)], dtype=torch.int32)
LENS = (0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 575, 2047, 2048)
"""Ends of a tile of 64 keys, of both halves, and of their later turns."""


@pytest.fixture(scope="module")
def device() -> torch.device:
    from ml4core_cuda.kernels.target import gluon

    if torch.cuda.get_device_capability() != (9, 0) or not gluon():
        pytest.skip("needs a Hopper GPU, and a triton whose Gluon is known")
    return torch.device("cuda")


def latents(device: torch.device, draw: torch.Generator) -> KVCache:
    layout = latent_layout("fp8_ds_mla")
    parts = layout.pack(torch.randn(BLOCKS, BLOCK, layout.width, generator=draw), None)
    return KVCache(layout, BLOCK, tuple(part.to(device) for part in parts))


def choices(rows: int, draw: torch.Generator) -> Tensor:
    return torch.stack([torch.randperm(SLOTS, generator=draw)[:2048] for _ in range(rows)]).int()


def launched(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, splits: int
) -> tuple[Tensor, Tensor]:
    """out and lse, of the tiles that would be chosen for the heads."""
    from ml4core_cuda.kernels import warp_mla
    from ml4core_cuda.kernels.sparse_mla import latent_rows
    from ml4core_triton.kernels.merge_lse import merge

    (rows, heads, _), device = q.shape, cache.parts[0].device
    tile = 64 if heads > 32 else max(8, 1 << (heads - 1).bit_length())
    chunk = -(-slots.shape[1] // (64 * splits)) * 64
    parts, sums = warp_mla.launch(
        q.to(device), cache, latent_rows(cache), slots.to(device), lens.to(device), 0.04,
        (splits, chunk), heads=tile, ahead=False,
    )  # fmt: skip
    out, lse = merge(parts, sums, q.dtype) if splits > 1 else (parts[0], sums[0])
    return out.view(rows, heads, 512), lse.view(rows, heads)


def holds(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, out: Tensor, lse: Tensor) -> None:
    """Each row against fp64."""
    keys = cache.layout.unpack(cache.parts, None).flatten(0, 1).cpu().double()
    for t, length in enumerate(lens.tolist()):
        own = slots[t, :length].long()
        own = own[(own >= 0) & (own < SLOTS)]
        if not len(own):
            assert not out[t].any()
            assert bool(torch.isneginf(lse[t]).all())
            continue
        scores = 0.04 * (q[t].double() @ keys[own].T)
        want = torch.softmax(scores, -1) @ keys[own, :512]
        assert float((out[t].cpu().double() - want).norm() / want.norm()) < 4e-3, length
        assert torch.allclose(
            lse[t].cpu().double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("apart", [False, True], ids=["dense", "pages apart"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [3, 8, 16, 20, 32, 64, 72])
def test_lengths_around_whole_tiles(
    device: torch.device, heads: int, splits: int, apart: bool
) -> None:
    draw = torch.Generator().manual_seed(heads + splits)
    cache = latents(device, draw)
    if apart:
        wide = cache.parts[0].new_full((BLOCKS, BLOCK + 1, cache.parts[0].shape[2]), 0xFF)
        wide[:, :BLOCK] = cache.parts[0]
        cache = dataclasses.replace(cache, parts=(wide[:, :BLOCK],))
    q = torch.randn(len(LENS), heads, 576, generator=draw).bfloat16()
    slots, lens = choices(len(LENS), draw), torch.tensor(LENS, dtype=torch.int32)
    holds(q, cache, slots, lens, *launched(q, cache, slots, lens, splits))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 72])
def test_slots_that_are_none(device: torch.device, heads: int, splits: int) -> None:
    """Here and there; as whole tiles in front, in the middle and behind; and everywhere. What no
    row attends to is NaN.
    """
    draw = torch.Generator().manual_seed(heads)
    cache = latents(device, draw)
    q = torch.randn(6, heads, 576, generator=draw).bfloat16()
    slots = choices(6, draw)
    slots[0, ::7] = NONE.repeat(74)[: len(slots[0, ::7])]
    slots[1, :192] = NONE.repeat(48)
    slots[2, 640:832] = NONE.repeat(48)
    slots[3, 1024:] = NONE.repeat(256)
    slots[4] = NONE.repeat(512)
    lens = torch.tensor([2048, 2048, 2048, 2048, 2048, 700], dtype=torch.int32)
    unseen = torch.randperm(SLOTS, generator=draw)[:500]
    slots[torch.isin(slots, unseen.int())] = -1
    cache.parts[0].view(SLOTS, -1)[unseen.to(device)] = 0xFF
    out, lse = launched(q, cache, slots, lens, splits)
    assert not out.isnan().any()
    cache.parts[0].view(SLOTS, -1)[unseen.to(device)] = 0
    holds(q, cache, slots, lens, out, lse)


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_it_gives_the_same_bits_again(device: torch.device, heads: int) -> None:
    draw = torch.Generator().manual_seed(heads)
    cache = latents(device, draw)
    q = torch.randn(64, heads, 576, generator=draw).bfloat16().to(device)
    slots = choices(64, draw).to(device)
    lens = torch.randint(0, 2049, (64,), generator=draw).int().to(device)
    first = launched(q, cache, slots, lens, 2)
    for _ in range(100):
        out, lse = launched(q, cache, slots, lens, 2)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
