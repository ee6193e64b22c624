"""Ops that AITER serves in the place of ours, where it is asked for; each falls back to ours for
what its adapter doesn't take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Collectives, Deployment, KVCache, Refusal, Weight
from ml4core_rocm import aiter_functions
from ml4core_rocm.alone import ALONE
from ml4core_rocm.providers import OURS, PEERS
from ml4core_rocm.switches import Switches

Ops = Mapping[str, Callable[..., Any]]
Installed = Callable[[tuple[str, ...]], tuple[Refusal, ...]]

FORMAT = "x-ml4core-rocm/"
"""How the format of experts in AITER's order begins; the mode follows."""


def with_aiter(
    ops: Ops,
    deployment: Deployment,
    switches: Switches,
    installed: Installed = aiter_functions.refusals,
) -> tuple[Ops, Mapping[str, str]]:
    """The ops, those that AITER serves in its hands; and for each what serves it and why, in words
    for the start-up report. Nothing changes where it isn't asked for.
    """
    if not switches.use_aiter:
        return ops, {}
    found, told = dict(ops), dict[str, list[str]]()
    for peer in PEERS:
        if peer.name not in _WRAPPERS:
            continue
        reasons = peer.reasons(None, deployment, switches, installed)
        if reasons:
            why = "; ".join(refusal.reason for refusal in reasons)
            told.setdefault(peer.part, []).append(f"{OURS}; not {peer.name}: {why}")
        elif peer.part in ops:
            found[peer.part] = _WRAPPERS[peer.name](found[peer.part], deployment)
            told.setdefault(peer.part, []).append(f"{peer.name} {aiter_functions.release()}")
    told |= {name: [f"{OURS}; not AITER: {why}"] for name, why in ALONE.items() if name in ops}
    return found, {f"op {name}": " | ".join(lines) for name, lines in told.items()}


def arranged(weights: Mapping[str, Tensor | Weight], mode: str) -> Mapping[str, Tensor | Weight]:
    """A layer's weights with experts in the order of ``mode``, if they are of its format; others as
    they are.
    """
    w13, w2 = weights.get("experts_w13"), weights.get("experts_w2")
    if not (isinstance(w13, Weight) and isinstance(w2, Weight)):
        return weights
    from ml4core_rocm.kernels.aiter_experts import FORMATS, arrange

    if {w13.format, w2.format} != {FORMATS[mode]}:
        return weights
    made = arrange(w13, w2, mode)  # type: ignore[arg-type]
    stacks = {
        "experts_w13": (w13.shape, made.w13, made.w13_scale),
        "experts_w2": (w2.shape, made.w2, made.w2_scale),
    }
    return dict(weights) | {
        name: Weight(FORMAT + mode, shape, {"data": data, "scale": scale})
        for name, (shape, data, scale) in stacks.items()
    }


def _rms_norm(ours: Callable[..., Any], deployment: Deployment) -> Callable[..., Any]:
    from ml4core_rocm.kernels.aiter_norms import rms_norm

    def call(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found: Tensor = (rms_norm if x.dtype == torch.bfloat16 else ours)(x, weight, eps)
        return found

    return call


def _all_reduce_rms_norm(ours: Callable[..., Any], deployment: Deployment) -> Callable[..., Any]:
    from ml4core_rocm.kernels.aiter_norms import add_rms_norm

    def call(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, collectives: Collectives
    ) -> tuple[Tensor, Tensor | None]:
        if weight is None or {x.dtype, residual.dtype} != {torch.bfloat16}:
            found: tuple[Tensor, Tensor | None] = ours(x, residual, weight, eps, collectives)
            return found
        return add_rms_norm(collectives.all_reduce(x), residual, weight, eps)

    return call


def _block_gemm(ours: Callable[..., Any], deployment: Deployment) -> Callable[..., Any]:
    from ml4core_rocm.kernels.aiter_gemm import block_gemm

    def call(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        dtypes = {x.dtype, out_dtype or x.dtype}
        block = weight.format == "fp8_block" and dtypes == {torch.bfloat16}
        found: Tensor = (block_gemm if block else ours)(x, weight, out_dtype)
        return found

    return call


def _plain_gemm(ours: Callable[..., Any], deployment: Deployment) -> Callable[..., Any]:
    from ml4core_rocm.kernels.aiter_gemm import plain_gemm

    def call(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        dtypes = {x.dtype, out_dtype or x.dtype}
        if weight.format == "bf16" and dtypes == {torch.bfloat16}:
            return plain_gemm(x, weight)
        found: Tensor = ours(x, weight, out_dtype)
        return found

    return call


def _silu_mul(ours: Callable[..., Any], deployment: Deployment) -> Callable[..., Any]:
    from ml4core_rocm.kernels.aiter_small import silu_mul

    def call(gate_up: Tensor) -> Tensor:
        found: Tensor = (silu_mul if gate_up.dtype == torch.bfloat16 else ours)(gate_up)
        return found

    return call


def _kv_write(ours: Callable[..., Any], deployment: Deployment) -> Callable[..., Any]:
    from ml4core_rocm.kernels.aiter_small import kv_write, takes_latents

    @lru_cache
    def one(device: torch.device) -> Tensor:
        return torch.ones(1, device=device)

    def call(cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor | None = None) -> None:
        if rope is not None and takes_latents(cache, latent, rope):
            kv_write(cache, slots, latent, rope, one(latent.device))
        else:
            ours(cache, slots, latent, rope)

    return call


def _experts(ours: Callable[..., Any], deployment: Deployment) -> Callable[..., Any]:
    from ml4core_rocm.kernels.aiter_experts import Experts, fused

    counts = [layer.moe.experts for layer in deployment.model.layers if layer.moe is not None]

    def call(
        x: Tensor,
        w13: Weight,
        w2: Weight,
        weights: Tensor,
        ids: Tensor,
        first_expert: int | None = None,
    ) -> Tensor:
        mode = w13.format.removeprefix(FORMAT)
        if mode == w13.format:
            other: Tensor = ours(x, w13, w2, weights, ids, first_expert)
            return other
        count, hidden, width = w2.shape
        parts = (w13.parts["data"], w13.parts["scale"], w2.parts["data"], w2.parts["scale"])
        experts = Experts(mode, *parts, count, width, hidden)  # type: ignore[arg-type]
        return fused(x, experts, weights, ids, first_expert or 0, max(counts))

    return call


_WRAPPERS: Mapping[str, Callable[[Callable[..., Any], Deployment], Callable[..., Any]]] = {
    "AITER RMS norm": _rms_norm,
    "AITER sum and RMS norm": _all_reduce_rms_norm,
    "AITER block FP8 product": _block_gemm,
    "AITER bf16 product": _plain_gemm,
    "AITER gate": _silu_mul,
    "AITER latent write": _kv_write,
    "AITER fused experts": _experts,
}
"""By the name of a peer that serves an op: what puts it in the place of ours."""
