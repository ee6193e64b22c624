"""What sums of FP8 products may lose where the sources are compiled for Hopper.

Its matrix units add 32 products and the sum so far at a time. All of them are aligned to the
largest, and what lies more than 13 bits of fraction below that one's first bit is cut off (``cut``
does the same; it gives the error that an H200 gave for ``fp8_tensor+fp8_tensor/rows``, 8.4e-4, to
both digits). A product whose operands have one scale each stays in these units over all of its
``n`` columns, where the suite's own allowance (``FP8_UNITS`` of its oracle) is that of blocks of
128, whose sums leave them. So each of ``n`` addends loses less than 2**-13 of the largest there
was, which partial sums bound: ``size``, as the oracle has it. The losses have the addends' signs
and are independent, so together they grow as sqrt(n):

    sqrt(n) * 2**-13 * size

gfx950's units keep the bits of fp32, and so does the interpreter: there nothing is added.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from ml4core_conformance.case import OpCase
from ml4core_conformance.oracle.expected import Float

BITS = 13
COLUMNS = 32
CHAINED = ("gemm", "fp8_tensor+fp8_tensor")
"""The op and the variant of products that stay in the units over all columns."""


def cuts_sums(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def allowed(want: Float, case: OpCase) -> Float:
    """``want`` with what cut sums of a chained product may lose; of any other case as it is."""
    if (case.op, case.variant) != CHAINED:
        return want
    lost = sqrt(want.terms) * 2.0**-BITS * want.size
    return replace(want, slack=lost if want.slack is None else want.slack + lost)


def cut(x: Tensor, weight: Tensor, bits: int = BITS) -> Tensor:
    """fp64 [T, N]: ``x`` [T, K] by ``weight`` [N, K], both fp64, in sums that keep ``bits`` bits of
    fraction.
    """
    total = x.new_zeros(len(x), len(weight))
    for first in range(0, x.shape[1], COLUMNS):
        columns = slice(first, first + COLUMNS)
        addends = x[:, None, columns] * weight[None, :, columns]
        addends = torch.cat((addends, total[..., None]), -1)
        largest = addends.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
        unit = torch.exp2(torch.floor(torch.log2(largest)) - bits)
        total = ((addends / unit).trunc() * unit).sum(-1)
    return total
