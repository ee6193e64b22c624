"""DeepGEMM as a peer: the only file that imports it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core_cuda.kernels.activations import quantized

NAMES = ("deep_gemm", "vllm.third_party.deep_gemm")
"""Modules that hold it, the first of its own."""


def deep_gemm() -> Any:
    """The library, by itself or as vLLM brings it. ``ImportError`` where neither is installed."""
    told = []
    for name in NAMES:
        try:
            return import_module(name)
        except ImportError as error:
            told.append(f"{name}: {error}")
    raise ImportError("; ".join(told))


def product(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """``gemm`` of an FP8 block weight with an activation quantised to FP8 in blocks of 128.
    ``ValueError`` for anything else.
    """
    if weight.format != "fp8_block" or len(weight.shape) != 2 or x.shape[1] % 128:
        raise ValueError(
            f"DeepGEMM takes fp8_block matrices and rows of a multiple of 128 values, got "
            f"{weight.format} {list(weight.shape)} and rows of {x.shape[1]}"
        )
    module = deep_gemm()
    codes = quantized(x if x.stride(-1) == 1 else x.contiguous(), "fp8_block")
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    if x.shape[0]:
        given = (codes.data.view(torch.float8_e4m3fn), codes.scale)
        module.fp8_gemm_nt(
            given, (weight.data.view(torch.float8_e4m3fn), weight.parts["scale"]), out
        )
    return out.to(out_dtype or x.dtype)


def serving(own: Callable[..., Tensor], rows: int) -> Callable[..., Tensor]:
    """``gemm`` that calls the library from so many rows on, where it takes the weight, and ``own``
    else.
    """

    def gemm(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        fits = weight.format == "fp8_block" and x.dtype == torch.bfloat16
        if fits and x.shape[0] >= rows and x.shape[1] % 128 == 0 and weight.shape[0] % 64 == 0:
            return product(x, weight, out_dtype)
        return own(x, weight, out_dtype)

    return gemm
