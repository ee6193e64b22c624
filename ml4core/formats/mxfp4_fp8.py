"""FP8 in blocks to MXFP4, by way of bfloat16 and without ever holding it: bytes are compared.

The result is that of `mxfp4.quantize` on `fp8_block.dequantize_weight` in bfloat16, bit for bit.
Within a block all values are 127 magnitudes times one scale, so each magnitude of a group's largest
element has one exponent, and each step of E2M1 one least FP8 code that reaches it. Those steps are
found for each block and exponent; what is left for each element is seven comparisons of bytes,
which run over groups side by side.

For conversion at loading, on any device. Not traceable: it looks at the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.formats import e4m3, e8m0, fp8_block, mxfp4
from ml4core.formats.blocks import check_multiple

_STRIP_BYTES = 768 << 10  # with what is made of them they fit a core's second cache
_CODES = 127  # magnitudes of e4m3fn; 0x7F is NaN
_PER_BLOCK = fp8_block.BLOCK // mxfp4.GROUP
# 448 is 2**17.8 times the least magnitude, and rules add at most one step.
_EXPONENTS = 21
# Where the next code of E2M1 begins, and whether the value itself belongs to it: ties go to even.
_STEPS: tuple[tuple[float, bool], ...] = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
_WORDS = mxfp4.GROUP // 8  # of eight codes, in a group
_EVERY_BYTE = 0x0101010101010101


def requantize(
    code: Tensor, scale: Tensor, rule: str = "even", out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [N, K/2] and E8M0 scales uint8 [N, K/32] of an FP8 weight.

    `code` is uint8 e4m3fn [N, K] without NaN, `scale` fp32 [ceil(N/128), ceil(K/128)]. With `out`
    the results are written there. Temporaries are a few megabytes, whatever the size. ValueError if
    K is not a multiple of 32, the shapes do not belong together, the rule is unknown, or a value is
    beyond bfloat16, NaN codes included.
    """
    rows, columns = code.shape
    check_multiple(columns, mxfp4.GROUP, "the last axis")
    needed = fp8_block.scale_shape(rows, columns)
    if tuple(scale.shape) != needed:
        raise ValueError(
            f"weight {list(code.shape)} in blocks of {fp8_block.BLOCK} needs scales "
            f"{list(needed)}, got {list(scale.shape)}"
        )
    if out is None:
        packed = code.new_empty(rows, columns // 2)
        out = packed, code.new_empty(rows, columns // mxfp4.GROUP)
    step = max(_STRIP_BYTES // max(columns, 1) // fp8_block.BLOCK, 1) * fp8_block.BLOCK
    for start in range(0, rows, step):
        strip = slice(start, min(start + step, rows))
        blocks = slice(start // fp8_block.BLOCK, (start + step) // fp8_block.BLOCK)
        _strip(code[strip], scale[blocks], rule, out[0][strip], out[1][strip])
    return out


def _strip(code: Tensor, scale: Tensor, rule: str, packed: Tensor, byte: Tensor) -> None:
    """Some rows, few enough for a core's cache."""
    rows, columns = code.shape
    # Eight codes move as one number: [groups, 4] of them become [4, groups], so that a comparison
    # with what differs by group runs through memory.
    by_group = code.contiguous().view(torch.int64).view(-1, _WORDS)
    words = by_group.new_empty(_WORDS, len(by_group)).copy_(by_group.t())
    codes = words.view(torch.uint8)  # [4, groups * 8]
    magnitude = codes & 0x7F
    largest = _largest(magnitude)  # [groups]; magnitudes are ordered as their codes
    block = _blocks(rows, columns // mxfp4.GROUP, scale.shape[1], code.device)

    values = _values(scale)  # [blocks, 127]
    exponents = mxfp4.scale_exponent(values.to(torch.float32), rule)  # [blocks, 127]
    place = block * _CODES + largest.clamp(max=_CODES - 1)
    if bool((largest >= _CODES).any()) or not bool(values.view(-1)[place].isfinite().all()):
        raise ValueError(
            "a value of an FP8 weight is NaN, or code times scale is beyond bfloat16's largest"
        )
    exponent = exponents.view(-1)[place]
    least = exponents[:, 1]  # of the smallest magnitude that isn't zero, so of the smallest group
    steps = _packed_steps(values, least)  # int64 [blocks, exponents]
    # A group of zeros may lie below; its codes are 0 at any exponent.
    index = (exponent - least[block]).clamp(0, _EXPONENTS - 1)
    of_group = steps.view(-1)[block * _EXPONENTS + index]  # [groups]
    reached = torch.zeros_like(magnitude)
    passed = torch.empty_like(magnitude, dtype=torch.bool)
    for number in range(len(_STEPS)):
        step = ((of_group >> (8 * number)) & 0xFF) * _EVERY_BYTE  # once for each code of a word
        torch.ge(magnitude, step.view(torch.uint8), out=passed)
        reached += passed.view(torch.uint8)
    torch.ge(codes, 0x80, out=passed)  # the sign, of zeros too
    reached.add_(passed.view(torch.uint8), alpha=8)
    pairs = reached.view(torch.int16)  # the even element in the low byte, on little-endian hosts
    pairs = ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8)  # [4, groups * 4]
    packed.view(torch.int32).view(-1, _WORDS).copy_(pairs.view(torch.int32).t())
    byte.copy_(e8m0.from_exponent(exponent).view(byte.shape))


def _values(scale: Tensor) -> Tensor:
    """fp64 [blocks, 127]: magnitude times scale, rounded to fp32 and then to bfloat16."""
    codes = torch.arange(_CODES, dtype=torch.uint8, device=scale.device)
    products = e4m3.decode(codes, "e4m3fn") * scale.to(torch.float32).reshape(-1, 1)
    return products.to(torch.bfloat16).to(torch.float64)


def _packed_steps(values: Tensor, least: Tensor) -> Tensor:
    """int64 [blocks, exponents], a byte a step: the least code whose value reaches it.

    Steps that no code reaches are at 127.
    """
    exponent = least.unsqueeze(-1) + torch.arange(_EXPONENTS, device=values.device)
    # Powers of two in fp64 by their bits: exact at any exponent, on any device.
    unit = ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    packed = torch.zeros_like(exponent, dtype=torch.int64)
    for place, (bound, included) in enumerate(_STEPS):
        first = torch.searchsorted(values, unit * bound, right=not included)
        packed |= first << (8 * place)
    return packed


def _largest(magnitude: Tensor) -> Tensor:
    """int64 [groups], the largest of each group of uint8 [4, groups * 8]. Halving of an outer axis
    beats a reduction.
    """
    inner = _halved(magnitude)  # [groups * 8]
    return _halved(inner.view(-1, 8).t().contiguous()).to(torch.int64)


def _halved(x: Tensor) -> Tensor:
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = torch.maximum(x[:half], x[half:])
    return x[0]


def _blocks(rows: int, count: int, across: int, device: torch.device) -> Tensor:
    """int64 [rows * count]: the block of each group, in row-major order."""
    down = torch.arange(rows, device=device) // fp8_block.BLOCK
    right = torch.arange(count, device=device) // _PER_BLOCK
    return (down.unsqueeze(-1) * across + right).reshape(-1)
