"""The open cache layouts: sizes, bytes, refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ml4core.api import VOCABULARY
from ml4core.api.known_layouts import INDEX_IDS, LATENT_IDS, index_layout, latent_layout
from ml4core.formats import index_pages, kv_rows

from . import bytes_reference as reference
from .support import Draw


@pytest.mark.parametrize(
    ("id", "size"),
    [
        *(("fp8_ds_mla", 656), ("e4m3", 576), ("e4m3fnuz", 576), ("bf16", 1152), ("fp32", 2304)),
        ("nvfp4_ds_mla", 352),
    ],
)
def test_bytes_of_a_latent_row(id: str, size: int) -> None:
    layout = latent_layout(id)
    assert layout.bytes_per_token == size
    assert (layout.id, layout.role, layout.width) == (id, "latent", 576)
    assert [f.name for f in layout.fields if f.name != "scale"] == ["latent", "rope"]


@pytest.mark.parametrize(
    ("id", "size"),
    [
        *(("planar_f32", 132), ("planar_ue8m0x4", 132), ("tiled16_f32", 132), ("fp32", 512)),
        ("lane33_ue8m0", 132),
    ],
)
def test_bytes_of_an_index_key(id: str, size: int) -> None:
    layout = index_layout(id)
    assert layout.bytes_per_token == size
    assert (layout.id, layout.role, layout.width) == (id, "index", 128)


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 64), (128, 16), (384, 0)])
def test_bytes_follow_the_widths(latent: int, rope: int) -> None:
    def size(id: str) -> int:
        return latent_layout(id, latent, rope).bytes_per_token

    assert size("fp8_ds_mla") == latent + 4 * (latent // 128) + 2 * rope
    assert size("e4m3") == size("e4m3fnuz") == latent + rope
    assert size("bf16") == 2 * (latent + rope)
    assert size("fp32") == 4 * (latent + rope)


def test_every_layout_is_in_the_vocabulary() -> None:
    assert {f"kv:{id}" for id in LATENT_IDS} <= VOCABULARY
    assert {f"index:{id}" for id in INDEX_IDS} <= VOCABULARY


def test_equal_arguments_give_one_object() -> None:
    assert latent_layout("bf16", 32, 8) is latent_layout("bf16", 32, 8)
    assert index_layout("planar_f32") is index_layout("planar_f32")


def test_refusals_name_what_would_work() -> None:
    with pytest.raises(ValueError, match="unknown latent layout 'e5m2'; known: fp8_ds_mla, e4m3"):
        latent_layout("e5m2")
    with pytest.raises(ValueError, match="unknown index layout 'bf16'; known: planar_f32"):
        index_layout("bf16")
    with pytest.raises(ValueError, match="a latent of 192 is not a multiple"):
        latent_layout("fp8_ds_mla", 192)
    with pytest.raises(ValueError, match="a latent of 96 is not a multiple of that; layouts"):
        latent_layout("nvfp4_ds_mla", 96)
    with pytest.raises(ValueError, match="multiple of 16, got 40"):
        index_layout("tiled16_f32", 40)
    with pytest.raises(ValueError, match="multiple of 16, got 61"):
        index_layout("tiled16_f32").pack(torch.zeros(1, 61, 128), None)
    with pytest.raises(ValueError, match="has 576 values, got 512"):
        latent_layout("fp8_ds_mla").pack(torch.zeros(1, 1, 512), None)


def test_sizes_are_known_without_torch() -> None:
    code = (
        "import sys; from ml4core.api.known_layouts import latent_layout; "
        "assert latent_layout('fp8_ds_mla').bytes_per_token == 656; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def rows_of_every_magnitude(blocks: int, block_size: int, width: int) -> torch.Tensor:
    draw = Draw(1)
    exponents = draw.integers(-20, 8, blocks, block_size, 1)
    rows = draw.normal(blocks, block_size, width) * 2.0**exponents
    rows[0, 0] = 0
    return rows


@pytest.mark.parametrize("block_size", [1, 5])
@pytest.mark.parametrize("id", LATENT_IDS)
def test_latent_pages_byte_by_byte(id: str, block_size: int) -> None:
    layout = latent_layout(id, 128, 8)
    rows = rows_of_every_magnitude(2, block_size, 136)
    scale = torch.tensor([0.75]) if "e4m3" in id else None
    (packed,) = layout.pack(rows, scale)
    assert packed.shape == layout.parts[0].shape(2, block_size)
    token = reference.latent_token(id, 128)
    for page, got in enumerate(reference.pages_of(packed)):
        want = b"".join(token(row, 0.75) for row in rows[page].tolist())
        assert bytes(got) == want


@pytest.mark.parametrize(("id", "block_size"), [(id, 16) for id in INDEX_IDS] + [("planar_f32", 3)])
def test_index_pages_byte_by_byte(id: str, block_size: int) -> None:
    layout = index_layout(id, 32)
    rows = rows_of_every_magnitude(2, block_size, 32)
    (packed,) = layout.pack(rows, None)
    assert packed.shape == layout.parts[0].shape(2, block_size)
    token, offsets = reference.INDEX[id]
    pages = reference.pages_of(torch.zeros_like(packed))
    for page in range(2):
        for b, row in enumerate(rows[page].tolist()):
            data = token(row, 1.0)
            reference.write_token(pages, offsets(len(data), block_size, b), page, data)
    assert reference.pages_of(packed) == pages


def test_the_formats_package_writes_the_same_bytes() -> None:
    rows = rows_of_every_magnitude(2, 16, 576)
    packed = latent_layout("fp8_ds_mla").pack(rows, None)[0]
    assert torch.equal(packed, kv_rows.encode_fp8_ds_mla(rows))
    keys = rows[..., :128]
    code, scale = kv_rows.quantize_index(keys, "e4m3fn")
    for id, order, form in (
        ("planar_f32", "planar", "f32"),
        ("planar_ue8m0x4", "planar", "ue8m0x4"),
        ("tiled16_f32", "tiled16", "f32"),
        ("lane33_ue8m0", "lanes", "ue8m0"),
    ):
        packed = index_layout(id).pack(keys, None)[0].flatten(1)
        assert torch.equal(packed, index_pages.pack_page(code, scale, order, form))


@pytest.mark.parametrize("id", LATENT_IDS)
def test_unpack_undoes_pack(id: str) -> None:
    layout = latent_layout(id, 256, 16)
    scale = torch.tensor([2.0]) if "e4m3" in id else None
    rows = layout.unpack(layout.pack(Draw(2).normal(2, 4, 272), scale), scale)
    assert rows.dtype == torch.float32
    again = layout.unpack(layout.pack(rows, scale), scale)
    assert torch.equal(rows, again)
    close = Draw(2).normal(2, 4, 272)
    assert (rows - close).abs().max() <= {"bf16": 2.0**-7, "fp32": 0.0, "nvfp4_ds_mla": 0.75}.get(
        id, 0.25
    )


@pytest.mark.parametrize("id", INDEX_IDS)
def test_unpack_undoes_pack_of_keys(id: str) -> None:
    layout = index_layout(id, 64)
    rows = layout.unpack(layout.pack(Draw(3).normal(2, 32, 64), None), None)
    again = layout.unpack(layout.pack(rows, None), None)
    assert torch.equal(rows, again)
    assert (rows - Draw(3).normal(2, 32, 64)).abs().max() <= 0.25
