"""Where each byte of an index page lies."""

from __future__ import annotations

import struct

import pytest
import torch

from ml4core.formats import index_pages

pages = pytest.mark.parametrize(
    ("order", "block_size"),
    [("planar", 1), ("planar", 61), ("planar", 64), ("tiled16", 16), ("tiled16", 64)],
)


def test_golden_tiled_offsets():
    offsets = index_pages.value_offsets(64, "tiled16")
    assert offsets.dtype == torch.int64
    where = [(0, 0), (0, 15), (0, 16), (1, 0), (15, 127), (16, 0), (63, 127)]
    assert [offsets[b, d].item() for b, d in where] == [0, 15, 256, 16, 2047, 2048, 8191]


def test_golden_planar_offsets():
    offsets = index_pages.value_offsets(64, "planar")
    where = [(0, 0), (0, 127), (1, 0), (63, 127)]
    assert [offsets[b, d].item() for b, d in where] == [0, 127, 128, 8191]


@pages
def test_each_byte_of_a_page_is_used_once(order, block_size):
    values = index_pages.value_offsets(block_size, order).flatten().tolist()
    scales = index_pages.scale_offsets(block_size).flatten().tolist()
    assert sorted(values) == list(range(block_size * 128))
    assert scales == list(range(block_size * 128, index_pages.page_bytes(block_size)))


@pages
@pytest.mark.parametrize("form", ["f32", "ue8m0x4"])
def test_pages(order, block_size, form):
    generator = torch.Generator().manual_seed(block_size)
    code = torch.randint(0, 256, (3, block_size, 128), dtype=torch.uint8, generator=generator)
    exponent = torch.randint(-22, 9, (3, block_size), generator=generator)
    scale = torch.exp2(exponent.float())
    page = index_pages.pack_page(code, scale, order, form)
    assert page.dtype == torch.uint8
    assert page.shape == (3, block_size * 132)
    expected = [0] * (block_size * 132)
    for b in range(block_size):
        for d in range(128):
            at = b * 128 + d
            if order == "tiled16":
                at = b // 16 * 2048 + d // 16 * 256 + b % 16 * 16 + d % 16
            expected[at] = code[1, b, d].item()
        e = int(exponent[1, b])
        stored = struct.pack("<f", 2.0**e) if form == "f32" else bytes([e + 127] * 4)
        expected[block_size * 128 + 4 * b : block_size * 128 + 4 * b + 4] = stored
    assert page[1].tolist() == expected
    back_code, back_scale = index_pages.unpack_page(page, order, form)
    assert torch.equal(back_code, code)
    assert torch.equal(back_scale, scale)


def test_one_byte_order_is_not_the_other():
    code = torch.arange(16 * 128, dtype=torch.int32).to(torch.uint8).view(16, 128)
    page = index_pages.pack_page(code, torch.ones(16), "tiled16", "f32")
    assert not torch.equal(index_pages.unpack_page(page, "planar", "f32")[0], code)
    assert (index_pages.unpack_page(page, "tiled16", "ue8m0x4")[1] != 1.0).all()


def test_any_float32_scale_is_kept():
    scale = torch.tensor([[0.3, 1e-38], [-1.0, 7.0]])
    stored = index_pages.encode_scale(scale, "f32")
    assert stored.shape == (2, 2, 4)
    assert torch.equal(index_pages.decode_scale(stored, "f32"), scale)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="block size of a tiled16 page is 24, not a multiple of"):
        index_pages.value_offsets(24, "tiled16")
    with pytest.raises(ValueError, match=r"unknown order 'swizzled'.*known: planar, tiled16"):
        index_pages.value_offsets(16, "swizzled")
    with pytest.raises(ValueError, match=r"unknown scale form 'e8m0'.*known: f32, ue8m0x4"):
        index_pages.encode_scale(torch.ones(1), "e8m0")
    with pytest.raises(ValueError, match=r"unknown scale form 'e8m0'.*known: f32, ue8m0x4"):
        index_pages.decode_scale(torch.ones(4, dtype=torch.uint8), "e8m0")
    with pytest.raises(ValueError, match="index page in bytes is 131, not a multiple of 132"):
        index_pages.unpack_page(torch.zeros(131, dtype=torch.uint8), "planar", "f32")
