"""``quantize``: a tensor in a weight format, byte for byte as ``ml4core.formats`` has it.

Scales come from exact rules on the bits of fp32, divisions are rounded to nearest (``div_rn``; the
plain division of a device is not), codes are found by comparison. Each element is read twice, as a
block's scale comes before its codes: 6 bytes an element of fp32 and FP8 are the floor, 10 what is
read and written where a matrix doesn't stay in L2. Weights are quantised once, at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import WEIGHT_FORMATS, Weight
from ml4core_triton.kernels.fp8 import decoded, fp8_code
from ml4core_triton.kernels.numeric import e8m0, finite_size, narrow, next_power, widen

RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"fp8_block": ("linear", "pow2"), "mxfp4": ("even", "floor", "roundup", "ceil")}
)
"""Rules of scales by format; the first is the default."""

_CARRY: Mapping[str, int] = MappingProxyType(
    {"floor": 0x000000, "even": 0x200000, "roundup": 0x3FFFFF, "ceil": 0x7FFFFF}
)
"""What an MXFP4 rule adds to the fraction bits of a group's amax before its exponent is taken."""


@triton.jit
def mxfp4_exponent(amax, carry):
    """int32 exponents -127..127 of groups of these largest finite magnitudes."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = ((bits + carry) >> 23) - (127 + 2)
    return tl.minimum(tl.maximum(exponent, -127), 127)


@triton.jit
def e2m1_code(x):
    """Codes int32 0..15 of fp32: to nearest, ties to even, saturating; NaN is +6."""
    size = tl.abs(x)
    # 7 less one for each step not reached: NaN passes no comparison.
    code = 7 - (size <= 0.25).to(tl.int32) - (size < 0.75).to(tl.int32)
    code = code - (size <= 1.25).to(tl.int32) - (size < 1.75).to(tl.int32)
    code = code - (size <= 2.5).to(tl.int32) - (size < 3.5).to(tl.int32)
    code = code - (size <= 5.0).to(tl.int32)
    negative = (x.to(tl.int32, bitcast=True) < 0) & (x == x)
    return code | (negative.to(tl.int32) << 3)


@triton.jit
def _ceil_pow2_scale(amax):
    """The least power of two s with amax <= 448 s, as fp32."""
    # 448 is 1.75 * 2**8: a fraction above 1.75 carries.
    exponent = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 127 - 8
    return e8m0(exponent + 127)


@triton.jit
def _fp8_block_kernel(x, data, scale, N, K, POW2: tl.constexpr):
    """One block of 128 x 128: grid (blocks of K, blocks of N, matrices)."""
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * 128 + tl.arange(0, 128)
    columns = tl.program_id(0) * 128 + tl.arange(0, 128)
    fits = (rows < N)[:, None] & (columns < K)[None, :]
    at = matrix * N * K + rows.to(tl.int64)[:, None] * K + columns[None, :]
    value = widen(tl.load(x + at, mask=fits, other=0.0))
    amax = tl.maximum(tl.max(tl.max(finite_size(value), axis=1), axis=0), 1e-10)
    each = _ceil_pow2_scale(amax) if POW2 else tl.div_rn(amax, 448.0)
    code = fp8_code(tl.div_rn(value, tl.zeros_like(value) + each), False)
    tl.store(data + at, code, mask=fits)
    block = (matrix * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
    tl.store(scale + block + tl.program_id(0), each)


@triton.jit
def _amax_kernel(x, amax, size, BLOCK: tl.constexpr):
    """Largest finite magnitudes of pieces of matrices: grid (pieces, matrices)."""
    matrix = tl.program_id(1).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = widen(tl.load(x + matrix * size + at, mask=at < size, other=0.0))
        largest = tl.maximum(largest, finite_size(value))
    where = amax + matrix * tl.num_programs(0) + tl.program_id(0)
    tl.store(where, tl.max(largest, axis=0))


@triton.jit
def _fp8_tensor_kernel(x, amax, data, scale, size, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of a matrix under its own scale: grid (blocks, matrices)."""
    matrix = tl.program_id(1).to(tl.int64)
    largest = tl.max(tl.load(amax + matrix * PIECES + tl.arange(0, PIECES)), axis=0)
    each = tl.div_rn(tl.maximum(largest, 1e-10), 448.0)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = widen(tl.load(x + matrix * size + at, mask=at < size, other=0.0))
    code = fp8_code(tl.div_rn(value, tl.zeros_like(value) + each), False)
    tl.store(data + matrix * size + at, code, mask=at < size)
    tl.store(scale + matrix, each)


