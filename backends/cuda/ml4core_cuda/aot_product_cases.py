"""Shapes at which the kernels of products and experts are compiled ahead: the full model's, and
those of one of eight ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ml4core.api import Weight
from ml4core_triton.aot import Case
from ml4core_triton.aot_cases import CHOSEN, EXPERTS, HIDDEN, bf16, case, f32, ints, weight
from ml4core_triton.ops import load

_RANK_WIDTH = 768
_DECODED = 64
"""Rows of a decode step at most; what has more is a prefill's."""


def cases() -> Iterator[Case]:
    """Imports triton."""
    for format in ("fp8_block", "nvfp4", "mxfp4", "bf16"):
        for rows in (1, 8, 64, 4096):
            x, hot = bf16(rows, HIDDEN), rows <= _DECODED
            yield _case(
                f"gemm {format} {rows} rows", "gemm", x, weight(format, HIDDEN, HIDDEN), hot=hot
            )
            for width in (HIDDEN, _RANK_WIDTH):
                name = f"moe_experts {format} of {width} {rows} rows"
                yield _case(name, "moe_experts", *_experts(format, rows, width), hot=hot)
    for act in ("fp8_block", "fp8_tensor", "mxfp4"):
        format = "fp8_block" if act == "mxfp4" else act
        for rows in (1, 64, 4096):
            x, w, hot = bf16(rows, HIDDEN), weight(format, HIDDEN, HIDDEN), rows <= _DECODED
            name = f"{format} {rows} rows act {act}"
            yield _case(f"gemm {name}", "gemm", x, w, hot=hot, act=act)
            experts = _experts(format, rows, HIDDEN)
            yield _case(f"moe_experts {name}", "moe_experts", *experts, hot=hot, act=act)
    fp32 = Weight("fp32", (32, HIDDEN), {"data": f32(32, HIDDEN)})
    yield _case("gemm fp32 one row", "gemm", bf16(1, HIDDEN), fp32)
    for rows in (20, 64, 200):
        yield _case(f"gemm fp32 {rows} rows", "gemm", f32(rows, HIDDEN), fp32, hot=False)
        w13 = Weight("fp32", (8, 512, 256), {"data": f32(8, 512, 256)})
        w2 = Weight("fp32", (8, 256, 256), {"data": f32(8, 256, 256)})
        routed = (f32(rows, 4), ints(rows, 4))
        name = f"moe_experts fp32 {rows} rows"
        yield _case(name, "moe_experts", f32(rows, 256), w13, w2, *routed, hot=False)
    for format in ("nvfp4", "mxfp4"):
        name = f"gemm {format} 20 rows of fp32"
        yield _case(name, "gemm", f32(20, HIDDEN), weight(format, HIDDEN, HIDDEN), hot=False)
    for act in ("fp8_block", "fp8_tensor"):  # the last tile of 128 columns isn't whole
        name, x = f"gemm {act} 20 rows of 6000 act {act}", bf16(20, 6000)
        yield _case(name, "gemm", x, weight(act, HIDDEN, 6000), hot=False, act=act)
    up = Weight("bf16", (64, 512, 64), {"data": bf16(64, 512, 64)})
    for rows in (1, 64):
        yield _case(f"head_gemm {rows} rows", "head_gemm", bf16(rows, 64, 64), up)


def _case(name: str, op: str, *arguments: Any, hot: bool = True, **named: Any) -> Case:
    return case(name, load(op, "ml4core_cuda"), *arguments, hot=hot, **named)


def _experts(format: str, rows: int, width: int) -> tuple[Any, ...]:
    return (
        bf16(rows, HIDDEN),
        weight(format, EXPERTS, 2 * width, HIDDEN),
        weight(format, EXPERTS, HIDDEN, width),
        f32(rows, CHOSEN),
        ints(rows, CHOSEN, dtype=torch.int64),
    )
