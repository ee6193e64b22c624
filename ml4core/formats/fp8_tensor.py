"""FP8 with one scale for the whole tensor, as in Mistral's own FP8 checkpoints.

A value is `code * scale`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml4core.formats import e4m3
from ml4core.formats.blocks import finite_amax
from ml4core.formats.fp8_block import block_scale


def on_device(scale: Tensor | float, like: Tensor) -> Tensor:
    """`scale` as a float32 tensor on the device of `like`.

    Dividing by a number kept on the host may become a multiplication by its reciprocal, which
    loses a bit.
    """
    if isinstance(scale, Tensor):
        return scale.to(device=like.device, dtype=torch.float32)
    return torch.full((), scale, dtype=torch.float32, device=like.device)


def quantize(
    x: Tensor, flavour: str = "e4m3fn", scale: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:
    """Bytes uint8 [...] and the float32 scale [] of `x` [...].

    Without `scale` it is `max(amax, 1e-10) / quant_max` of the tensor's finite values.
    """
    if scale is None:
        scale = block_scale(finite_amax(x.flatten()), flavour)
    scale = on_device(scale, x)
    return e4m3.encode(x.to(torch.float32) / scale, flavour), scale


def dequantize(
    code: Tensor, scale: Tensor | float, flavour: str = "e4m3fn", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values [...] in `dtype` of E4M3 `code` [...]; the product is formed in float32."""
    return (e4m3.decode(code, flavour) * on_device(scale, code)).to(dtype)


def fuse(parts: Sequence[tuple[Tensor, Tensor]], flavour: str = "e4m3fn") -> tuple[Tensor, Tensor]:
    """One tensor with one scale of several, each bytes [N_i, K] and scale [], stacked by rows.

    The largest scale serves all: parts that have it keep their bytes, the others are rounded anew.
    """
    scale = torch.stack([own.to(torch.float32).reshape(()) for _, own in parts]).amax()
    codes = [quantize(dequantize(code, own, flavour), flavour, scale)[0] for code, own in parts]
    return torch.cat(codes, dim=-2), scale
