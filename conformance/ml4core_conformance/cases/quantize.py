"""Inputs of ``quantize``. Variants are ``<format>+<dtype of x>``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ml4core_conformance.case import Arguments, OpCase
from ml4core_conformance.draw import Draw
from ml4core_conformance.op_inputs import ACTIVATIONS, WEIGHT_FORMATS, needs, strided

_RULES = {"fp8_block": ("linear", "pow2"), "mxfp4": ("even", "floor", "roundup", "ceil")}
_CORNERS = ("zero block", "ties", "max block", "sign of zero")

Make = Callable[[Draw], Arguments]


def cases() -> list[OpCase]:
    found = []
    for act, dtype in ACTIVATIONS.items():
        for format in WEIGHT_FORMATS:
            found += _of(act, dtype, format)
    return found


def _of(act: str, dtype: torch.dtype, format: str) -> list[OpCase]:
    def case(name: str, x: Callable[[Draw], Tensor], rule: str | None = None, *more: str) -> OpCase:
        def make(draw: Draw) -> Arguments:
            return {"x": _narrow(x(draw), dtype), "format": format, "rule": rule}

        return OpCase(
            "quantize",
            f"{format}+{act}",
            name if rule is None else f"{name}-{rule}",
            make,
            frozenset(_CORNERS if name == "edges" else ()),
            needs(act, f"weights:{format}"),
            name in ("rows", "sweep"),
            bugs=more,
        )

    found = [
        case("rows", lambda draw: draw.normal(40, 320)),
        case("stack", lambda draw: 3 * draw.normal(3, 33, 160)),
        case("slice", lambda draw: strided(draw.normal(9, 128))),
        case("edges", partial(_edges, format), None, "B023", "B032"),
    ]
    for rule in _RULES.get(format, ()):
        found.append(case("sweep", _sweep, rule, *(("B038",) if format == "mxfp4" else ())))
        found.append(case("edges", partial(_edges, format), rule))
    return found


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In ``dtype``, keeping strides."""
    if x.is_contiguous():
        return x.to(dtype)
    return strided(x.contiguous().to(dtype))


def _sweep(draw: Draw) -> Tensor:
    """Groups whose largest magnitude goes from 4 to 8 in steps of 1/16, at several exponents."""
    tops = 4 + torch.arange(65) / 16
    x = 0.2 * draw.normal(65, 128)
    x[:, 0::32] = tops.unsqueeze(-1)
    return x * torch.exp2(torch.arange(65) % 5 - 2.0).unsqueeze(-1)


def _edges(format: str, draw: Draw) -> Tensor:
    """Rows of 256 values; all that is special stands in blocks of its own.

    The first block makes each format's scales whole: its largest magnitude is 448 for FP8, 2688 for
    the global scale of NVFP4, and 6 in the groups with ties.
    """
    top = 2688.0 if format == "nvfp4" else 448.0
    x = torch.zeros(256, 256)
    x[0, 0] = top
    x[1, :16] = _ties(format)
    x[2, :16] = -_ties(format)
    x[3, 0:4] = torch.tensor([-0.0, 0.0, -1e-30, 1e-30])
    x[4, 32:64] = 1e-38 * draw.normal(32)
    x[5, 64] = torch.inf  # counts for no scale and saturates
    x[5, 65:67] = torch.tensor([-torch.inf, 3.0])
    x[6, 96:98] = torch.tensor([torch.nan, 2.0])
    x[7, :32] = 6.0
    x[8, :32] = 7.0  # the least group that some rules clip
    # Blocks of 128 x 128: beside the first, and below it, which stays zero.
    x[0:128, 128:256] = 0.9 * draw.normal(128, 128)
    x[128:256, 128:256] = 3e38
    if format == "nvfp4":
        x[128:256, 128:256] = 2688.0
    return x


def _ties(format: str) -> Tensor:
    """16 values between codes of the format, for a scale of 1; the first is the group's largest."""
    if format in ("mxfp4", "nvfp4"):
        halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
        near = [0.2578125, 0.74609375, 2.515625, 3.484375, 4.96875, 5.03125]
        return torch.tensor([6.0, *halves, *near, 0.0, 6.0])
    near = [17.0, 19.0, 21.0, 23.0, 272.0, 304.0, 336.0, 2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10]
    return torch.tensor([448.0, *near, 0.0, 15.5, 2.0**-6, 7.5 * 2.0**-9, 432.0])
