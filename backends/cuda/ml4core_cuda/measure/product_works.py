"""Works of products, of routed experts, and of what stands between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as kept
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core_cuda.kernels import gemm as products
from ml4core_cuda.kernels import moe_experts as experts
from ml4core_cuda.kernels import moe_fp4, moe_row
from ml4core_cuda.kernels.gemm import gemm
from ml4core_cuda.kernels.head_gemm import head_gemm
from ml4core_cuda.kernels.moe_experts import moe_experts
from ml4core_cuda.measure import peers, sizes
from ml4core_cuda.measure.decoding import decoded
from ml4core_cuda.measure.judges import far_off
from ml4core_cuda.measure.work import BF16_RATE, FP8_RATE, Draw, Inputs, Work
from ml4core_triton.kernels.all_reduce_rms_norm import add_rms_norm
from ml4core_triton.kernels.router import router
from ml4core_triton.kernels.sample import sample

_H, _E, _TOPK = 6144, 128, 4
_BITS = {"fp8_block": 8 + 32 / 128**2, "fp8_tensor": 8.0, "nvfp4": 4.5, "mxfp4": 4.25, "bf16": 16.0}


def works(*, small: bool) -> Iterator[Work]:
    """``small`` ones for the interpreter."""
    yield from _gemms(small)
    yield from _experts(small)
    yield from _rest(small)


def _gemms(small: bool) -> Iterator[Work]:
    width = 256 if small else _H

    def make(seed: int, device: torch.device, *, format: str, rows: int, n: int, k: int) -> Inputs:
        draw = Draw(seed, device)
        return draw.bf16(rows, k), draw.weight(format, n, k)

    targets = {1: ("1.3x DeepGEMM", 15.4 / 1.3), 64: ("1.0x DeepGEMM", 13.2)}
    targets[4096] = ("0.7x DeepGEMM", 245 / 0.7)
    shapes = [("fp8_block", r, width, width, a) for r in (1, 64, 4096) for a in (None, "fp8_block")]
    if small:
        shapes = [("fp8_block", 3, width, width, None), ("fp8_block", 3, width, width, "fp8_block")]
        shapes += [("nvfp4", 2, width, width, None)]
    else:  # of one rank of eight: q, latent and index parts; the output projection
        shapes += [("fp8_block", r, n, k, None) for r in (1, 2, 4) for n, k in
                   ((1024, _H), (576, _H), (4096, _H), (_H, 1024))]  # fmt: skip
        shapes += [(f, 1, _H, _H, None) for f in ("nvfp4", "mxfp4", "bf16")]
    for format, rows, n, k, act in shapes:
        square = (format, n, k) == ("fp8_block", _H, _H) and (act is not None or rows < 4096)
        told, us = targets.get(rows, ("", 0.0)) if square else ("", 0.0)
        against: dict[str, Callable[..., Any]] = {}
        if told:
            against["DeepGEMM"] = peers.deep_gemm_product
        if rows == 4096 and act is None:
            against["torch, bf16"] = peers.torch_product
        kind = "numbers" if act is None else "codes by block"
        shape = products.shape_key(format, rows, n, k, kind)
        tuned: list[Any] = []
        if not small:
            if rows == 1 and act is None:
                tuned = [("gemm_row", shape, sizes.GEMM_ROW)]
            elif rows == 4096:
                tuned = [("gemm_many", shape, sizes.gemm_many(act is not None))]
            elif rows == 64 or n == _H:
                tuned = [("gemm_tile", shape, sizes.gemm_tile(rows))]
        yield Work(
            f"gemm {format} {n}x{k} {rows} rows" + (f" act {act}" if act else ""),
            "gemm",
            partial(make, format=format, rows=rows, n=n, k=k),
            partial(gemm, act=act),
            partial(_product_error, act=act),
            int(n * k * _BITS[format] / 8) + rows * (n + k) * 2,
            2 * rows * n * k,
            told,
            us,
            against,
            tuned,
            BF16_RATE if act is None else FP8_RATE,
        )


def _product_error(inputs: Inputs, found: Tensor, *, act: str | None) -> float:
    x, weight, *_ = inputs
    most = min(len(x), 64)
    want = x[:most].double() @ decoded(weight).double().T
    return far_off(found[:most], want, 4e-3 if act is None else 5e-2)


@kept
def _matrices(format: str, width: int, inner: int, count: int, device: torch.device) -> Any:
    """w13 and w2 of experts: one for all works, as they are larger than any cache."""
    draw = Draw(1, device)
    return draw.weight(format, count, 2 * inner, width), draw.weight(format, count, width, inner)


def forget() -> None:
    """Gives memory of experts back."""
    _matrices.cache_clear()


def _experts(small: bool) -> Iterator[Work]:
    width, count = (256, 8) if small else (_H, _E)
    inner = 256 if small else _H

    def make(seed: int, device: torch.device, *, format: str, rows: int) -> Inputs:
        draw = Draw(seed, device)
        w13, w2 = _matrices(format, width, inner, count, device)
        ids = _spread(seed, rows, count).to(device)
        weights = draw.normal(rows, _TOPK).abs() + 0.1
        return draw.bf16(rows, width), w13, w2, weights, ids

    rows_of = (1, 5) if small else (1, 8, 64, 4096)
    shapes: list[tuple[str, int, str | None]] = [("fp8_block", r, None) for r in rows_of]
    shapes += [("nvfp4", r, None) for r in rows_of[:3]] + [("mxfp4", r, None) for r in rows_of[:3]]
    if not small:
        shapes.insert(4, ("fp8_block", 4096, "fp8_block"))
    for format, rows, act in shapes:
        touched = sum(_spread(seed, rows, count).unique().numel() for seed in (0, 1)) / 2
        nbytes = int(touched * 3 * width * inner * _BITS[format] / 8) + rows * width * 4
        told, us = "", 0.0
        if format == "fp8_block" and rows <= 64:
            told, us = "75% of the byte floor", nbytes / 4.25e12 * 1e6 / 0.75
        elif format == "fp8_block":
            told = "0.75x DeepGEMM"
        else:
            told = "1.6x faster than FP8"
        against: dict[str, Callable[..., Any]] = {}
        if rows == 4096:
            against["DeepGEMM, products alone"] = peers.deep_gemm_experts
        tuned: list[Any] = []
        if not small:
            kind = "numbers" if act is None else "codes by block"
            if format in ("nvfp4", "mxfp4"):
                together = 1 if rows <= 4 else moe_fp4.ROWS
                keys = [
                    moe_fp4.shape_key(format, part, inner, width, together, _TOPK)
                    for part in ("gated", "outer")
                ]
                few = "moe_fp4", sizes.MOE_FP4
                kernel, found = few if together == 1 else ("fp4_experts", sizes.FP4_TURNS)
                tuned = [(kernel, key, found) for key in keys]
            elif rows == 1:
                tuned = [
                    ("moe_row", moe_row.shape_key(format, p, inner, width, _TOPK), sizes.MOE_ROW)
                    for p in ("gated", "outer")
                ]
            else:
                shape = experts.shape_key(format, rows, width, width, kind)
                tiles = sizes.MOE_MANY if act else sizes.moe(rows)
                tuned = [("moe_gated", shape, tiles), ("moe_outer", shape, tiles)]
        yield Work(
            f"experts {format} {rows} rows" + (f" act {act}" if act else ""),
            "experts",
            partial(make, format=format, rows=rows),
            partial(moe_experts, act=act) if act else moe_experts,
            partial(_experts_error, act=act),
            nbytes,
            6 * rows * _TOPK * width * inner,
            told,
            us,
            against,
            tuned,
            BF16_RATE if act is None else FP8_RATE,
        )


@kept
def _spread(seed: int, rows: int, count: int) -> Tensor:
    """Expert ids [rows, topk], each once a row, as evenly spread as chance has it: on the host, as
    the bytes that a work touches follow from them.
    """
    return Draw(seed, torch.device("cpu")).normal(rows, count).topk(_TOPK)[1]


def _experts_error(inputs: Inputs, found: Tensor, *, act: str | None) -> float:
    x, w13, w2, weights, ids = inputs
    worst = 0.0
    for t in range(0, len(x), max(1, len(x) // 4)):
        want = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            first, second = (decoded(_one(w, expert)) for w in (w13, w2))
            gate, up = (first.double() @ x[t].double()).chunk(2)
            want += weight * (second.double() @ (torch.nn.functional.silu(gate) * up))
        worst = max(worst, far_off(found[t], want, 8e-3 if act is None else 8e-2))
    return worst


def _one(stack: Weight, expert: int) -> Weight:
    parts = {name: part[expert] for name, part in stack.parts.items()}
    return Weight(stack.format, stack.shape[1:], parts)


def _rest(small: bool) -> Iterator[Work]:
    width, vocab = (256, 2000) if small else (_H, 131072)
    rows_of = (3,) if small else (1, 64)

    def routed(seed: int, device: torch.device, *, rows: int) -> Inputs:
        draw = Draw(seed, device)
        return draw.bf16(rows, width), draw.normal(_E, width) / sqrt(width), _TOPK, True, 1.0

    def headed(seed: int, device: torch.device, *, rows: int, heads: int) -> Inputs:
        draw = Draw(seed, device)
        return draw.bf16(rows, heads, 64), draw.weight("bf16", heads, 512, 64)

    def added(seed: int, device: torch.device, *, rows: int) -> Inputs:
        draw = Draw(seed, device)
        return draw.bf16(rows, width), draw.bf16(rows, width), draw.bf16(width), 1e-6

    def drawn(seed: int, device: torch.device, *, rows: int) -> Inputs:
        draw = Draw(seed, device)
        zeros = draw.full(0, rows, dtype=torch.int64)
        return draw.normal(rows, vocab), draw.full(0, rows, dtype=torch.float32), zeros, zeros

    for rows in rows_of:
        nbytes = _E * width * 4 + rows * width * 2
        yield Work(
            f"router {rows} rows", "rest", partial(routed, rows=rows), router, _router_error, nbytes
        )
        for heads in (8, 64):
            yield Work(
                f"head_gemm {heads} heads {rows} rows", "rest",
                partial(headed, rows=rows, heads=heads), head_gemm, _head_error,
                heads * 512 * 64 * 2 + rows * heads * (512 + 64) * 2,
            )  # fmt: skip
        yield Work(
            f"add_rms_norm {rows} rows", "rest", partial(added, rows=rows), add_rms_norm,
            _norm_error, 8 * rows * width,
        )  # fmt: skip
        yield Work(
            f"sample {rows} rows", "rest", partial(drawn, rows=rows), sample, _sample_error,
            4 * rows * vocab,
        )  # fmt: skip


def _router_error(inputs: Inputs, found: tuple[Tensor, Tensor]) -> float:
    x, weight, topk, *_ = inputs
    logits = x.double() @ weight.double().T
    top = logits.topk(topk + 1)[0]
    firm = (top[:, :-1] - top[:, 1:]).amin(-1) > 1e-4
    want = torch.softmax(top[:, :-1], -1)
    same = torch.equal(found[1][firm], logits.topk(topk)[1][firm])
    return far_off(found[0], want, 1e-5) if same else float("inf")


def _head_error(inputs: Inputs, found: Tensor) -> float:
    x, weight = inputs
    return far_off(found, torch.einsum("tna,nba->tnb", x.double(), weight.data.double()), 4e-3)


def _norm_error(inputs: Inputs, found: tuple[Tensor, Tensor]) -> float:
    x, residual, weight, eps = inputs
    summed = x.double() + residual.double()
    kept_sum = found[0].double()
    mean = kept_sum.square().mean(-1, keepdim=True)
    want = kept_sum * torch.rsqrt(mean + eps) * weight.double()
    return max(far_off(found[0], summed, 4e-3), far_off(found[1], want, 4e-3))


def _sample_error(inputs: Inputs, found: Tensor) -> float:
    return 0.0 if torch.equal(found, inputs[0].argmax(-1)) else float("inf")
