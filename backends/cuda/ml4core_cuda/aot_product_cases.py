"""Shapes at which the kernels of products, experts, norms and sampling are compiled ahead: the full
model's, and those of one of eight ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ml4core.api import SSMaxSpec, Weight
from ml4core_cuda.aot import Case

_H = 6144
_VOCAB = 131072
_EXPERTS, _TOPK = 128, 4
_RANK_WIDTH = 768
_DECODED = 64
"""Rows of a decode step at most; what has more is a prefill's."""


def cases() -> Iterator[Case]:
    """Imports triton."""
    for format in ("fp8_block", "nvfp4", "mxfp4", "bf16"):
        for rows in (1, 8, 64, 4096):
            x, hot = _bf16(rows, _H), rows <= _DECODED
            yield _case(f"gemm {format} {rows} rows", "gemm", x, _weight(format, _H), hot=hot)
            for width in (_H, _RANK_WIDTH):
                name = f"moe_experts {format} of {width} {rows} rows"
                yield _case(name, "moe_experts", *_experts(format, rows, width), hot=hot)
    for act in ("fp8_block", "fp8_tensor", "mxfp4"):
        format = "fp8_block" if act == "mxfp4" else act
        for rows in (1, 64, 4096):
            x, weight, hot = _bf16(rows, _H), _weight(format, _H), rows <= _DECODED
            name = f"{format} {rows} rows act {act}"
            yield _case(f"gemm {name}", "gemm", x, weight, hot=hot, act=act)
            experts = _experts(format, rows, _H)
            yield _case(f"moe_experts {name}", "moe_experts", *experts, hot=hot, act=act)
    fp32 = Weight("fp32", (32, _H), {"data": _f32(32, _H)})
    yield _case("gemm fp32 one row", "gemm", _bf16(1, _H), fp32)
    up = Weight("bf16", (64, 512, 64), {"data": _bf16(64, 512, 64)})
    for rows in (1, 64):
        yield _case(f"head_gemm {rows} rows", "head_gemm", _bf16(rows, 64, 64), up)
        yield _case(
            f"router {rows} rows", "router", _bf16(rows, _H), _f32(_EXPERTS, _H), _TOPK, True, 1.0
        )
    yield from _small()


def _small() -> Iterator[Case]:
    x, positions = _bf16(8, _H), _ints(8)
    yield _case("rms_norm", "rms_norm", x, _bf16(_H), 1e-6)
    yield _case("layer_norm", "layer_norm", _bf16(8, 64, 128), _f32(128), _f32(128), 1e-6)
    norm = import_module("ml4core_cuda.kernels.all_reduce_rms_norm").add_rms_norm
    yield Case("add_rms_norm", partial(norm, x, x, _bf16(_H), 1e-6))
    yield _case("silu_mul", "silu_mul", _bf16(8, 2 * _H))
    yield _case("rope", "rope", _bf16(8, 64, 64), positions, _f32(32), True, 1.0)
    yield _case("ssmax", "ssmax", _bf16(8, 64, 128), positions, SSMaxSpec("llama4"))
    yield _case("embed", "embed", positions, _bf16(_VOCAB, _H))
    logits, heat = _f32(8, _VOCAB), _f32(8)
    yield _case("sample", "sample", logits, heat, positions, positions)
    drafts = (_f32(8, 4, _VOCAB), _ints(8, 3), _f32(8, 3, _VOCAB), heat, positions, positions)
    yield _case("verify_draft", "verify_draft", *drafts)
    yield _case("verify_draft block", "verify_draft", *drafts, True)
    for format in ("fp8_block", "fp8_tensor", "nvfp4", "mxfp4"):
        yield _case(f"quantize {format}", "quantize", _bf16(_H, _H), format, hot=False)


def _case(name: str, op: str, *arguments: Any, hot: bool = True, **named: Any) -> Case:
    function = getattr(import_module(f"ml4core_cuda.kernels.{op}"), op)
    return Case(name, partial(function, *arguments, **named), hot)


def _experts(format: str, rows: int, width: int) -> tuple[Any, ...]:
    return (
        _bf16(rows, _H),
        _weight(format, 2 * width, _EXPERTS),
        _weight(format, _H, _EXPERTS, width),
        _f32(rows, _TOPK),
        _ints(rows, _TOPK),
    )


def _weight(format: str, rows: int, matrices: int = 0, columns: int = _H) -> Weight:
    stack = (matrices,) if matrices else ()
    shape = (*stack, rows, columns)
    if format == "bf16":
        return Weight(format, shape, {"data": _bf16(*shape)})
    if format == "fp8_block":
        scale = _f32(*stack, rows // 128, columns // 128)
        return Weight(format, shape, {"data": _bytes(*shape), "scale": scale})
    if format == "fp8_tensor":
        return Weight(format, shape, {"data": _bytes(*shape), "scale": _f32(*stack)})
    group = 16 if format == "nvfp4" else 32
    parts = {
        "data": _bytes(*stack, rows, columns // 2),
        "scale": _bytes(*stack, rows, columns // group),
    }
    if format == "nvfp4":
        parts["global_scale"] = _f32(*stack, rows)
    return Weight(format, shape, parts)


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _f32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
