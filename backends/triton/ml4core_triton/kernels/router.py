"""``router``: fp32 logits, softmax over all experts, and the few largest.

Rate model: the weight, 128 x 6,144 in fp32, is 3.1 MB, 0.74 us; its inner axis is split over
programs, so that all of the device reads it, and a second launch adds the parts and selects.
At 4,096 rows 6.4 GFLOP, three times over: 26 us.

A bf16 activation meets the weight as a sum of three bf16 numbers, which hold all 24 bits of it: the
matrix units then give the fp32 product, and ties stay ties. fp32 ones are multiplied in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.numeric import dot, narrow, next_power, rows_of, widen
from ml4core_triton.kernels.target import units_of


@triton.jit
def _logits_kernel(
    x, weight, parts, T, E, H, x_row, steps,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Partial logits [parts, T, E]: grid (tiles of E, tiles of T, parts)."""
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    expert = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    acc = tl.zeros([BN, BM], tl.float32)
    begin = part * steps * BK
    for k0 in range(begin, tl.minimum(begin + steps * BK, H), BK):
        k = k0 + tl.arange(0, BK)
        fits = (expert < E)[:, None] & (k < H)[None, :]
        whole = tl.load(weight + expert.to(tl.int64)[:, None] * H + k[None, :], fits, other=0.0)
        inside = (k < H)[:, None] & (token < T)[None, :]
        one = tl.load(x + token.to(tl.int64)[None, :] * x_row + k[:, None], inside, other=0.0)
        if SPLIT:
            high = narrow(whole, tl.bfloat16)
            rest = whole - widen(high)
            middle = narrow(rest, tl.bfloat16)
            low = narrow(rest - widen(middle), tl.bfloat16)
            acc = dot(high, one, dot(middle, one, dot(low, one, acc)))
        else:
            acc = dot(whole, widen(one), acc)
    where = parts + (part.to(tl.int64) * T + token[None, :]) * E + expert[:, None]
    tl.store(where, acc, mask=(expert < E)[:, None] & (token < T)[None, :])


@triton.jit
def selected(
    parts, token, T, E, weights, ids, routed_scale,
    PARTS: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the parts of a token's logits and stores its experts and their weights.

    With ``SHARED`` a last choice follows: expert E of weight 1; and a row that can't be judged has
    weights NaN, not 0.
    """
    COUNT: tl.constexpr = TOPK + SHARED
    expert = tl.arange(0, BLOCK)
    real = expert < E
    logits = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        at = (part * T + token).to(tl.int64) * E
        logits += tl.load(parts + at + expert, mask=real, other=0.0)
    # NaN passes no comparison either.
    broken = tl.sum((real & ~(tl.abs(logits) < float("inf"))).to(tl.int32), axis=0) > 0
    logits = tl.where(broken, 0.0, logits)
    left = tl.where(real, logits, float("-inf"))
    top = tl.max(left, axis=0)
    total = tl.sum(tl.where(real, tl.exp(logits - top), 0.0), axis=0)
    place = tl.arange(0, BLOCK)
    chosen = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOPK):
        best = tl.max(left, axis=0)
        one = tl.min(tl.where(left == best, expert, BLOCK), axis=0)
        left = tl.where(expert == one, float("-inf"), left)
        chosen = tl.where(place == choice, tl.exp(best - top), chosen)
        tl.store(ids + token.to(tl.int64) * COUNT + choice, one.to(tl.int64))
    if RENORMALIZE:
        total = tl.sum(chosen, axis=0)
    found = tl.div_rn(chosen, tl.zeros_like(chosen) + total) * routed_scale
    if SHARED:
        found = tl.where(broken, float("nan"), tl.where(place == TOPK, 1.0, found))
        tl.store(ids + token.to(tl.int64) * COUNT + TOPK, E.to(tl.int64))
    else:
        found = tl.where(broken, 0.0, found)
    tl.store(weights + token.to(tl.int64) * COUNT + place, found, mask=place < COUNT)


@triton.jit
def _select_kernel(
    parts, weights, ids, T, E, routed_scale,
    PARTS: tl.constexpr, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T,)."""
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    selected(
        parts, tl.program_id(0), T, E, weights, ids, routed_scale, PARTS, TOPK, RENORMALIZE, SHARED,
        BLOCK,
    )  # fmt: skip


def router(
    x: Tensor, weight: Tensor, topk: int, renormalize: bool, routed_scale: float
) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, topk] and expert ids int64 [T, topk] of ``x`` [T, H], ``weight`` [E, H].

    ``ValueError`` where more experts are wanted than there are.
    """
    return route(x, weight, topk, renormalize, routed_scale, shared=False)


def route(
    x: Tensor, weight: Tensor, topk: int, renormalize: bool, routed_scale: float, shared: bool,
    *, ahead: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same; with ``shared`` one choice more, of expert E with weight 1, and NaN for the weights
    of a row that can't be judged. ``ahead``: launches may begin before the end of the one before,
    where the device can do that.
    """
    rows, experts = x.shape[0], weight.shape[0]
    if not 1 <= topk <= experts:
        raise ValueError(f"the router is to choose {topk} of {experts} experts")
    count = topk + shared
    weights = torch.empty(rows, count, dtype=torch.float32, device=x.device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=x.device)
    if rows:
        parts = logit_parts(x, weight, ahead=ahead)
        _select_kernel[(rows,)](
            parts, weights, ids, rows, experts, float(routed_scale),
            PARTS=parts.shape[0], TOPK=topk, RENORMALIZE=renormalize, SHARED=int(shared),
            BLOCK=next_power(max(experts, count)), DEPENDENT=ahead, num_warps=1,
            **dependent(ahead),
        )  # fmt: skip
    return weights, ids


def logit_parts(x: Tensor, weight: Tensor, *, ahead: bool = False) -> Tensor:
    """Logits fp32 [parts, T, E], to be added in order."""
    x, weight = rows_of(x), weight.to(torch.float32).contiguous()
    (rows, width), experts = x.shape, weight.shape[0]
    block, each = 64, min(64, max(16, next_power(experts)))
    many = min(64, max(16, next_power(rows)))
    tiles = (triton.cdiv(experts, each), triton.cdiv(rows, many))
    steps = triton.cdiv(width, block)
    count = 1
    while tiles[0] * tiles[1] * count < units_of(x.device) and 2 * count <= min(32, steps):
        count *= 2
    found = torch.empty(count, rows, experts, dtype=torch.float32, device=x.device)
    _logits_kernel[(*tiles, count)](
        x, weight, found, rows, experts, width, x.stride(0), triton.cdiv(steps, count),
        BN=each, BM=many, BK=block, SPLIT=x.dtype == torch.bfloat16, DEPENDENT=ahead, num_warps=4,
        num_stages=3, **dependent(ahead),
    )  # fmt: skip
    return found
