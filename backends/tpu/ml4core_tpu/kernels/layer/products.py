"""Products of a layer with weights in any format."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ml4core_tpu.kernels import moe
from ml4core_tpu.kernels.fp4_experts import MXFP4, NVFP4
from ml4core_tpu.kernels.fp4_values import fp4_values
from ml4core_tpu.kernels.fp8_matmul import BLOCK, fp8_matmul, wide_matmul
from ml4core_tpu.kernels.layer.form import Matrix
from ml4core_tpu.kernels.numbers import e4m3_values
from ml4core_tpu.kernels.target import Target

PACKED = "x-ml4core-tpu/"
"""How formats of packed experts begin; the open format's name follows."""
_FP8 = ("fp8_block", "fp8_tensor")


class Form(Protocol):
    """What products have to know of a program.

    Attributes:
        act: ``fp8_tensor`` where inputs of FP8 products are quantised, else "".
    """

    @property
    def act(self) -> str: ...
    @property
    def target(self) -> Target: ...


def gemm(form: Form, x: jax.Array, weight: Matrix, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """``x`` [T, K] times the transpose of a weight [N, K], in ``out_dtype`` or x's."""
    dtype = jnp.dtype(out_dtype or x.dtype)
    if weight.format in _FP8:
        quantize = form.act == "fp8_tensor" and x.dtype == jnp.bfloat16
        return fp8_matmul(
            x,
            weight.data,
            weight.parts["scale"],
            out_dtype=dtype,
            quantize=quantize,
            target=form.target,
        )
    return wide_matmul(x, decoded(weight), out_dtype=dtype)


def head_gemm(x: jax.Array, weight: Matrix) -> jax.Array:
    """``x`` [T, N, A] times each head's matrix of a weight [N, B, A], to [T, N, B]."""
    exact = jnp.float32 in (x.dtype, weight.data.dtype)
    dtype = jnp.float32 if exact else jnp.bfloat16
    found = jnp.einsum(
        "tna,nba->tnb",
        x.astype(dtype),
        weight.data.astype(dtype),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
    return found.astype(x.dtype)


def experts(
    form: Form,
    x: jax.Array,
    w13: Matrix,
    w2: Matrix,
    weights: jax.Array,
    ids: jax.Array,
    first: jax.Array,
    total: int,
) -> jax.Array:
    """The weighted sum of this rank's experts on ``x`` [T, H], ``first`` [1] being the first of
    them, of ``total`` on all ranks.
    """
    given = (weights, ids, first[0])
    if w13.format == w2.format and w13.format.startswith(PACKED):
        fp4 = NVFP4 if w13.format.endswith("nvfp4") else MXFP4
        packed = (_packed(w13), _packed(w2))
        return moe.fp4_moe(x, *packed, *given, fp4=fp4, target=form.target, total=total)
    if {w13.format, w2.format} <= set(_FP8):
        quantize = form.act == "fp8_tensor" and x.dtype == jnp.bfloat16
        stacks = (_blocks(w13), _blocks(w2))
        return moe.fp8_moe(x, *stacks, *given, quantize=quantize, target=form.target, total=total)
    return moe.wide_moe(x, decoded(w13), decoded(w2), *given)


def _blocks(weight: Matrix) -> tuple[jax.Array, jax.Array]:
    """Codes [E, N, K] and a scale for each block; of a matrix that has one scale, that."""
    data, scale = weight.data, weight.parts["scale"]
    if weight.format == "fp8_tensor":
        held, rows, columns = data.shape
        blocks = (held, -(-rows // BLOCK), -(-columns // BLOCK))
        scale = jnp.broadcast_to(scale.reshape(-1, 1, 1), blocks)
    return data, scale.astype(jnp.float32)


def _packed(weight: Matrix) -> tuple[jax.Array, jax.Array, jax.Array]:
    return weight.data, weight.parts["scale"], weight.parts["row_scale"]


def decoded(weight: Matrix) -> jax.Array:
    """The values of a weight [..., N, K]: as they are where it is plain, else fp32."""
    data = weight.data
    if weight.format in ("fp32", "bf16"):
        return data
    scale = weight.parts["scale"]
    if weight.format == "fp8_block":
        rows, columns = data.shape[-2:]
        wide = jnp.repeat(jnp.repeat(scale, BLOCK, -2), BLOCK, -1)[..., :rows, :columns]
        return e4m3_values(data) * wide
    if weight.format == "fp8_tensor":
        return e4m3_values(data) * scale.reshape(*data.shape[:-2], 1, 1)
    if weight.format in ("nvfp4", "mxfp4"):
        return fp4_values(data, scale, weight.parts.get("global_scale"))
    raise ValueError(f"no product reads weights of format {weight.format!r}")
