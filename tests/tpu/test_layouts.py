"""Layouts of TPUs, byte by byte."""

from __future__ import annotations

import pytest
import torch

from ml4core.api import KVCache, KVLayout, ModelSpec
from ml4core.compose.ops import COMPOSED
from ml4core_tpu.layouts import lane33_layout, layer_bytes, tiles_layout

ONE = 0x38  # 1.0 as E4M3
SCALE = torch.tensor([0.5])


def test_a_token_is_a_tile_and_four_share_a_rope_tile() -> None:
    """Golden page: token t holds 1, 2, 4 and 8 times its place in the four bands of its tile."""
    layout = tiles_layout()
    rows = torch.zeros(1, 8, 576)
    for token in range(8):
        for band in range(4):
            rows[0, token, 128 * band : 128 * (band + 1)] = 2.0 ** (band - 1)
        rows[0, token, 512:] = 2.0 ** (token - 1)
    latent, rope = layout.pack(rows, SCALE)
    tiles = latent.view(1, 8, 4, 128)
    assert latent.shape == (1, 8, 512)
    assert rope.shape == (1, 8, 128)
    for band in range(4):
        assert (tiles[0, :, band] == ONE + 8 * band).all()
    shared = rope.view(1, 2, 4, 128)
    for token in range(8):
        assert (shared[0, token // 4, token % 4, :64] == ONE + 8 * token).all()
        assert (shared[0, token // 4, token % 4, 64:] == 0).all()
    assert torch.equal(layout.unpack((latent, rope), SCALE), rows)


def test_index_keys_lie_along_the_lanes() -> None:
    """Golden page: value d of token t is byte [d / 4, d % 4, t]; its scale byte 128."""
    layout = lane33_layout()
    rows = torch.zeros(2, 128, 128)
    rows[1, 7, 0], rows[1, 7, 5], rows[1, 7, 127] = 448.0, 1.0, -2.0
    (keys,) = layout.pack(rows, None)
    assert keys.shape == (2, 132, 128)
    groups = keys.view(2, 33, 4, 128)
    assert (groups[1, 0, 0, 7], groups[1, 1, 1, 7], groups[1, 31, 3, 7]) == (0x7E, ONE, 0xC0)
    assert groups[1, 32, 0, 7] == 127  # 2**0
    assert groups[1, 32, 0, 6] == 127 - 22  # of a key of zeros: 2**ceil(log2(1e-4 / 448))
    assert (groups[:, 32, 1:] == 0).all()
    assert torch.equal(layout.unpack((keys,), None), rows)


@pytest.mark.parametrize("layout", [tiles_layout(), tiles_layout(512, 0), lane33_layout()])
def test_composed_writes_read_back(layout: KVLayout) -> None:
    """Core's own ops serve the layouts too: they say how single rows are encoded."""
    size, blocks = 8, 3
    parts = tuple(
        torch.full(part.shape(blocks, size), 0xA5, dtype=torch.uint8) for part in layout.parts
    )
    cache = KVCache(layout, size, parts, SCALE if layout.role == "latent" else None)
    rows = torch.randint(-3, 4, (3, layout.width)).float()
    slots = torch.tensor([5, -1, 17])
    if layout.role == "latent":
        COMPOSED["kv_write"](cache, slots, rows[:, :512], rows[:, 512:])
    else:
        COMPOSED["indexer_write"](cache, slots, rows)
    found = COMPOSED["gather_kv"](cache, slots.to(torch.int32))
    assert torch.equal(found[[0, 2]], rows[[0, 2]])
    assert (found[1] == 0).all()
    every = layout.unpack(cache.parts, cache.scale).flatten(0, 1)
    assert torch.equal(every[[5, 17]], rows[[0, 2]])


def test_bytes_of_the_published_model(published: ModelSpec) -> None:
    """46,128 bytes a token with the rope tile on every owner; 44,976 where layers without rope have
    none.
    """
    layers = published.layers
    whole = sum(
        tiles_layout().bytes_per_token * layer.owns_kv + layer_bytes(layer, "index")
        for layer in layers
    )
    own = sum(layer_bytes(layer, "latent") + layer_bytes(layer, "index") for layer in layers)
    assert (whole, own) == (46_128, 44_976)


def test_widths_that_no_tile_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128 values"):
        tiles_layout(320, 64)
    with pytest.raises(ValueError, match="rope parts of 128 at most"):
        tiles_layout(512, 192)
    with pytest.raises(ValueError, match="multiple of 4"):
        tiles_layout().pack(torch.zeros(1, 6, 576), SCALE)
