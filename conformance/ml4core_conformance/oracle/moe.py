"""Routing and routed experts in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ml4core_conformance.oracle.activations import quantize_activation
from ml4core_conformance.oracle.expected import Expected, Float, Selected
from ml4core_conformance.oracle.numbers import decode_weight, dtype_name, half_ulp, wide
from ml4core_conformance.oracle.products import silu, silu_slope, spread

ROUTER_MARGIN = 1e-4
"""Logits nearer than this may change places, unless they are exact in fp32."""

_SIGMAS = 4.0
_NARROW = 2.0**-7
"""What bf16 may make of the largest inner value of a group, as a share."""
_FP32_SUMS = 4 * 2.0**-23
"""What an fp32 sum may round, as a share of its size and the root of its terms."""
_REGRID = 6.0**-0.5
"""Root mean square difference of two roundings to grids that are shifted at random, in steps."""


def router(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    """``options['exact_logits']``: fp32 holds them exactly, so ties and order are exact too."""
    x, weight, count = wide(args["x"]), wide(args["weight"]), args["topk"]
    logits = x @ weight.T
    broken = ~torch.isfinite(logits).all(-1)
    usable = torch.where(broken.unsqueeze(-1), 0.0, logits)
    odds = torch.softmax(usable, -1)
    # A stable sort keeps the lower id in front.
    order = torch.sort(usable, dim=-1, descending=True, stable=True)
    ids = order.indices[:, :count]
    chosen = odds.gather(-1, ids)
    if args["renormalize"]:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    chosen = torch.where(broken.unsqueeze(-1), 0.0, chosen * args["routed_scale"])
    margin = 0.0 if options.get("exact_logits") else ROUTER_MARGIN
    gaps = (order.values[:, :-1] - order.values[:, 1:])[:, :count]
    close = (gaps < margin).any(-1, keepdim=True)
    # A logit that is off by d moves its odds by that share, twice if the sum moves against it.
    size = usable.abs() + spread(torch.where(broken.unsqueeze(-1), 0.0, x), weight)
    moved = chosen.abs() * (1 + 2 * size.amax(-1, keepdim=True))
    weights = Float(
        chosen,
        moved,
        x.shape[-1],
        "float32",
        ("T", "topk"),
        torch.where(close, 2 * margin * chosen.abs(), 0.0),
    )
    candidates = logits.shape[-1]
    picked = Selected(
        ids,
        torch.where(broken.unsqueeze(-1), torch.nan, logits),
        torch.where(broken, 0, candidates),
        torch.full(logits.shape[:1], margin, dtype=torch.float64),
        ("T", "topk"),
        ordered="score",
    )
    return Expected({"weights": weights, "ids": picked})


class _Expert(NamedTuple):
    """What one expert makes of rows, fp64 [t, H] each: value, partial sums, and what else may
    differ.
    """

    value: Tensor
    size: Tensor
    slack: Tensor


def moe_experts(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    """``options['act']``: the format in which inputs of both products are quantised."""
    x, w13, w2 = wide(args["x"]), decode_weight(args["w13"]), decode_weight(args["w2"])
    weights, ids = wide(args["weights"]), args["ids"] - (args.get("first_expert") or 0)
    value = torch.zeros_like(x)
    square, slack = torch.zeros_like(x), torch.zeros_like(x)
    for expert in range(w13.shape[0]):
        for choice in range(ids.shape[1]):
            rows = ((ids[:, choice] == expert) & (weights[:, choice] != 0)).nonzero().flatten()
            if not len(rows):
                continue
            share = weights[rows, choice].unsqueeze(-1)
            each = _expert(x[rows], w13[expert], w2[expert], args["x"], options.get("act"))
            value[rows] += share * each.value
            square[rows] += (share * each.size) ** 2
            slack[rows] += share.abs() * each.slack
    size = value.abs() + square.sqrt()
    terms = w2.shape[-1] + ids.shape[1]
    found = Float(value, size, terms, dtype_name(args["x"]), ("T", "H"), slack.nan_to_num(0.0))
    return Expected({"out": found})


def _expert(x: Tensor, w13: Tensor, w2: Tensor, like: Tensor, act: str | None) -> _Expert:
    left_open = torch.zeros(1, dtype=torch.float64)  # of gate and up, by ties of x
    if act:
        held = quantize_activation(x, act)
        left_open = torch.where(held.near, held.step, 0.0) @ w13.abs().T
        x = held.value
    both = x @ w13.T
    gate, up = both.chunk(2, -1)
    inner = silu(gate) * up
    # How the inner value moves with gate and up, each of which is a sum in fp32.
    by_gate, by_up = silu_slope(gate) * up, silu(gate)
    gate_sum, up_sum = (both.abs() + spread(x, w13)).chunk(2, -1)
    rounded = (
        _FP32_SUMS * sqrt(x.shape[-1]) * ((by_gate * gate_sum) ** 2 + (by_up * up_sum) ** 2).sqrt()
    )
    if act:
        gate_open, up_open = left_open.chunk(2, -1)
        rounded = rounded + by_gate.abs() * gate_open + by_up.abs() * up_open
    if like.dtype != torch.float32 or act:
        # Operands of a bf16 product are bf16: gate, up and their product, each rounded on its own.
        narrow = half_ulp(like) / 2 * ((by_gate * gate) ** 2 + 2 * inner**2).sqrt()
        rounded = rounded + _SIGMAS * narrow
    if act:
        quantized = quantize_activation(inner, act, _NARROW)
        inner = quantized.value
        # A scale that is off in its last bits shifts the whole grid.
        rounded = rounded + _SIGMAS * _REGRID * quantized.step
        if act == "nvfp4":  # so is one that falls to the next E4M3 number
            rounded = rounded + torch.where(quantized.near, quantized.step, 0.0)
    value = inner @ w2.T
    return _Expert(value, value.abs() + spread(inner, w2), spread(rounded, w2))


ORACLE = MappingProxyType({"router": router, "moe_experts": moe_experts})
