"""The vision encoder and its projector as a composition of ops and attention within images.

Attention is masked, not cut: it costs the square of all patches of a call, so few images a call are
best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.api import VisionSpec, VisionWeights
from ml4core.compose.attention import Children
from ml4core.compose.context import Ops, StageContext
from ml4core.compose.ops.tiles import tile_size, tiles

_SCORE_BYTES = 256 << 20
"""Bound of the scores of one tile of rows, on devices whose attention writes them to memory."""


def vision_encoder(ctx: StageContext, children: Children) -> Callable[..., Tensor]:
    spec = ctx.model.vision
    if spec is None:
        raise ValueError(
            f"model {ctx.model.name!r} has no vision encoder (ModelSpec.vision is None), so its "
            "stage can't be composed"
        )
    ops = ctx.ops

    def call(
        weights: VisionWeights, patches: Tensor, positions: Tensor, image_ids: Tensor
    ) -> Tensor:
        _check(spec, patches, positions, image_ids)
        w: Mapping[str, Any] = weights.top
        real = (image_ids >= 0).unsqueeze(-1)
        x = torch.where(real, patches, 0.0).to(ctx.dtype)
        x = ops["rms_norm"](ops["gemm"](x, w["patch_conv"]), w["ln_pre"], spec.norm_eps)
        for layer in weights.layers:
            x = _layer(spec, ops, layer, x, positions, w["inv_freq"], image_ids)
        return _project(spec, ops, w, x)

    return call


def _check(spec: VisionSpec, patches: Tensor, positions: Tensor, image_ids: Tensor) -> None:
    rows = patches.shape[0]
    wanted = ((rows, spec.patch_dim), (rows, 2), (rows,))
    found = (tuple(patches.shape), tuple(positions.shape), tuple(image_ids.shape))
    if found != wanted or rows % spec.cell_patches:
        raise ValueError(
            f"patches, positions, image_ids have shapes {found}; they must be [T, "
            f"{spec.patch_dim}], [T, 2] and [T], T a multiple of {spec.cell_patches}"
        )


def _layer(
    spec: VisionSpec,
    ops: Ops,
    w: Mapping[str, Any],
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    image_ids: Tensor,
) -> Tensor:
    """One layer: ``x`` [T, d] to [T, d]."""
    hidden = ops["rms_norm"](x, w["attention_norm"], spec.norm_eps)
    qkv = ops["gemm"](hidden, w["wqkv"]).unflatten(-1, (3, spec.heads, spec.head_dim))
    q, k, v = qkv.unbind(1)
    q = _rope_2d(spec, ops, q, positions, inv_freq)
    k = _rope_2d(spec, ops, k, positions, inv_freq)
    out = _attention(q, k, v, image_ids)
    x = _add(x, ops["gemm"](out.flatten(1), w["wo"]))
    hidden = ops["rms_norm"](x, w["ffn_norm"], spec.norm_eps)
    return _add(x, ops["gemm"](ops["silu_mul"](ops["gemm"](hidden, w["w13"])), w["w2"]))


def _add(residual: Tensor, x: Tensor) -> Tensor:
    return (residual.to(torch.float32) + x.to(torch.float32)).to(residual.dtype)


def _rope_2d(spec: VisionSpec, ops: Ops, x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotates ``x`` [T, N, A]: its first pairs by the patch's row, the others by its column."""
    pairs = (spec.row_pairs, spec.head_dim // 2 - spec.row_pairs)
    halves = x.split([2 * n for n in pairs], dim=-1)
    turned = [
        ops["rope"](half, axis, frequencies, True, 1.0)
        for half, axis, frequencies in zip(
            halves, positions.unbind(-1), inv_freq.split(pairs), strict=True
        )
    ]
    return torch.cat(turned, dim=-1)


def _attention(q: Tensor, k: Tensor, v: Tensor, image_ids: Tensor) -> Tensor:
    """Each patch attends to all of its image: q, k, v [T, N, A] to [T, N, A], in fp32.

    Padding attends to padding, so that no row is without a key.
    """
    rows, heads, _ = q.shape
    wide_q, wide_k, wide_v = (x.to(torch.float32).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    parts = []
    for start, stop in tiles(rows, tile_size(rows, 4 * heads * rows, _SCORE_BYTES)):
        mask = image_ids[start:stop, None] == image_ids
        parts.append(
            F.scaled_dot_product_attention(
                wide_q[:, :, start:stop], wide_k, wide_v, attn_mask=mask[None, None]
            )
        )
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.squeeze(0).transpose(0, 1).to(q.dtype)


def _project(spec: VisionSpec, ops: Ops, w: Mapping[str, Any], x: Tensor) -> Tensor:
    """The encoder's output [T, d] to embeddings [T / (s s), H]."""
    dtype = x.dtype
    if spec.pre_projector_norm:
        x = ops["rms_norm"](x, w["pre_projector_norm"], spec.norm_eps)
    if spec.patch_merger:
        # Channel-major: the patches of a cell stand side by side within each channel.
        cells = x.unflatten(0, (-1, spec.cell_patches)).transpose(1, 2).flatten(1)
        x = ops["gemm"](cells, w["merging_layer"])
    x = ops["gemm"](x, w["adapter_in"], torch.float32)
    if spec.adapter_bias:
        x = x + w["adapter_in_bias"].to(torch.float32)
    x = ops["gemm"](F.gelu(x).to(dtype), w["adapter_out"], torch.float32)
    if spec.adapter_bias:
        x = x + w["adapter_out_bias"].to(torch.float32)
    return x.to(dtype)
