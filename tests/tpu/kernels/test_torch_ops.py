"""The torch ops: what they say of their results without data, and what they may write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ml4core.api import Weight
from ml4core.compose.ops.weights import decode_weight, quantize
from ml4core.formats import e2m1
from ml4core_tpu import product_ops, torch_ops, torch_products, torch_writes
from ml4core_tpu.expert_weights import packed_experts
from ml4core_tpu.layouts import lane33_layout, tiles_layout

SCALE = torch.tensor([0.5])
ONE = torch.ones(1)
PAGE = 128


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def calls() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    torch.manual_seed(0)
    latents = list(tiles_layout().pack(torch.randn(2, PAGE, 576), SCALE))
    (keys,) = lane33_layout().pack(torch.randn(2, PAGE, 128), None)
    table, starts, visible = ints(1, 0).view(2, 1), ints(0, 1, 2), ints(100, 3)
    slots = ints(*range(8)).repeat(2, 1)
    q = torch.randn(2, 4, 576)
    codes = torch.randint(0, 0x7F, (128, 256), dtype=torch.uint8)
    return {
        "sparse_mla": (
            torch_ops.sparse_mla,
            [q, latents, SCALE, slots, ints(8, 0), "tiles", 512, 0.1],
        ),
        "window_mla": (
            torch_ops.window_mla,
            [q, latents, SCALE, table, starts, visible, "tiles", 512, 64, 1, 0.1, 0],
        ),
        "gather_kv": (torch_ops.gather_kv, [latents, SCALE, slots, "tiles", 512, 64]),
        "indexer_logits": (
            torch_ops.indexer_logits,
            [q[..., :128], torch.randn(2, 4), keys, table, starts, visible, "lane33", 1, 0.1],
        ),
        "topk": (torch_ops.topk, [torch.randn(2, PAGE), visible, 8]),
        "fp8_matmul": (
            torch_products.fp8_matmul,
            [q[:, 0, :256], codes, torch.ones(1, 2), torch.bfloat16, False],
        ),
        "router": (torch_products.router, [q[:, 0], torch.randn(8, 576), 2, True, 1.0]),
    }


@pytest.mark.parametrize("name", calls())
def test_shapes_are_known_without_data(name: str) -> None:
    """What a tracer is told is what a call returns."""
    op, arguments = calls()[name]
    found = op(*arguments)
    with FakeTensorMode() as mode:
        fake = op(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments))
    pairs = zip(*(one if isinstance(one, tuple) else (one,) for one in (found, fake)), strict=True)
    for real, told in pairs:
        assert (real.shape, real.dtype) == (told.shape, told.dtype)
        assert real.is_contiguous()


@pytest.mark.parametrize("format", ["fp8_block", "fp8_tensor"])
def test_fp8_experts_are_not_decoded_first(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """A stack of the published model in fp32 is 19 GB a layer."""
    draw = torch.Generator().manual_seed(0)
    stacks = [
        quantize(torch.randn(shape, generator=draw) / 8, format)
        for shape in ((3, 256, 192), (3, 192, 128))
    ]
    x, ids = torch.randn(5, 192, generator=draw), torch.tensor([[0, 2]] * 5)
    shares = torch.rand(5, 2, generator=draw)
    plain = [Weight("fp32", one.shape, {"data": decode_weight(one)}) for one in stacks]
    want = product_ops.moe_experts(x, *plain, shares, ids)
    monkeypatch.setattr(product_ops, "_decoded", lambda weight: pytest.fail("decoded"))
    torch.testing.assert_close(product_ops.moe_experts(x, *stacks, shares, ids), want)


def test_writes_are_told_to_tracers() -> None:
    """A write is traced as one, so that later reads stay behind it."""
    parts = [torch.zeros(2, 8, 512, dtype=torch.uint8), torch.zeros(2, 8, 128, dtype=torch.uint8)]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def write_and_read(slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> Any:
        torch_writes.kv_write(*parts, ONE, slots, latent, rope, "tiles")
        return torch_ops.gather_kv(parts, ONE, slots.to(torch.int32), "tiles", 512, 64)

    latent, rope = torch.full((2, 512), 2.0), torch.full((2, 64), -1.0)
    found = write_and_read(torch.tensor([3, 9]), latent, rope)
    assert torch.equal(found, torch.cat((latent, rope), -1))
    assert (parts[0][0, 3] != 0).all()
    assert (parts[0][0, 2] == 0).all()


@pytest.mark.parametrize(("format", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_packed_experts_hold_the_checkpoints_codes(format: str, group: int) -> None:
    """Nothing is quantised anew: codes and scales are moved, and what is padded is zero."""
    torch.manual_seed(0)
    rows, width = 192, 5 * group
    codes = torch.randint(0, 16, (2, rows, width), dtype=torch.uint8)
    scale = torch.randint(1, 0x7E, (2, rows, width // group), dtype=torch.uint8)
    parts = {"data": e2m1.pack(codes), "scale": scale}
    if format == "nvfp4":
        parts["global_scale"] = torch.arange(2.0 * rows).view(2, rows)
    found = packed_experts(Weight(format, (2, rows, width), parts), halves=2)
    half = 8 * group
    assert found.data.shape == (2, half, 256)  # each half of 96 rows fills 128
    assert found.parts["scale"].shape == (2, 16, 256)
    for row, column in ((0, 0), (95, 4 * group + 3), (96, 0), (191, width - 1)):
        place = row if row < 96 else row + 32
        byte = int(found.data[1, column % half, place])
        code = byte & 0xF if column < half else byte >> 4
        assert code == codes[1, row, column]
        assert found.parts["scale"][1, column // group, place] == scale[1, row, column // group]
    assert (found.data[:, :, 96:128] == 0).all()
    assert (found.data >> 4 == 0).all()  # the second half of the only block
    row_scale = found.parts["row_scale"]
    assert row_scale.shape == (2, 1, 256)
    assert float(row_scale[1, 0, 128]) == (rows + 96.0 if format == "nvfp4" else 1.0)
