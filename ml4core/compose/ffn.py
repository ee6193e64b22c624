"""The feed-forward stage as a composition of ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ml4core.compose.attention import Children, Weights
from ml4core.compose.context import StageContext


def ffn(ctx: StageContext, children: Children) -> Callable[..., tuple[Tensor, Tensor | None]]:
    layer, ops, replicas = ctx.spec, ctx.ops, ctx.replicas
    moe = layer.moe
    # A backend's op need not know of experts elsewhere, unless it declares them.
    elsewhere = (moe.first_expert,) if moe is not None and moe.first_expert else ()

    def block(w: Weights, name: str, x: Tensor) -> Tensor:
        inner = ops["silu_mul"](ops["gemm"](x, w[f"{name}_w13"]))
        out: Tensor = ops["gemm"](inner, w[f"{name}_w2"])
        return out

    def call(
        w: Weights, residual: Tensor, hidden: Tensor, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if moe is None:
            out = block(w, "dense", hidden)
        else:
            # Of all replicas, whose steps have as many rows: each adds what its own experts give.
            rows = replicas.all_gather(hidden)
            weights, ids = ops["router"](
                rows, w["gate"], moe.topk, moe.renormalize, moe.routed_scale
            )
            # The router gives no weight to a row that it can't judge, such as one with NaN. Without
            # its experts the row would be wrong and look right: as NaN it sets the fault word.
            weights = torch.where((weights == 0).all(-1, keepdim=True), torch.nan, weights)
            experts = (w["experts_w13"], w["experts_w2"], weights, ids)
            out = replicas.reduce_scatter(ops["moe_experts"](rows, *experts, *elsewhere))
            if moe.shared_width:
                out = (out.float() + block(w, "shared", hidden).float()).to(hidden.dtype)
        residual, normed = ops["all_reduce_rms_norm"](
            out, residual, next_norm, layer.norm_eps, ctx.collectives
        )
        return residual, normed

    return call
