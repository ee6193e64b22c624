"""The fake's experts: weights are read in the library's orders, which are spelled out here byte by
byte, and activations become what its own rules make of them.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ml4core_conformance.oracle import numbers
from ml4core_conformance.oracle.products import silu
from ml4core_conformance.oracle.quantize import mxfp4_exponents

from .rules import array, floats, ints, need


class ActivationType(Enum):
    No, Silu, Gelu, Swiglu = -1, 0, 1, 2


class QuantType(Enum):
    No, per_Tensor, per_Token, per_1x32, per_1x128, per_128x128 = range(6)


def fused_moe(arch: str, given: dict[str, Any]) -> Tensor:
    x = array("hidden_states", given["hidden_states"], torch.bfloat16, (None, None))
    rows, hidden = x.shape
    topk = given["topk_ids"].shape[1]
    weights = floats("topk_weight", given["topk_weight"], rows, topk)
    ids = ints("topk_ids", given["topk_ids"], rows, topk).long()
    need(given["activation"] is ActivationType.Silu, f"activation {given['activation']}")
    for name in ("w1", "w2"):
        need(getattr(given[name], "is_shuffled", False), f"{name} doesn't say that it is shuffled")
    quant, gated = given["quant_type"], given["gate_mode"] == "interleave"
    if quant is QuantType.per_128x128:
        need(not gated, "experts in FP8 have their gates apart")
        act = "fp8_block"
        w13, w2 = _fp8_block(arch, given, hidden)
    else:
        need(quant is QuantType.per_1x32, f"{quant}: this fake has MXFP4 and FP8 by blocks")
        act = _act(arch, rows, gated)
        w13, w2 = _mxfp4(given, hidden, gated)
    mask = given["expert_mask"]
    if mask is not None:
        need(act != "mxfp4", "a4w4 takes no expert_mask")
        mask = ints("expert_mask", mask, None)
        need(int(mask.sum()) == len(w13), "the mask has as many experts as the weights")
        # By its convention a choice more stands behind a row's own, of an expert that no rank has.
        need(int(mask[-1]) == 0, "the mask's last expert is one that no rank has")
        need(bool((ids[:, -1] == len(mask) - 1).all()), "the last choice is of that expert")
        local = torch.where(mask > 0, mask.cumsum(0) - 1, -1)
        ids = local[ids]
    out = torch.zeros(rows, hidden, dtype=torch.float64)
    for t in range(rows):
        for j in range(topk):
            expert = int(ids[t, j])
            if expert >= 0:
                need(expert < len(w13), f"expert {expert} of {len(w13)}")
                each = _quantized(x[t : t + 1].double(), act)
                gate, up = (each @ w13[expert].T).chunk(2, -1)
                inner = _quantized(silu(gate) * up, act)
                out[t] += float(weights[t, j]) * (inner @ w2[expert].T)[0]
    return out.to(torch.bfloat16)


def _act(arch: str, rows: int, gated: bool) -> str:
    if not gated:
        return "mxfp4"
    bound = int(os.environ.get("AITER_BF16_FP8_MOE_BOUND", "256"))
    return "bf16" if arch != "gfx950" or rows < bound else "mxfp8"


def _quantized(x: Tensor, act: str) -> Tensor:
    if act == "bf16":
        return x.to(torch.bfloat16).double()
    if act == "fp8_block":
        blocks = x.unflatten(-1, (-1, 128))
        each = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        codes = (blocks / each).float().to(torch.float8_e4m3fn)
        return (codes.double() * each).flatten(-2)
    groups = x.numpy().reshape(*x.shape[:-1], -1, 32)
    if act == "mxfp4":  # by its own rule, which is not that of the weights
        unit = np.ldexp(1.0, mxfp4_exponents(x.numpy(), "roundup"))[..., None]
        found = numbers.e2m1_decode(numbers.e2m1_encode(groups / unit)) * unit
        return torch.from_numpy(found.reshape(x.shape))
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), 2.0**-100)
    unit = 2.0 ** np.ceil(np.log2(amax / 448.0))
    codes = torch.from_numpy((groups / unit).reshape(x.shape)).float().to(torch.float8_e4m3fn)
    wide = codes.double().numpy().reshape(groups.shape) * unit
    return torch.from_numpy(wide.reshape(x.shape))


def _fp8_block(arch: str, given: dict[str, Any], hidden: int) -> tuple[Tensor, Tensor]:
    need(arch == "gfx950", f"e4m3fn on {arch}")
    fp8 = torch.float8_e4m3fn
    experts, rows, _ = array("w1", given["w1"], fp8, (None, None, hidden)).shape
    width = rows // 2
    array("w2", given["w2"], fp8, (experts, hidden, width))
    need(hidden % 128 == 0 and width % 128 == 0, f"experts of {hidden} and {width}")
    found = []
    for name, n, k in (("w1", rows, hidden), ("w2", hidden, width)):
        scale = floats(f"{name}_scale", given[f"{name}_scale"], experts, n // 128, k // 128)
        flat = given[name].view(torch.uint8).reshape(-1)
        e, row, column = np.meshgrid(np.arange(experts), np.arange(n), np.arange(k), indexing="ij")
        codes = flat[torch.from_numpy(_tiled(e, row, column, n, k))].view(fp8)
        wide = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        found.append(codes.double() * wide)
    return found[0], found[1]


def _mxfp4(given: dict[str, Any], hidden: int, gated: bool) -> tuple[Tensor, Tensor]:
    fp4, e8m0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
    experts, rows, _ = array("w1", given["w1"], fp4, (None, None, hidden // 2)).shape
    width = rows // 2
    array("w2", given["w2"], fp4, (experts, hidden, width // 2))
    need(hidden % 256 == 0 and width % 256 == 0, f"experts of {hidden} and {width}")
    found = []
    for name, n, k, first in (("w1", rows, hidden, True), ("w2", hidden, width, False)):
        codes = given[name].view(torch.uint8)
        scale = array(f"{name}_scale", given[f"{name}_scale"], e8m0, (None, None)).view(torch.uint8)
        need(tuple(scale.shape) == (-(-experts * n // 256) * 256, -(-k // 256) * 8),
             f"{name}_scale is {list(scale.shape)}")  # fmt: skip
        flat, flat_scale = codes.reshape(-1).numpy(), scale.reshape(-1).numpy()
        e, row, column = np.meshgrid(
            np.arange(experts), np.arange(n), np.arange(k // 2), indexing="ij"
        )
        group = np.meshgrid(np.arange(experts), np.arange(n), np.arange(k // 32), indexing="ij")
        if gated and first:
            place = _gated(e, row, column, n, k // 2)
            scale_place = _gated_scale(*group, n, scale.shape[1])
        else:
            place = _tiled(e, row, column, n, k // 2)
            scale_place = _tiled_scale(*group, n, scale.shape[1])
        values = numbers.e2m1_decode(numbers.unpack_nibbles(flat[place]))
        units = numbers.e8m0_decode(flat_scale[scale_place]).astype(np.float64)
        found.append(torch.from_numpy(values * np.repeat(units, 32, axis=-1)))
    return found[0], found[1]


def _tiled(e: Any, row: Any, byte: Any, n: int, width: int) -> Any:
    """[N/16][Kb/32][2][16 rows][16 bytes] of each expert."""
    inside = (row // 16) * 16 * width + (byte // 32) * 512 + (byte % 32 // 16) * 256
    return e * n * width + inside + (row % 16) * 16 + byte % 16


def _gated(e: Any, row: Any, byte: Any, n: int, width: int) -> Any:
    """[I/16][gate, up][Kb/64][4][16 rows][16 bytes] of each expert."""
    half, own = row // (n // 2), row % (n // 2)
    inside = ((own // 16) * 2 + half) * 16 * width + (byte // 64) * 1024 + (byte % 64 // 16) * 256
    return e * n * width + inside + (own % 16) * 16 + byte % 16


def _tiled_scale(e: Any, row: Any, group: Any, n: int, groups: int) -> Any:
    """[rows/32][groups/8][4][16 rows][2 groups of 4][2 groups of 16 rows] of all experts' rows."""
    all_row = e * n + row
    inside = (group % 4) * 64 + (all_row % 16) * 4 + (group % 8 // 4) * 2 + all_row % 32 // 16
    return (all_row // 32) * 32 * groups + (group // 8) * 256 + inside


def _gated_scale(e: Any, row: Any, group: Any, n: int, groups: int) -> Any:
    """[E][I/16][groups/8][4][16 rows][2 groups of 4][gate, up]."""
    half, own = row // (n // 2), row % (n // 2)
    inside = (group % 4) * 64 + (own % 16) * 4 + (group % 8 // 4) * 2 + half
    return e * n * groups + (own // 16) * 32 * groups + (group // 8) * 256 + inside
