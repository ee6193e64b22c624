"""Shapes at which the kernels here are compiled ahead, a decode step's of the full model; and
tensors without data for the cases of a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, KVLayout, SSMaxSpec, Weight
from ml4core_triton.aot import Case
from ml4core_triton.ops import load

HIDDEN, VOCAB, HEADS = 6144, 131072, 64
EXPERTS, CHOSEN = 128, 4
ROWS = 8


def cases(package: str) -> Iterator[Case]:
    """Cases of the small ops, as a backend's ``package`` serves them. Imports triton."""

    def one(name: str, op: str, *arguments: Any, hot: bool = True) -> Case:
        return case(name, load(op, package), *arguments, hot=hot)

    x, positions = bf16(ROWS, HIDDEN), ints(ROWS, dtype=torch.int64)
    yield one("rms_norm", "rms_norm", x, bf16(HIDDEN), 1e-6)
    heads = bf16(ROWS, HEADS, 128)
    yield one("layer_norm", "layer_norm", heads, f32(128), f32(128), 1e-6)
    norm = import_module("ml4core_triton.kernels.all_reduce_rms_norm").add_rms_norm
    yield case("add_rms_norm", norm, x, x, bf16(HIDDEN), 1e-6)
    yield one("silu_mul", "silu_mul", bf16(ROWS, 2 * HIDDEN))
    yield one("rope", "rope", bf16(ROWS, HEADS, 64), positions, f32(32), True, 1.0)
    yield one("ssmax", "ssmax", heads, positions, SSMaxSpec("llama4"))
    yield one("embed", "embed", positions, bf16(VOCAB, HIDDEN))
    for rows in (1, 64):
        gate = (f32(EXPERTS, HIDDEN), CHOSEN, True, 1.0)
        yield one(f"router {rows} rows", "router", bf16(rows, HIDDEN), *gate)
    logits, heat = f32(ROWS, VOCAB), f32(ROWS)
    yield one("sample", "sample", logits, heat, positions, positions)
    drafted = (ints(ROWS, 3, dtype=torch.int64), f32(ROWS, 3, VOCAB))
    drafts = (f32(ROWS, 4, VOCAB), *drafted, heat, positions, positions)
    yield one("verify_draft", "verify_draft", *drafts)
    yield one("verify_draft block", "verify_draft", *drafts, True)
    for format in ("fp8_block", "fp8_tensor", "nvfp4", "mxfp4"):
        yield one(f"quantize {format}", "quantize", bf16(HIDDEN, HIDDEN), format, hot=False)


def case(
    name: str,
    call: Callable[..., object],
    *arguments: Any,
    hot: bool = True,
    wants: Mapping[str, str] | None = None,
    archs: tuple[str, ...] = (),
    **named: Any,
) -> Case:
    return Case(name, partial(call, *arguments, **named), hot, wants or {}, archs)


def cache(layout: KVLayout, pages: int, block_size: int) -> KVCache:
    parts = tuple(
        torch.empty(part.shape(pages, block_size), dtype=getattr(torch, part.dtype), device="meta")
        for part in layout.parts
    )
    return KVCache(layout, block_size, parts)


def weight(format: str, *shape: int) -> Weight:
    """[N, K], or a stack of such, in ``bf16`` or a quantised format."""
    *stack, rows, columns = shape
    if format == "bf16":
        return Weight(format, shape, {"data": bf16(*shape)})
    if format in ("fp8_block", "fp8_tensor"):
        blocks = (-(-rows // 128), -(-columns // 128)) if format == "fp8_block" else ()
        return Weight(format, shape, {"data": codes(*shape), "scale": f32(*stack, *blocks)})
    group = 16 if format == "nvfp4" else 32
    parts = {
        "data": codes(*stack, rows, columns // 2),
        "scale": codes(*stack, rows, columns // group),
    }
    if format == "nvfp4":
        parts["global_scale"] = f32(*stack, rows)
    return Weight(format, shape, parts)


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def f32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def codes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
