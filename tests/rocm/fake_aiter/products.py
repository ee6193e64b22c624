"""The fake's products, norms, gate and cache write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ml4core_conformance.oracle.products import silu

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


def gemm_a16w16(arch: str, given: dict[str, Any]) -> Tensor:
    rows, inner = array("A", given["A"], torch.bfloat16, (None, None)).shape
    weight = array("B", given["B"], torch.bfloat16, (None, inner))
    need(rows > 0, "no rows")
    for name in ("bias", "scale_a", "scale_b", "scale_c"):
        need(given[name] is None, f"{name} of plain bf16")
    need(not getattr(weight, "is_shuffled", False), "the weight lies as it is")
    need(given["otype"] in (None, torch.bfloat16), f"otype {given['otype']}: by way of bf16")
    return (given["A"].double() @ weight.double().T).to(torch.bfloat16)


def silu_and_mul(arch: str, given: dict[str, Any]) -> None:
    rows, width = array("input", given["input"], torch.bfloat16, (None, None)).shape
    out = array("out", given["out"], torch.bfloat16, (rows, width // 2))
    need(width % 2 == 0 and given["limit"] == 0, "two halves, without a limit")
    gate, up = given["input"].double().chunk(2, -1)
    out.copy_((silu(gate) * up).to(torch.bfloat16))


def concat_and_cache_mla(arch: str, given: dict[str, Any]) -> None:
    """Rows of bf16 as they are: other dtypes and casts aren't asked for."""
    slots = array("slot_mapping", given["slot_mapping"], torch.int64, (None,))
    latent = array("kv_c", given["kv_c"], torch.bfloat16, (len(slots), None), dense=False)
    rope = array("k_pe", given["k_pe"], torch.bfloat16, (len(slots), None), dense=False)
    cache = given["kv_cache"]
    width = latent.shape[1] + rope.shape[1]
    array("kv_cache", cache, torch.bfloat16, (None, None, width), dense=False)
    need(given["kv_cache_dtype"] == "auto", f"a cache of {given['kv_cache_dtype']}")
    floats("scale", given["scale"], 1)  # read, whatever the dtype
    for name, one in (("kv_c", latent), ("k_pe", rope)):
        # It looks at the strides of rows alone, and reads 8 values at once.
        need(one.stride(1) == 1 and cache.stride(2) == 1, f"{name} isn't dense inside")
        need((one.stride(0) | one.storage_offset()) % 8 == 0, f"{name} isn't aligned")
    size = cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        need(slot < len(cache) * size, f"slot {slot} lies outside of the cache")
        if slot >= 0:
            cache[slot // size, slot % size] = torch.cat((latent[row], rope[row]))


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
