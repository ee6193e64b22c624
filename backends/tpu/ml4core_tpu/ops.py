"""The backend's own ops, with the contracts of ``ml4core.api.OPS``: caches are taken apart, and the
rest is handed to the torch ops. What isn't here is composed by core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from ml4core_tpu.layouts import LANE33, TILES, TILES_NOPE
from ml4core_tpu.product_ops import gemm, moe_experts, router

if TYPE_CHECKING:
    from torch import Tensor

    from ml4core.api import Deployment, KVCache

LATENT_KINDS: Mapping[str, str] = MappingProxyType(
    {TILES: "tiles", TILES_NOPE: "tiles", "e4m3": "e4m3", "bf16": "wide", "fp32": "wide"}
)
INDEX_KINDS: Mapping[str, str] = MappingProxyType({LANE33: "lane33", "fp32": "wide"})
"""Layouts that the kernels read, and their kind."""


def sparse_mla(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from ml4core_tpu import torch_ops

    kind, latent, _ = latent_kind(cache, q)
    if not q.shape[0]:
        return _no_rows(q, latent)
    return torch_ops.sparse_mla(
        q, cache.parts, scale_of(cache), slots, lens, kind, latent, float(scale)
    )


def window_mla(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    from ml4core_tpu import torch_ops

    kind, latent, rope = latent_kind(cache, q)
    if not q.shape[0]:
        return _no_rows(q, latent)
    return torch_ops.window_mla(
        q,
        cache.parts,
        scale_of(cache),
        block_table,
        query_start,
        visible,
        kind,
        latent,
        rope,
        max_rows,
        float(scale),
        window or 0,
    )


def kv_write(cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor | None = None) -> None:
    from ml4core_tpu import torch_writes

    kind = check_rows(cache, latent, rope)
    if len(slots):
        rope = latent.new_empty(len(slots), 0) if rope is None else rope
        first, *rest = cache.parts
        second = rest[0] if rest else first.new_empty(0)
        arguments = (first, second, scale_of(cache), slots, latent, rope, kind)
        if first.device.type == "cpu":
            torch_writes.kv_write(*arguments)
            return
        for part, new in zip(cache.parts, torch_writes.kv_written(*arguments), strict=False):
            part.copy_(new)


def indexer_write(cache: KVCache, slots: Tensor, key: Tensor) -> None:
    from ml4core_tpu import torch_writes

    kind = check_keys(cache, key)
    if len(slots):
        given = (cache.parts[0], slots, key, kind)
        if cache.parts[0].device.type == "cpu":
            torch_writes.indexer_write(*given)
        else:
            cache.parts[0].copy_(torch_writes.indexer_written(*given))


def gather_kv(cache: KVCache, slots: Tensor) -> Tensor:
    from ml4core_tpu import torch_ops

    if cache.layout.role == "index":
        kind, width, rope = index_kind(cache), cache.layout.width, 0
    else:
        kind, width, rope = latent_kind(cache)
    if not slots.numel():
        return slots.new_empty(*slots.shape, width + rope).float()
    return torch_ops.gather_kv(cache.parts, scale_of(cache), slots, kind, width, rope)


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
) -> Tensor:
    from ml4core_tpu import torch_ops

    kind = index_kind(cache)
    if not q.shape[0]:
        return q.new_empty(0, block_table.shape[1] * cache.block_size).float()
    return torch_ops.indexer_logits(
        q,
        weights,
        cache.parts[0],
        block_table,
        query_start,
        visible,
        kind,
        max_rows,
        float(scale),
    )


def topk(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    from ml4core_tpu import torch_ops

    if not scores.numel():
        rows = scores.shape[0]
        positions = visible.new_full((rows, k), -1)
        return positions, visible.new_zeros(rows), visible.new_zeros(rows).bool()
    return torch_ops.topk(scores, visible, k)


OWN: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "sparse_mla": sparse_mla,
        "window_mla": window_mla,
        "kv_write": kv_write,
        "indexer_write": indexer_write,
        "gather_kv": gather_kv,
        "indexer_logits": indexer_logits,
        "topk": topk,
        "gemm": gemm,
        "router": router,
        "moe_experts": moe_experts,
    }
)
"""By names of ``ml4core.api.OPS``."""

ACTS = ("fp8_tensor",)
"""Formats in which a deployment may want the inputs of products with FP8 weights."""


def act_of(deployment: Deployment) -> str:
    """The one that a deployment needs; "" for none."""
    return next((act for act in ACTS if f"act:{act}" in deployment.needs), "")


def ops_for(deployment: Deployment) -> Mapping[str, Callable[..., object]]:
    """The ops of a session: products quantise their inputs where the deployment needs it."""
    act = act_of(deployment)
    if not act:
        return OWN
    quantising: dict[str, Callable[..., object]] = {"gemm": gemm, "moe_experts": moe_experts}
    return MappingProxyType(
        {**OWN} | {name: partial(op, act=act) for name, op in quantising.items()}
    )


def latent_kind(cache: KVCache, q: Tensor | None = None) -> tuple[str, int, int]:
    """Kind, latent and rope width of a latent cache. ``ValueError`` for a layout that no kernel
    reads, and for queries of another width.
    """
    cache.require(*LATENT_KINDS)
    counts = {field.name: field.count for field in cache.layout.fields}
    latent, rope = counts["latent"], counts.get("rope", 0)
    if q is not None and q.shape[-1] not in (latent, latent + rope):
        raise ValueError(
            f"queries have {q.shape[-1]} values; keys of {cache.layout.id!r} have {latent} and "
            f"{rope} of rope"
        )
    return LATENT_KINDS[cache.layout.id], latent, rope


def check_rows(cache: KVCache, latent: Tensor, rope: Tensor | None) -> str:
    """The kind of a latent cache. ``ValueError`` if rows to be written have other widths."""
    kind, width, tail = latent_kind(cache)
    given = 0 if rope is None else rope.shape[1]
    if latent.shape[1] != width or given not in (0, tail):
        raise ValueError(
            f"rows of {cache.layout.id!r} have {width} latents and {tail} rope values, got "
            f"{latent.shape[1]} and {given}"
        )
    return kind


def check_keys(cache: KVCache, key: Tensor | None = None) -> str:
    """The kind of a cache of index keys. ``ValueError`` if those to be written are of another
    width.
    """
    kind = index_kind(cache)
    if key is not None and key.shape[1] != cache.layout.width:
        raise ValueError(
            f"keys of {cache.layout.id!r} have {cache.layout.width} values, got {key.shape[1]}"
        )
    return kind


def index_kind(cache: KVCache) -> str:
    if cache.layout.role != "index":
        raise ValueError(f"needs a cache of index keys; {cache.layout.id!r} is of latents")
    cache.require(*INDEX_KINDS)
    return INDEX_KINDS[cache.layout.id]


def scale_of(cache: KVCache) -> Tensor:
    """The cache's one scale [1] fp32; 1 where it has none. ``ValueError`` for one on the host that
    no row could be divided by.
    """
    import torch

    if cache.scale is None:
        return torch.ones(1, device=cache.parts[0].device)
    if cache.scale.device.type == "cpu":
        scale = cache.scale.numpy().item()
        if not 0 < scale < float("inf"):
            raise ValueError(
                f"the scale of a cache of {cache.layout.id!r} is {scale}; rows are divided by it, "
                "so it has to be above 0"
            )
    return cache.scale


def _no_rows(q: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(0, q.shape[1], latent), q.new_empty(0, q.shape[1]).float()
