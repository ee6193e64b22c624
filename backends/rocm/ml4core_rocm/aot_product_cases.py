"""Shapes at which the kernels of products, experts and norms are compiled ahead: ranks of TP 4 and
TP 8 of the full model, one row and many.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import torch

from ml4core_rocm.aot_cases import F8, kernel
from ml4core_triton.aot import Case
from ml4core_triton.aot_cases import CHOSEN, EXPERTS, HIDDEN, bf16, case, f32, ints, weight

_SCALED = MappingProxyType({"gfx950": r"v_mfma_scale_", "gfx942": r"_bf16"})
"""gfx942's units take no scales: codes are decoded to bf16."""
_BF16 = MappingProxyType({"gfx950": r"_bf16", "gfx942": r"_bf16"})
_BLOCK = MappingProxyType(F8 | {"gfx942": r"_bf16"})
"""e4m3fn, which weights are stored in, meets itself on gfx950 only."""


def cases() -> Iterator[Case]:
    """Imports triton."""
    experts, gemm = kernel("moe_experts"), kernel("gemm")
    for width in (1536, 768):
        for rows in (1, 64, 4096):
            for act in ("mxfp4", "mxfp8", None):
                name = {"mxfp4": "a4w4", "mxfp8": "a8w4"}.get(act or "", "a16w4")
                yield case(
                    f"moe_experts {name} {width} wide {rows} rows",
                    experts,
                    bf16(rows, HIDDEN),
                    weight("mxfp4", EXPERTS, 2 * width, HIDDEN),
                    weight("mxfp4", EXPERTS, HIDDEN, width),
                    f32(rows, CHOSEN),
                    ints(rows, CHOSEN, dtype=torch.int64),
                    act=act,
                    wants=_SCALED if act else _BF16,
                    hot=act is not None,
                )
    for act in ("fp8_block", None):
        yield case(
            f"moe_experts fp8 {act or 'bf16'} 768 wide 64 rows",
            experts,
            bf16(64, HIDDEN),
            weight("fp8_block", EXPERTS, 1536, HIDDEN),
            weight("fp8_block", EXPERTS, HIDDEN, 768),
            f32(64, CHOSEN),
            ints(64, CHOSEN, dtype=torch.int64),
            act=act,
            wants=_BLOCK if act else _BF16,
            hot=False,
        )
    for rows in (1, 64, 4096):
        for act in ("fp8_block", None):
            yield case(
                f"gemm fp8_block {act or 'bf16'} {rows} rows",
                gemm,
                bf16(rows, HIDDEN),
                weight("fp8_block", 2048, HIDDEN),
                act=act,
                wants=_BLOCK if act else _BF16,
            )
        for act in ("fp8_tensor", None):
            yield case(
                f"gemm fp8_tensor {act or 'bf16'} {rows} rows",
                gemm,
                bf16(rows, HIDDEN),
                weight("fp8_tensor", 2048, HIDDEN),
                act=act,
                wants=_BLOCK if act else _BF16,
            )
        plain = weight("bf16", 2048, HIDDEN)
        up = weight("bf16", 16, 512, 64)
        name = f"head_gemm 16 heads {rows} rows"
        yield case(name, kernel("head_gemm"), bf16(rows, 16, 64), up, wants=_BF16)
        yield case(f"gemm bf16 {rows} rows", gemm, bf16(rows, HIDDEN), plain, wants=_BF16)
    yield case("quantize bf16", kernel("quantize"), f32(HIDDEN, HIDDEN), "bf16", hot=False)
