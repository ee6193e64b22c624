"""The kernels write the suite's golden pages byte by byte, and read them."""

from __future__ import annotations

import pytest
import torch

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.formats import e4m3
from ml4core_conformance import golden
from ml4core_triton.kernels.gather_kv import gather_kv
from ml4core_triton.kernels.indexer_write import indexer_write
from ml4core_triton.kernels.keys import LAYOUTS as KEYS
from ml4core_triton.kernels.kv_write import kv_write
from ml4core_triton.kernels.latents import LAYOUTS

LATENTS = [name for name in LAYOUTS if name != "fp8_ds_mla"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


@pytest.mark.parametrize(
    ("role", "id"),
    [("index", id) for id in KEYS] + [("latent", id) for id in LATENTS],
)
def test_pages(device: torch.device, role: str, id: str) -> None:
    if "fnuz" in id and device.type == "cuda" and torch.version.hip is None:
        pytest.skip("this GPU has no e4m3fnuz")
    want = golden.load(role, id)  # type: ignore[arg-type]
    size = golden.block_size(role, id)  # type: ignore[arg-type]
    layout = index_layout(id) if role == "index" else latent_layout(id)
    part = layout.parts[0]
    pages = torch.zeros(
        part.shape(golden.BLOCKS, size), dtype=getattr(torch, part.dtype), device=device
    )
    scale = torch.tensor([want.scale], device=device) if "e4m3" in id else None
    cache = KVCache(layout, size, (pages,), scale)
    slots, rows = want.slots.to(device), want.rows.to(device)
    if role == "index":
        indexer_write(cache, slots, rows)
    else:
        kv_write(cache, slots, rows[:, :512], rows[:, 512:])
    assert torch.equal(pages.view(golden.BLOCKS, -1).view(torch.uint8).cpu(), want.pages)
    read = layout.unpack((pages.cpu(),), None if scale is None else scale.cpu()).flatten(0, 1)
    assert torch.equal(gather_kv(cache, slots.int()).cpu(), read[want.slots])


@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
def test_every_byte_is_its_number(device: torch.device, flavour: str) -> None:
    """-0 and NaN too; and each number that FP8 has is written as its byte."""
    if flavour == "e4m3fnuz" and device.type == "cuda":
        pytest.skip("this GPU has no e4m3fnuz")
    layout = latent_layout("e4m3" if flavour == "e4m3fn" else flavour, 240, 16)
    bytes_ = torch.arange(256, dtype=torch.uint8, device=device).view(1, 1, 256)
    cache = KVCache(layout, 1, (bytes_,), torch.ones(1, device=device))
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    found = gather_kv(cache, slots)[0]
    want = e4m3.decode(bytes_.flatten().cpu(), flavour)
    real = ~want.isnan()
    assert torch.equal(found.isnan().cpu(), ~real)
    assert torch.equal(found.cpu().view(torch.int32)[real], want.view(torch.int32)[real])
    again = KVCache(layout, 1, (torch.zeros_like(bytes_),), cache.scale)
    kv_write(again, slots.long(), found[None, :240], found[None, 240:])
    assert torch.equal(again.parts[0].flatten().cpu(), e4m3.encode(want, flavour))
