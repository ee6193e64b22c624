"""The formats trace: no look at the data, any number of rows, the same bytes as run eagerly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.export import Dim, export

from ml4core.formats import (
    ceil_pow2,
    e2m1,
    e4m3,
    e8m0,
    fp8_block,
    fp8_tensor,
    index_pages,
    kv_rows,
    mxfp4,
    nvfp4,
    scale_swizzle,
)

DIVISOR = torch.tensor(1344.0)

# name: function of [rows, width] float32, width. Each goes to bytes and back.
CASES: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
    "e4m3fn": (lambda x: e4m3.decode(e4m3.encode(x, "e4m3fn"), "e4m3fn"), 40),
    "e4m3fnuz": (lambda x: e4m3.decode(e4m3.encode(x, "e4m3fnuz"), "e4m3fnuz"), 40),
    "fn_to_fnuz": (lambda x: e4m3.fn_to_fnuz(e4m3.encode(x, "e4m3fn")), 40),
    "e8m0": (lambda x: e8m0.decode(e8m0.encode(x)), 40),
    "ceil_pow2": (ceil_pow2, 40),
    "e2m1": (lambda x: e2m1.decode(e2m1.unpack(e2m1.pack(e2m1.encode(x)))), 40),
    # Any number of weights [2, 150]; the shape of a weight itself is fixed.
    "fp8 weight": (
        lambda x: fp8_block.dequantize_weight(*fp8_block.quantize_weight(x.view(-1, 2, 150))),
        300,
    ),
    "fp8 activation": (
        lambda x: fp8_block.dequantize_activation(*fp8_block.quantize_activation(x, pow2=True)),
        300,
    ),
    "fp8 tensor": (lambda x: fp8_tensor.dequantize(*fp8_tensor.quantize(x)), 40),
    "mxfp4": (lambda x: mxfp4.dequantize(*mxfp4.quantize(x, "even")), 96),
    "nvfp4 divisor": (
        lambda x: nvfp4.dequantize(*nvfp4.quantize(x, divisor=DIVISOR), divisor=DIVISOR),
        96,
    ),
    "nvfp4 multiplier": (lambda x: nvfp4.quantize(x, multiplier=nvfp4.global_multiplier(x)), 96),
    "fp8_ds_mla": (lambda x: kv_rows.decode_fp8_ds_mla(kv_rows.encode_fp8_ds_mla(x)), 576),
    "e4m3 row": (
        lambda x: kv_rows.decode_e4m3(kv_rows.encode_e4m3(x, 0.3, "e4m3fnuz"), 0.3, "e4m3fnuz"),
        576,
    ),
    "index key": (lambda x: kv_rows.quantize_index(x, "e4m3fn"), 128),
}


class Traced(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def same(a: object, b: object) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and all(map(same, a, b))
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    if a.dtype == torch.float32:
        a, b = a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    return a.dtype == b.dtype and torch.equal(a, b)


def inputs(rows: int, width: int) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    x[0, :4] = torch.tensor([math.inf, -0.0, math.nan, 1e-42])
    return x


@pytest.mark.parametrize("name", CASES)
def test_export_with_any_number_of_rows(name):
    function, width = CASES[name]
    program = export(
        Traced(function), (inputs(5, width),), dynamic_shapes=({0: Dim("rows", min=2, max=4096)},)
    )
    for rows in (5, 130):
        x = inputs(rows, width)
        assert same(program.module()(x), function(x))


@pytest.mark.parametrize("name", CASES)
def test_the_data_is_never_looked_at(name):
    """On the meta device there is none: reading a number or counting elements raises."""
    function, width = CASES[name]
    result = function(torch.empty(3, width, device="meta"))
    parts = result if isinstance(result, tuple) else (result,)
    assert all(part.is_meta for part in parts)


@pytest.mark.parametrize("name", CASES)
def test_capture_without_a_graph_break(name):
    function, width = CASES[name]
    captured = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    x = inputs(4, width)
    assert same(captured(x), function(x))


@pytest.mark.parametrize("order", index_pages.ORDERS)
@pytest.mark.parametrize("form", index_pages.SCALE_FORMS)
def test_export_of_pages(order, form):
    def through(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code, scale = kv_rows.quantize_index(x, "e4m3fn")
        return index_pages.unpack_page(index_pages.pack_page(code, scale, order, form), order, form)

    pages = Dim("pages", min=2, max=4096)
    example = torch.randn(3, 16, 128)
    program = export(Traced(through), (example,), dynamic_shapes=({0: pages},))
    x = torch.randn(7, 16, 128)
    assert same(program.module()(x), kv_rows.quantize_index(x, "e4m3fn"))


def test_export_of_swizzled_scales():
    scale = torch.randint(0, 127, (4, 130, 6), dtype=torch.uint8)
    program = export(Traced(scale_swizzle.swizzle), (scale,))
    assert same(program.module()(scale), scale_swizzle.swizzle(scale))