@triton.jit
def _pack(code, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes uint8 [GROUPS, WIDTH / 2] of codes int32 [GROUPS, WIDTH]: low nibble first."""
    low, high = tl.split(code.reshape([GROUPS, WIDTH // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def _mxfp4_kernel(x, data, scale, groups, CARRY: tl.constexpr, BLOCK: tl.constexpr):
    """Groups of 32 values, counted over the whole tensor: grid (blocks of groups,)."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    fits = (group < groups)[:, None]
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = widen(tl.load(x + at, mask=fits, other=0.0))
    exponent = mxfp4_exponent(tl.max(finite_size(value), axis=1), CARRY)
    # 2**-exponent is a normal number where 2**exponent may not be.
    code = e2m1_code(value * e8m0(127 - exponent)[:, None])
    half = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(data + half, _pack(code, BLOCK, 32), mask=fits)
    tl.store(scale + group, (exponent + 127).to(tl.uint8), mask=group < groups)


@triton.jit
def _nvfp4_kernel(x, amax, data, scale, row_scale, N, K, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Groups of 16 values of a row: grid (blocks of groups, N, matrices)."""
    matrix = tl.program_id(2).to(tl.int64)
    row = matrix * N + tl.program_id(1)
    largest = tl.max(tl.load(amax + matrix * PIECES + tl.arange(0, PIECES)), axis=0)
    # A scale that stays normal: 2**-64 is the least amax that counts.
    whole = tl.where(
        largest > 0, tl.div_rn(tl.maximum(largest, 5.421010862427522e-20), 2688.0), 1.0
    )
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    fits = columns < K
    value = widen(tl.load(x + row * K + columns, mask=fits, other=0.0))
    unit = tl.div_rn(tl.max(finite_size(value), axis=1), tl.full([BLOCK], 6.0, tl.float32))
    byte = fp8_code(tl.div_rn(unit, tl.zeros_like(unit) + whole), False).to(tl.int32)
    byte = tl.maximum(byte, 1).to(tl.uint8)  # never 0: nothing is divided by it
    factor = decoded(byte, tl.float32, False) * whole
    factor = tl.where(factor > 0, factor, 1.0)
    code = e2m1_code(tl.div_rn(value, tl.broadcast_to(factor[:, None], value.shape)))
    half = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(data + row * (K // 2) + half, _pack(code, BLOCK, 16), mask=half < K // 2)
    tl.store(scale + row * (K // 16) + group, byte, mask=group < K // 16)
    tl.store(row_scale + row, whole)


@triton.jit
def _cast_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = widen(tl.load(x + at, mask=at < size, other=0.0))
    tl.store(out + at, narrow(value, out.dtype.element_ty), mask=at < size)


def quantize(x: Tensor, format: str, rule: str | None = None) -> Weight:
    """``x`` [..., K] in a weight format by a rule of ``RULES``, or the format's first.

    ``ValueError`` for an unknown format or rule, for one row of values where the format scales
    matrices, and for a last axis that groups don't fill.
    """
    if format not in WEIGHT_FORMATS:
        known = ", ".join(WEIGHT_FORMATS)
        raise ValueError(f"unknown weight format {format!r}; known: {known}")
    rules = RULES.get(format, ())
    if rule is not None and rule not in rules:
        known = f"known: {', '.join(rules)}" if rules else "it has none"
        raise ValueError(f"unknown rule {rule!r} of format {format!r}; {known}")
    group = {"mxfp4": 32, "nvfp4": 16}.get(format, 1)
    if x.shape[-1] % group:
        raise ValueError(
            f"{format} has groups of {group} values; the last axis has {x.shape[-1]}, which they "
            "don't fill"
        )
    dense = x.contiguous()
    if format in ("fp32", "bf16"):
        parts = {"data": _cast(dense, torch.float32 if format == "fp32" else torch.bfloat16)}
    elif format == "mxfp4":
        parts = _mxfp4(dense, _CARRY[rule or rules[0]])
    else:
        if x.dim() < 2:
            raise ValueError(f"{format} scales matrices; x has {x.dim()} axis, give it [N, K]")
        if format == "fp8_block":
            parts = _fp8_block(dense, rule == "pow2")
        else:
            parts = (_fp8_tensor if format == "fp8_tensor" else _nvfp4)(dense)
    return Weight(format, tuple(x.shape), parts)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        _cast_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out


def _bytes(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def _matrices(x: Tensor) -> int:
    count = 1
    for size in x.shape[:-2]:
        count *= size
    return count


def _fp8_block(x: Tensor, pow2: bool) -> dict[str, Tensor]:
    *stack, rows, columns = x.shape
    blocks = (triton.cdiv(rows, 128), triton.cdiv(columns, 128))
    scale = torch.empty(*stack, *blocks, dtype=torch.float32, device=x.device)
    data = _bytes(x, *x.shape)
    if x.numel():
        grid = (blocks[1], blocks[0], _matrices(x))
        _fp8_block_kernel[grid](x, data, scale, rows, columns, POW2=pow2, num_warps=8)
    return {"data": data, "scale": scale}


def _pieces(x: Tensor) -> Tensor:
    """fp32 [matrices, pieces]: largest finite magnitudes; their largest is the matrix'."""
    size = x.shape[-2] * x.shape[-1]
    pieces = min(256, next_power(triton.cdiv(size, 8192)))
    found = torch.empty(_matrices(x), pieces, dtype=torch.float32, device=x.device)
    _amax_kernel[(pieces, _matrices(x))](x, found, size, BLOCK=1024)
    return found


def _fp8_tensor(x: Tensor) -> dict[str, Tensor]:
    size = x.shape[-2] * x.shape[-1]
    data = _bytes(x, *x.shape)
    scale = torch.empty(x.shape[:-2], dtype=torch.float32, device=x.device)
    if x.numel():
        amax = _pieces(x)
        _fp8_tensor_kernel[(triton.cdiv(size, 1024), _matrices(x))](
            x, amax, data, scale, size, PIECES=amax.shape[1], BLOCK=1024
        )
    return {"data": data, "scale": scale}


def _nvfp4(x: Tensor) -> dict[str, Tensor]:
    *lead, columns = x.shape
    data, scale = _bytes(x, *lead, columns // 2), _bytes(x, *lead, columns // 16)
    row_scale = torch.empty(lead, dtype=torch.float32, device=x.device)
    if x.numel():
        amax = _pieces(x)
        grid = (triton.cdiv(columns // 16, 64), lead[-1], _matrices(x))
        _nvfp4_kernel[grid](
            x, amax, data, scale, row_scale, lead[-1], columns, PIECES=amax.shape[1], BLOCK=64
        )
    return {"data": data, "scale": scale, "global_scale": row_scale}


def _mxfp4(x: Tensor, carry: int) -> dict[str, Tensor]:
    *lead, columns = x.shape
    data, scale = _bytes(x, *lead, columns // 2), _bytes(x, *lead, columns // 32)
    groups = scale.numel()
    if groups:
        _mxfp4_kernel[(triton.cdiv(groups, 32),)](x, data, scale, groups, CARRY=carry, BLOCK=32)
    return {"data": data, "scale": scale}
