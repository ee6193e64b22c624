"""The fake's block-FP8 product and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .rules import array, floats, need


def gemm_a8w8_blockscale(arch: str, given: dict[str, Any]) -> Tensor:
    fp8 = torch.float8_e4m3fn if arch == "gfx950" else torch.float8_e4m3fnuz
    rows, inner = array("XQ", given["XQ"], fp8, (None, None)).shape
    columns = array("WQ", given["WQ"], fp8, (None, inner)).shape[0]
    x_scale = floats("x_scale", given["x_scale"], rows, -(-inner // 128))
    w_scale = floats("w_scale", given["w_scale"], -(-columns // 128), -(-inner // 128))
    need(given["dtype"] in (torch.bfloat16, torch.float16), f"dtype {given['dtype']}")
    need(not given["isBpreshuffled"], "weights lie as they are")
    x = given["XQ"].double() * x_scale.double().repeat_interleave(128, 1)[:, :inner]
    spread = w_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = given["WQ"].double() * spread[:columns, :inner]
    return (x @ weight.T).to(given["dtype"])


def rmsnorm2d_fwd(arch: str, given: dict[str, Any]) -> Tensor:
    x = array("input", given["input"], torch.bfloat16, (None, None))
    weight = array("weight", given["weight"], torch.bfloat16, (x.shape[1],))
    return _normed(x.double(), weight, given["epsilon"])


def rmsnorm2d_fwd_with_add(arch: str, given: dict[str, Any]) -> None:
    x = array("input", given["input"], torch.bfloat16, (None, None))
    names = ("out", "residual_in", "residual_out")
    out, before, after = (array(n, given[n], torch.bfloat16, x.shape) for n in names)
    weight = array("weight", given["weight"], torch.bfloat16, (x.shape[1],))
    need(after.data_ptr() != before.data_ptr(), "the residual is written over")
    after.copy_((x.double() + before.double()).to(torch.bfloat16))
    out.copy_(_normed(after.double(), weight, given["epsilon"]))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    found = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return found.to(torch.bfloat16)
