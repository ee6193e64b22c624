"""The same work by others, where they are installed.

Each function takes a work's inputs, prepares what a caller would keep (layouts of scales, work
lists), and returns the call that is timed. One that isn't there raises ``ImportError``; what a
library says of a call that it doesn't take comes through.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, Weight
from ml4core_cuda.kernels import flash_mla
from ml4core_cuda.kernels.deep_gemm import deep_gemm
from ml4core_cuda.kernels.flashinfer import flashinfer
from ml4core_triton.kernels.target import units_of

Call = Callable[[], Any]


def flash_mla_decode(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Call:
    """Its decoding from packed rows, heads padded to 64 or 128. Padding is part of the call."""
    plan = flash_mla.WorkList()
    flash_mla.sparse_mla(q, cache, slots, lens, scale, plan)
    return lambda: flash_mla.sparse_mla(q, cache, slots, lens, scale, plan, checked=True)


def flash_mla_prefill(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Call:
    """Its kernel for chunks of prompts, on rows decoded to bf16 before: what is timed isn't all
    that a caller with a packed cache pays.
    """
    module = flash_mla.library()
    rows = cache.layout.unpack(cache.parts, cache.scale).flatten(0, 1).bfloat16().unsqueeze(1)
    indices = slots.unsqueeze(1).contiguous()
    named = flash_mla.legacy(module.flash_mla_sparse_fwd)

    def call() -> tuple[Tensor, Tensor]:
        out, _, lse = module.flash_mla_sparse_fwd(q, rows, indices, scale, **named)
        return out, lse

    return call


def deep_gemm_logits(
    q: Tensor, weights: Tensor, scale: float, cache: KVCache, table: Tensor, start: Tensor,
    visible: Tensor, max_rows: int,
) -> Call:  # fmt: skip
    """One row a request. Quantising the query is the caller's."""
    module = deep_gemm()
    rows, heads, width = q.shape
    amax = q.abs().amax(-1).clamp(min=1e-4)
    power = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    codes = (q / power.unsqueeze(-1)).to(torch.float8_e4m3fn).view(rows, 1, heads, width)
    factor = (weights * power * scale).contiguous()
    pages = cache.parts[0].view(cache.blocks, cache.block_size, 1, width + 4)
    columns = table.shape[1] * cache.block_size
    # Its releases differ in the rank of lengths: one a row of a request, or one a request.
    lens = visible.view(rows, 1) if hasattr(module, "fp8_fp4_paged_mqa_logits") else visible
    plan = module.get_paged_mqa_logits_metadata(lens, cache.block_size, units_of(q.device))
    if hasattr(module, "fp8_paged_mqa_logits"):
        function: Any = module.fp8_paged_mqa_logits
        given: Any = codes
    else:
        function, given = module.fp8_fp4_paged_mqa_logits, (codes, None)
    # Columns that a row doesn't see are left as they are, which some releases must be told.
    named = {"clean_logits": False} if _takes(function, "clean_logits") else {}
    rest = (pages, factor, lens, table, plan, columns)

    def call() -> Tensor:
        found: Tensor = function(given, *rest, **named)
        return found

    call()
    return call


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter; one that doesn't tell is of a release that had it."""
    try:
        return name in signature(function).parameters
    except ValueError:
        return True


def deep_gemm_product(x: Tensor, weight: Weight, *_: Any) -> Call:
    """FP8 on both sides. Quantising the activation is the caller's."""
    module = deep_gemm()
    rows = len(x)
    codes, scale = _codes(x)
    scale = _aligned(module, scale)
    matrix = (weight.data.view(torch.float8_e4m3fn), weight.parts["scale"])
    out = torch.empty(rows, weight.shape[0], dtype=torch.bfloat16, device=x.device)

    def call() -> Tensor:
        module.fp8_gemm_nt((codes, scale), matrix, out)
        return out

    call()
    return call


def deep_gemm_experts(
    x: Tensor, w13: Weight, w2: Weight, weights: Tensor, ids: Tensor, *_: Any
) -> Call:
    """Both grouped products of as many rows as choices, spread evenly over experts, the best case
    of its grouping. Sorting, quantising, the gate and the sum are left out.
    """
    module = deep_gemm()
    experts, choices = w13.shape[0], ids.numel()
    each = max(128, -(-choices // experts) // 128 * 128)
    rows = each * experts
    group = torch.arange(experts, dtype=torch.int32, device=x.device).repeat_interleave(each)

    def product(matrix: Weight) -> Call:
        codes, scale = _codes(x[:1].new_empty(rows, matrix.shape[2]).normal_())
        given = (codes, _aligned(module, scale))
        stack = (matrix.data.view(torch.float8_e4m3fn), matrix.parts["scale"])
        out = torch.empty(rows, matrix.shape[1], dtype=torch.bfloat16, device=x.device)
        function = module.m_grouped_fp8_gemm_nt_contiguous
        return lambda: function(given, stack, out, group)

    first, second = product(w13), product(w2)

    def call() -> None:
        first()
        second()

    call()
    return call


def torch_product(x: Tensor, weight: Weight, *_: Any) -> Call:
    """Of bf16, by the library that torch takes."""
    matrix = torch.randn(weight.shape, device=x.device).bfloat16()
    return lambda: torch.matmul(x, matrix.T)


def torch_topk(scores: Tensor, visible: Tensor, k: int, *_: Any) -> Call:
    return lambda: scores.topk(k)[1]


def flashinfer_topk(scores: Tensor, visible: Tensor, k: int, *_: Any) -> Call:
    module = flashinfer()
    module.top_k(scores, k)
    return lambda: module.top_k(scores, k)[1]


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of rows [T, K], and a scale for each 128 columns."""
    groups = x.float().view(len(x), -1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    return (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(x.shape), scale


def _aligned(module: Any, scale: Tensor) -> Tensor:
    """Scales as its copy engine takes them, under whichever name its release has for it."""
    for name in ("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor"):
        if hasattr(module, name):
            found: Tensor = getattr(module, name)(scale)
            return found
    return scale


def installed() -> dict[str, str]:
    """Each peer's version, or why it can't be had."""
    found = {}
    for name, load in (
        ("FlashMLA", flash_mla.library),
        ("FlashInfer", flashinfer),
        ("DeepGEMM", deep_gemm),
    ):
        try:
            found[name] = str(getattr(load(), "__version__", "of unknown version"))
        except Exception as error:  # an import of a library may do anything
            found[name] = f"no: {type(error).__name__}: {error}"[:300]
    return found
