"""FlashMLA's sparse decoding as a peer of ``sparse_mla``: the only file that imports it.

Its releases differ in how the work list is made, and in whether the kernels of this row layout and
of sm_90 are called by ``use_legacy``: the signature tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, LayerSpec, Selection, StepPlan
from ml4core_cuda.kernels.attention_stage import dense

HEADS = (64, 128)
"""Counts of heads that its kernels exist for; fewer are padded."""


@dataclass
class WorkList:
    """What a release plans on the first call of a shape, to be used again."""

    made: tuple[Any, Any] | None = None


def library() -> Any:
    """The library. ``ImportError`` where it isn't installed."""
    return import_module("flash_mla")


def legacy(function: Any) -> dict[str, bool]:
    """What a call names where a release has the kernels of this layout apart."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(function).parameters else {}


def sparse_mla(
    q: Tensor,
    cache: KVCache,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    plan: WorkList | None = None,
    *,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """The contract of ``sparse_mla``, for rows of ``fp8_ds_mla`` at 512 and 64 and bf16 queries of
    576 values. ``ValueError`` for anything else.

    ``plan`` is kept from call to call of one shape. ``checked``: every slot is known to be one of
    the cache, and each row has some, so that nothing is looked at or mended.
    """
    module = library()
    cache.require("fp8_ds_mla")
    rows, heads, width = q.shape
    padded = next((count for count in HEADS if count >= heads), 0)
    if not padded or width != 576 or q.dtype != torch.bfloat16:
        raise ValueError(
            f"FlashMLA takes bf16 queries of 576 values and up to {HEADS[-1]} heads, got "
            f"{q.dtype} {list(q.shape)}"
        )
    if padded > heads:
        q = torch.cat((q, q.new_zeros(rows, padded - heads, width)), 1)
    plan = plan or WorkList()
    if plan.made is None:
        plan.made = _metadata(module, lens, padded, slots.shape[1])
    indices = slots
    if not checked:
        order = torch.arange(slots.shape[1], device=slots.device)
        inside = (slots >= 0) & (slots < cache.blocks * cache.block_size)
        known = (order < lens.unsqueeze(1)) & inside
        indices = torch.where(known, slots, -1)
    function = module.flash_mla_with_kvcache
    out, lse = function(
        q.unsqueeze(1),
        cache.parts[0].unsqueeze(2).view(torch.float8_e4m3fn),
        None,
        None,
        512,
        *plan.made,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=indices.unsqueeze(1),
        **legacy(function),
    )
    if checked:
        return out[:, 0, :heads], lse[:, :heads, 0]
    some = known.any(1)
    out = torch.where(some[:, None, None], out[:, 0, :heads], 0.0).contiguous()
    found = torch.where(some[:, None], lse[:, :heads, 0].float(), float("-inf"))
    return out.to(torch.bfloat16), found.contiguous()


def sparse_mla_stage(layer: LayerSpec) -> Callable[..., tuple[Tensor, Tensor]]:
    scale = layer.softmax_scale

    def call(
        plan: StepPlan, kv: LayerKV, q: Tensor, selection: Selection | None
    ) -> tuple[Tensor, Tensor]:
        if selection is None:
            return dense(plan, kv, q, scale)
        return sparse_mla(q, kv.latent, selection.slots, selection.lens, scale)

    return call


def _metadata(module: Any, lens: Tensor, heads: int, topk: int) -> tuple[Any, Any]:
    """Its work list; releases differ in who is told the sizes."""
    function = module.get_mla_metadata
    if "topk" not in inspect.signature(function).parameters:
        schedule, splits = function()
        return schedule, splits
    schedule, splits = function(lens, heads, 1, heads, True, topk)
    return schedule, splits
