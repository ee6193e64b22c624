"""The vision encoder and its projector on patches of images. Letters in shapes are those of
``ml4core.api.vision``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ml4core.api import VisionSpec
from ml4core_tpu.kernels.layer.products import gemm
from ml4core_tpu.kernels.norms import added, rms_norm, silu_mul
from ml4core_tpu.kernels.positions import angles, rope
from ml4core_tpu.kernels.target import Target

_SCORE_BYTES = 256 << 20
"""Of the scores that are there at once."""


@dataclass(frozen=True)
class VisionForm:
    """The static part of the program.

    Attributes:
        dtype: that the encoder computes in.
        act: ``fp8_tensor`` where inputs of FP8 products are quantised, else "".
    """

    spec: VisionSpec
    dtype: str
    act: str = ""
    target: Target = "host"


class Encoder(NamedTuple):
    """An encoder's weights: arrays, and ``Matrix`` as layers of the decoder have them.

    Attributes:
        top: names of ``VISION_WEIGHTS``; ``freq`` int32 [2, A / 2] in place of ``inv_freq``.
        stacks: names of ``VISION_LAYER_WEIGHTS``, of layers that follow each other and are of one
            kind: each array has the layers in front.
    """

    top: Mapping[str, Any]
    stacks: tuple[Mapping[str, Any], ...]


Turned = tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""cos and sin of rows, and of columns."""


def vision_encoder(
    form: VisionForm,
    weights: Encoder,
    patches: jax.Array,
    positions: jax.Array,
    image_ids: jax.Array,
) -> jax.Array:
    """Embeddings [T / (s s), H] of ``patches`` [T, C p p], at ``positions`` int32 [T, 2] of images
    int32 [T]; patches of -1 are padding, and may hold anything.
    """
    spec, top = form.spec, weights.top
    x = jnp.where((image_ids >= 0)[:, None], patches, 0).astype(form.dtype)
    x = rms_norm(gemm(form, x, top["patch_conv"]), top["ln_pre"], spec.norm_eps)
    freq, rows = top["freq"], spec.row_pairs
    turned = (
        angles(positions[:, 0], freq[:, :rows]),
        angles(positions[:, 1], freq[:, rows:]),
    )

    def one(x: jax.Array, w: Mapping[str, Any]) -> tuple[jax.Array, None]:
        return _layer(form, w, x, turned, image_ids), None

    for stack in weights.stacks:
        x, _ = lax.scan(one, x, stack)
    return _projected(form, top, x)


def _layer(
    form: VisionForm, w: Mapping[str, Any], x: jax.Array, turned: Turned, image_ids: jax.Array
) -> jax.Array:
    """One layer: ``x`` [T, d] to [T, d]."""
    spec = form.spec
    hidden = rms_norm(x, w["attention_norm"], spec.norm_eps)
    qkv = gemm(form, hidden, w["wqkv"]).reshape(len(x), 3, spec.heads, spec.head_dim)
    q, k = (_rope_2d(spec, qkv[:, part], turned) for part in (0, 1))
    out = _attention(q, k, qkv[:, 2], image_ids)
    x = added(gemm(form, out.reshape(len(x), -1), w["wo"]), x)
    hidden = rms_norm(x, w["ffn_norm"], spec.norm_eps)
    return added(gemm(form, silu_mul(gemm(form, hidden, w["w13"])), w["w2"]), x)


def _rope_2d(spec: VisionSpec, x: jax.Array, turned: Turned) -> jax.Array:
    """Rotates ``x`` [T, N, A]: its first pairs by the patch's row, the others by its column."""
    halves = jnp.split(x, [2 * spec.row_pairs], -1)
    return jnp.concatenate(
        [rope(half, *axis, True) for half, axis in zip(halves, turned, strict=True)], -1
    )


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, image_ids: jax.Array) -> jax.Array:
    """Each patch attends to all of its image: q, k, v [T, N, A] to [T, N, A], summed in fp32, for
    some patches at a time. Padding attends to padding, so that no row is without a key.
    """
    count, heads, width = q.shape
    parts = 1
    while parts < count and -(-count // parts) * heads * count * 4 > _SCORE_BYTES:
        parts *= 2
    each = -(-count // parts)
    short = parts * each - count
    scale = jnp.float32(width**-0.5)

    def some(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, ids = given
        scores = _product("tna,sna->nts", rows, k) * scale
        scores = jnp.where(ids[:, None] == image_ids, scores, -jnp.inf)
        return _product("nts,sna->tna", jax.nn.softmax(scores, axis=-1), v).astype(q.dtype)

    if parts == 1:
        return some((q, image_ids))
    # Rows behind the last one repeat it.
    rows = jnp.pad(q, ((0, short), (0, 0), (0, 0)), mode="edge")
    ids = jnp.pad(image_ids, (0, short), mode="edge")
    given = (rows.reshape(parts, each, heads, width), ids.reshape(parts, each))
    return lax.map(some, given).reshape(-1, heads, width)[:count]


def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In fp32: of two bfloat16 the products are exact as they are."""
    exact = jnp.float32 in (a.dtype, b.dtype)
    dtype = jnp.float32 if exact else jnp.bfloat16
    precision = lax.Precision.HIGHEST if exact else None
    given = (a.astype(dtype), b.astype(dtype))
    found: jax.Array = jnp.einsum(
        form, *given, precision=precision, preferred_element_type=jnp.float32
    )
    return found


def _projected(form: VisionForm, w: Mapping[str, Any], x: jax.Array) -> jax.Array:
    """The encoder's output [T, d] to embeddings [T / (s s), H]."""
    spec, dtype, fp32 = form.spec, x.dtype, jnp.dtype(jnp.float32)
    if spec.pre_projector_norm:
        x = rms_norm(x, w["pre_projector_norm"], spec.norm_eps)
    if spec.patch_merger:
        # Channel-major: the patches of a cell stand side by side within each channel.
        cells = x.reshape(-1, spec.cell_patches, x.shape[1]).swapaxes(1, 2)
        x = gemm(form, cells.reshape(len(cells), -1), w["merging_layer"])
    x = gemm(form, x, w["adapter_in"], fp32)
    if spec.adapter_bias:
        x = x + w["adapter_in_bias"].astype(fp32)
    x = jax.nn.gelu(x, approximate=False).astype(dtype)
    x = gemm(form, x, w["adapter_out"], fp32)
    if spec.adapter_bias:
        x = x + w["adapter_out_bias"].astype(fp32)
    return x.astype(dtype)
