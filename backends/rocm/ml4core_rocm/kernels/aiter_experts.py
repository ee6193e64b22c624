"""AITER's fused experts.

What activations become isn't an argument: it follows from the order of the gates and from the
environment. MXFP4 weights with separated gates meet MXFP4 activations (a4w4); with interleaved
ones, on gfx950, FP8 activations from so many rows on as ``AITER_BF16_FP8_MOE_BOUND`` says, so that
0 makes them FP8 always (a8w4). MXFP4 activations with interleaved gates have no tuned kernel, and
give numbers without meaning; so the order is part of the weights' type here. Weights in FP8 by
blocks meet FP8 activations with a scale for 128 columns, gates separated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core_rocm import shuffles
from ml4core_rocm.aiter_functions import load
from ml4core_rocm.providers import UNITS
from ml4core_rocm.switches import MOE_BOUND

Mode = Literal["a4w4", "a8w4", "fp8_block"]
MODES: tuple[Mode, ...] = ("a4w4", "a8w4", "fp8_block")
FORMATS: Mapping[str, str] = MappingProxyType(
    {"a4w4": "mxfp4", "a8w4": "mxfp4", "fp8_block": "fp8_block"}
)
"""Mode -> the format of its weights."""
_SCALED: Mapping[str, str] = MappingProxyType(
    {"a4w4": "per_1x32", "a8w4": "per_1x32", "fp8_block": "per_128x128"}
)
"""Mode -> what the library calls its scales."""


@dataclass(frozen=True)
class Experts:
    """A rank's experts in the order of one mode.

    Attributes:
        w13, w13_scale, w2, w2_scale: shuffled; float4_e2m1fn_x2 with float8_e8m0fnu scales, or
            float8_e4m3fn, of which fp32 scales of 128 x 128 stay as they are.
        count, width, hidden: E, I and H.
    """

    mode: Mode
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    count: int
    width: int
    hidden: int


def arrange(w13: Weight, w2: Weight, mode: Mode) -> Experts:
    """Experts [E, 2I, H] and [E, H, I] in the order of ``mode``. ``ValueError`` for another format
    than its own, and for widths that the library's tiles don't divide.
    """
    if mode not in MODES:
        raise ValueError(f"experts are arranged for {', '.join(MODES)}, not for {mode!r}")
    wanted, unit = FORMATS[mode], UNITS[mode]
    if (w13.format, w2.format) != (wanted, wanted):
        raise ValueError(f"{mode} takes experts in {wanted}, not {w13.format} and {w2.format}")
    count, hidden, width = w2.shape
    if hidden % unit or width % unit:
        raise ValueError(
            f"AITER's {mode} experts take multiples of {unit}; these are {hidden} and {width} "
            "wide a rank: another --tensor-parallel-size, or experts of our own"
        )
    if mode == "fp8_block":
        fp8 = torch.float8_e4m3fn
        tiles = [shuffles.tiled(weight.data).view(fp8) for weight in (w13, w2)]
        blocks = [weight.parts["scale"].contiguous() for weight in (w13, w2)]
        return Experts(mode, tiles[0], blocks[0], tiles[1], blocks[1], count, width, hidden)
    flat = [weight.parts["scale"].flatten(0, 1) for weight in (w13, w2)]
    if mode == "a4w4":
        data = (shuffles.tiled(w13.data), shuffles.tiled(w2.data))
        scales = [shuffles.tiled_scales(scale) for scale in flat]
    else:
        data = (shuffles.tiled_gated(w13.data), shuffles.tiled_wide(w2.data))
        scales = [
            shuffles.tiled_scales_gated(flat[0], count),
            shuffles.tiled_scales_wide(flat[1], count),
        ]
    fp4, e8m0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
    parts = (data[0].view(fp4), scales[0].view(e8m0), data[1].view(fp4), scales[1].view(e8m0))
    return Experts(mode, *parts, count, width, hidden)


def fused(
    x: Tensor,
    experts: Experts,
    weights: Tensor,
    ids: Tensor,
    first_expert: int = 0,
    all_experts: int | None = None,
) -> Tensor:
    """The weighted sum of experts ``ids`` int64 [T, topk], times ``weights`` fp32, on bf16 ``x``
    [T, H]; of ``all_experts`` this rank has those from ``first_expert`` on.

    ``ValueError`` for experts of several ranks in a4w4, which the library doesn't mask.
    ``RuntimeError`` where the environment would make other activations than the mode's.
    """
    total = experts.count if all_experts is None else all_experts
    shared = total > experts.count
    if shared and experts.mode == "a4w4":
        raise ValueError("AITER's a4w4 experts take no mask: expert parallelism needs a8w4")
    if experts.mode == "a8w4" and os.environ.get(MOE_BOUND) != "0":
        raise RuntimeError(f"a8w4 wants {MOE_BOUND}=0 in the environment of the process")
    aiter: Any = import_module("aiter")
    for part in (experts.w13, experts.w2):
        part.is_shuffled = True  # type: ignore[attr-defined]  # views and moves lose it
    mask = None
    weights, ids = weights.float(), ids.to(torch.int32)
    if shared:
        # With a mask the library takes the last choice for one of an expert that no rank has, and
        # looks its configurations up for the others.
        place = torch.arange(total + 1, device=x.device)
        inside = (place >= first_expert) & (place < first_expert + experts.count)
        mask = inside.to(torch.int32)
        weights = torch.cat((weights, weights.new_zeros(len(ids), 1)), 1)
        ids = torch.cat((ids, ids.new_full((len(ids), 1), total)), 1)
    out: Tensor = load("fused_moe")(
        x.contiguous(), experts.w13, experts.w2, weights.contiguous(), ids.contiguous(),
        expert_mask=mask, activation=aiter.ActivationType.Silu,
        quant_type=getattr(aiter.QuantType, _SCALED[experts.mode]),
        w1_scale=experts.w13_scale, w2_scale=experts.w2_scale,
        gate_mode="interleave" if experts.mode == "a8w4" else "separated",
    )  # fmt: skip
    return out
