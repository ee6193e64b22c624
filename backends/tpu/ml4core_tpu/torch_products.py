"""Products as torch ops ``ml4tpu::*``; the form is that of ``torch_ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ml4core_tpu.bridge import bucket, padded, to_jax, to_torch
from ml4core_tpu.torch_ops import LEAST_ROWS, TARGET

if TYPE_CHECKING:
    import jax


def _jax_dtype(dtype: torch.dtype):
    import jax.numpy as jnp

    return jnp.dtype(jnp.float32 if dtype == torch.float32 else jnp.bfloat16)


@torch.library.custom_op("ml4tpu::fp8_matmul", mutates_args=(), device_types="cpu")
def fp8_matmul(
    x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype, quantize: bool
) -> Tensor:
    """``x`` [T, K] times the transpose of e4m3 codes [N, K] with scales of blocks, or one scale."""
    from ml4core_tpu.kernels import fp8_matmul as kernels

    rows = x.shape[0]
    out = kernels.fp8_matmul(
        to_jax(padded(x, bucket(rows, LEAST_ROWS))),
        to_jax(weight),
        to_jax(scale),
        out_dtype=_jax_dtype(out_dtype),
        quantize=quantize,
        target=TARGET,
    )
    return to_torch(out, rows)


@fp8_matmul.register_fake
def _(x, weight, scale, out_dtype, quantize):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


@torch.library.custom_op("ml4tpu::wide_matmul", mutates_args=(), device_types="cpu")
def wide_matmul(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``x`` [T, K] times the transpose of a plain weight [N, K]."""
    from ml4core_tpu.kernels import fp8_matmul as kernels

    rows = x.shape[0]
    given = to_jax(padded(x, bucket(rows, LEAST_ROWS)))
    found = kernels.wide_matmul(given, to_jax(weight), out_dtype=_jax_dtype(out_dtype))
    return to_torch(found, rows)


@wide_matmul.register_fake
def _(x, weight, out_dtype):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


@torch.library.custom_op("ml4tpu::router", mutates_args=(), device_types="cpu")
def router(
    x: Tensor, weight: Tensor, topk: int, renormalize: bool, routed_scale: float
) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, topk] and expert ids int64 [T, topk]."""
    from ml4core_tpu.kernels import moe

    rows = x.shape[0]
    weights, ids = moe.router(
        to_jax(padded(x, bucket(rows, LEAST_ROWS))),
        to_jax(weight),
        topk=topk,
        renormalize=renormalize,
        routed_scale=routed_scale,
    )
    return to_torch(weights, rows), to_torch(ids, rows).to(torch.int64)


@router.register_fake
def _(x, weight, topk, renormalize, routed_scale):
    shape = (x.shape[0], topk)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


def _choices(x: Tensor, weights: Tensor, ids: Tensor) -> tuple[jax.Array, ...]:
    """Rows, weights and ids, with rows of weight 0 behind."""
    rows = bucket(x.shape[0], LEAST_ROWS)
    return tuple(to_jax(padded(one, rows)) for one in (x, weights, ids))


@torch.library.custom_op("ml4tpu::fp4_experts", mutates_args=(), device_types="cpu")
def fp4_experts(
    x: Tensor,
    w13: list[Tensor],
    w2: list[Tensor],
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
    format: str,
) -> Tensor:
    """Experts ids [T, topk] on ``x`` [T, H], of packed ``nvfp4`` or ``mxfp4``: codes, scales and
    row scales.
    """
    import jax.numpy as jnp

    from ml4core_tpu.kernels import moe
    from ml4core_tpu.kernels.fp4_experts import MXFP4, NVFP4

    rows, shares, chosen = _choices(x, weights, ids)
    out = moe.fp4_moe(
        rows,
        tuple(map(to_jax, w13)),
        tuple(map(to_jax, w2)),
        shares,
        chosen,
        jnp.int32(first_expert),
        fp4=NVFP4 if format == "nvfp4" else MXFP4,
        target=TARGET,
    )
    return to_torch(out, x.shape[0])


@fp4_experts.register_fake
def _(x, w13, w2, weights, ids, first_expert, format):
    return torch.empty_like(x)


@torch.library.custom_op("ml4tpu::fp8_experts", mutates_args=(), device_types="cpu")
def fp8_experts(
    x: Tensor,
    w13: list[Tensor],
    w2: list[Tensor],
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
    quantize: bool,
) -> Tensor:
    """Experts ids [T, topk] on ``x`` [T, H], of e4m3 codes [E, N, K] and a scale fp32 for each
    block of 128 x 128. None is decoded but in the kernel, and of those that a row has chosen.
    """
    import jax.numpy as jnp

    from ml4core_tpu.kernels import moe

    rows, shares, chosen = _choices(x, weights, ids)
    stacks = (tuple(map(to_jax, w13)), tuple(map(to_jax, w2)))
    first = jnp.int32(first_expert)
    out = moe.fp8_moe(rows, *stacks, shares, chosen, first, quantize=quantize, target=TARGET)
    return to_torch(out, x.shape[0])


@fp8_experts.register_fake
def _(x, w13, w2, weights, ids, first_expert, quantize):
    return torch.empty_like(x)


@torch.library.custom_op("ml4tpu::wide_experts", mutates_args=(), device_types="cpu")
def wide_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
) -> Tensor:
    """Experts ids [T, topk] on ``x`` [T, H], of plain weights [E, 2I, H] and [E, H, I]."""
    import jax.numpy as jnp

    from ml4core_tpu.kernels import moe

    rows, shares, chosen = _choices(x, weights, ids)
    first = jnp.int32(first_expert)
    out = moe.wide_moe(rows, to_jax(w13), to_jax(w2), shares, chosen, first)
    return to_torch(out, x.shape[0])


@wide_experts.register_fake
def _(x, w13, w2, weights, ids, first_expert):
    return torch.empty_like(x)
