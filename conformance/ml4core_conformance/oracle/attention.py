"""Attention over chosen keys of a latent cache, and the join of parts, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core_conformance.case import Arguments
from ml4core_conformance.oracle.caches import all_rows
from ml4core_conformance.oracle.expected import Expected, Float
from ml4core_conformance.oracle.layouts import LATENT

_BF16_HALF_ULP = 2.0**-9
_SIGMAS = 4.0


@dataclass(frozen=True)
class Attended:
    """fp64 results of one row, and what bounds their rounding.

    Attributes:
        out: [N, L]; zeros without keys.
        lse: [N], base e; -inf without keys.
        out_size: [N, L], sum of the magnitudes of the terms of ``out``, each with the magnitude of
            its score on top: a relative error of a sum moves a weight by that much.
        lse_size: [N], the like for ``lse``.
        spread: [N, L], root of the sum of the squares of the terms of ``out``.
    """

    out: Tensor
    lse: Tensor
    out_size: Tensor
    lse_size: Tensor
    spread: Tensor


def attend(q: Tensor, keys: Tensor, scale: float, latent: int = LATENT) -> Attended:
    """Queries fp64 [N, W] over keys fp64 [n, width]: key = the first W, value = the first L."""
    heads = q.shape[0]
    if not len(keys):
        zeros, empty = q.new_zeros(heads, latent), q.new_full((heads,), -math.inf)
        return Attended(zeros, empty, zeros, q.new_zeros(heads), zeros)
    used, values = keys[:, : q.shape[1]], keys[:, :latent]
    scores = scale * (q @ used.T)  # [N, n]
    sizes = abs(scale) * (q.abs() @ used.abs().T)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    grown = weights * (1 + sizes + scores.abs())
    return Attended(
        weights @ values,
        lse,
        grown @ values.abs(),
        1 + (weights * sizes).sum(-1) + lse.abs(),
        torch.sqrt((weights**2) @ (values**2)),
    )


def expected_attention(q: Tensor, rows: list[Attended], terms: int) -> Expected:
    """``out`` and ``lse`` of queries [T, N, W], of which each row has been attended."""
    out, lse, out_size, lse_size, spread = (
        torch.stack([getattr(row, name) for row in rows])
        for name in ("out", "lse", "out_size", "lse_size", "spread")
    )
    slack = None
    if q.dtype == torch.bfloat16:
        # Operands of a bf16 product are bf16: the weights too, each rounded on its own.
        slack = _SIGMAS * _BF16_HALF_ULP * spread
    dtype = str(q.dtype).removeprefix("torch.")
    return Expected(
        {
            "out": Float(out, out_size, terms, dtype, ("T", "N", "L"), slack),
            "lse": Float(lse, lse_size, terms, "float32", ("T", "N")),
        }
    )


def sparse_mla(options: Mapping[str, Any], args: Arguments) -> Expected:
    q, slots, scale = args["q"], args["slots"].long(), float(args["scale"])
    keys = all_rows(args["cache"])
    attended, most = [], 1
    for t, length in enumerate(args["lens"].tolist()):
        row = slots[t, :length]
        row = row[(row >= 0) & (row < len(keys))]
        most = max(most, len(row))
        attended.append(attend(q[t].double(), keys[row], scale))
    return expected_attention(q, attended, max(most, q.shape[-1]))


def window_mla(options: Mapping[str, Any], args: Arguments) -> Expected:
    q, scale, window = args["q"], float(args["scale"]), args.get("window")
    cache, table = args["cache"], args["block_table"].long()
    keys = all_rows(cache)
    requests = row_requests(args["query_start"], q.shape[0])
    attended, most = [], 1
    for t, visible in enumerate(args["visible"].tolist()):
        first = 0 if window is None else max(0, visible - window)
        position = torch.arange(first, max(first, visible))
        page = table[requests[t], position // cache.block_size]
        row = page * cache.block_size + position % cache.block_size
        most = max(most, len(row))
        attended.append(attend(q[t].double(), keys[row], scale))
    return expected_attention(q, attended, max(most, q.shape[-1]))


def row_requests(query_start: Tensor, rows: int) -> list[int]:
    """The request of each row; the last one for rows behind all requests, which see nothing."""
    ends = query_start[1:].tolist()
    return [
        next((r for r, end in enumerate(ends) if row < end), len(ends) - 1) for row in range(rows)
    ]


def merge_lse(options: Mapping[str, Any], args: Arguments) -> Expected:
    outs, lses = args["outs"], args["lses"].double()  # [parts, T, N, L], [parts, T, N]
    lse = torch.logsumexp(lses, 0)  # -inf where all parts are empty
    empty = torch.isneginf(lses)
    gap = torch.where(empty, 0.0, lses - torch.where(torch.isneginf(lse), 0.0, lse))
    weights = torch.where(empty, 0.0, torch.exp(gap)).unsqueeze(-1)
    values = torch.where(empty.unsqueeze(-1), 0.0, outs.double())
    out = (weights * values).sum(0)
    lse_size = torch.where(torch.isneginf(lse), 0.0, 1 + lse.abs())
    # A weight is as exact as the difference of two lse: either may be rounded.
    size = (weights * (gap.abs() + lse_size).unsqueeze(-1) * values.abs()).sum(0)
    dtype = str(outs.dtype).removeprefix("torch.")
    return Expected(
        {
            "out": Float(out, size, len(outs), dtype, ("T", "N", "L")),
            "lse": Float(lse, lse_size, len(outs), "float32", ("T", "N")),
        }
    )


ORACLE: Mapping[str, Callable[[Mapping[str, Any], Arguments], Expected]] = MappingProxyType(
    {"sparse_mla": sparse_mla, "window_mla": window_mla, "merge_lse": merge_lse}
)
