"""The kernels as torch ops ``ml4tpu::*``: one name, a kernel for each kind of device.

On the CPU a kernel is a JAX program on the tensors' own memory, interpreted by XLA. Shapes of
results are known without data, so that the ops can be traced and exported.

Caches travel as their arrays and a kind: ``tiles``, ``e4m3`` or ``wide`` of latents, ``lane33`` or
``wide`` of index keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml4core_tpu.bridge import bucket, padded, to_jax, to_torch

TARGET = "host"
"""What kernels of CPU tensors are made for."""
LEAST_ROWS = 32
"""Rows that CPU kernels are made for at least: a program costs more than rows that are empty."""
_LEAST_REQUESTS = 8


def latent_arrays(parts: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Parts of a latent cache as kernels have them: whole tiles."""
    if kind != "tiles":
        return list(parts)
    pages, page, _ = parts[0].shape
    found = [parts[0].unflatten(2, (-1, 128))]
    if len(parts) > 1:
        found.append(parts[1].reshape(pages, page // 4, 4, 128))
    return found


def bits_of(part: Tensor) -> Tensor:
    """The same memory as integers: floating-point copies may change the bits of NaN."""
    kinds = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return part.view(kinds.get(part.dtype, part.dtype))


def _requests(table: Tensor, query_start: Tensor) -> tuple[Tensor, Tensor]:
    """A power of two of requests: those behind have no rows, and page 0."""
    count = bucket(table.shape[0], _LEAST_REQUESTS)
    short = count - table.shape[0]
    return padded(table, count), torch.cat((query_start, query_start[-1:].expand(short)))


@torch.library.custom_op("ml4tpu::sparse_mla", mutates_args=(), device_types="cpu")
def sparse_mla(
    q: Tensor,
    parts: Sequence[Tensor],
    cache_scale: Tensor,
    slots: Tensor,
    lens: Tensor,
    kind: str,
    latent: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [T, N, W] over the first lens [T] of slots [T, k]: out [T, N, L], lse."""
    from ml4core_tpu.kernels import gathered_mla
    from ml4core_tpu.kernels.sparse_mla import sparse_mla as tiled_mla

    rows = q.shape[0]
    many = bucket(rows, LEAST_ROWS)
    arrays = [to_jax(part) for part in latent_arrays(parts, kind)]
    given = (
        to_jax(padded(q, many)),
        to_jax(cache_scale),
        to_jax(padded(slots, many, -1)),
        to_jax(padded(lens, many)),
    )
    query, factor, chosen, counts = given
    if kind == "tiles":
        ropes = arrays[1] if len(arrays) > 1 else None
        out, lse = tiled_mla(
            query, arrays[0], ropes, factor, chosen, counts, scale=scale, target=TARGET
        )
    else:
        out, lse = gathered_mla.sparse_mla(
            query,
            tuple(arrays),
            factor,
            chosen,
            counts,
            rows=gathered_mla.rows_of(kind, latent, parts[0].shape[-1] - latent),
            scale=scale,
        )
    return to_torch(out, rows), to_torch(lse, rows)


@sparse_mla.register_fake
def _(q, parts, cache_scale, slots, lens, kind, latent, scale):
    return q.new_empty(*q.shape[:2], latent), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("ml4tpu::window_mla", mutates_args=(), device_types="cpu")
def window_mla(
    q: Tensor,
    parts: Sequence[Tensor],
    cache_scale: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    kind: str,
    latent: int,
    rope: int,
    max_rows: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [T, N, W] over the last ``window`` (0: all) keys that a row sees."""
    from ml4core_tpu.kernels.gathered_mla import rows_of
    from ml4core_tpu.kernels.window_mla import window_mla as paged_mla

    rows = q.shape[0]
    many = bucket(rows, LEAST_ROWS)
    table, starts = _requests(block_table, query_start)
    out, lse = paged_mla(
        to_jax(padded(q, many)),
        tuple(to_jax(part) for part in latent_arrays(parts, kind)),
        to_jax(cache_scale),
        to_jax(table),
        to_jax(starts),
        to_jax(padded(visible, many)),
        rows=rows_of(kind, latent, rope),
        max_rows=bucket(max_rows),
        scale=scale,
        window=window or None,
        target=TARGET,
    )
    return to_torch(out, rows), to_torch(lse, rows)


@window_mla.register_fake
def _(
    q,
    parts,
    cache_scale,
    block_table,
    query_start,
    visible,
    kind,
    latent,
    rope,
    max_rows,
    scale,
    window,
):
    return q.new_empty(*q.shape[:2], latent), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("ml4tpu::gather_kv", mutates_args=(), device_types="cpu")
def gather_kv(
    parts: Sequence[Tensor], cache_scale: Tensor, slots: Tensor, kind: str, latent: int, rope: int
) -> Tensor:
    """Decoded rows fp32 [..., width] of slots [...]; zeros where a slot lies outside."""
    from ml4core_tpu.kernels import gathered_mla

    flat = slots.reshape(-1)
    many = bucket(len(flat), LEAST_ROWS)
    chosen = to_jax(padded(flat, many, -1))
    if kind == "lane33":
        pages, _, page = parts[0].shape
        found = gathered_mla.gather_keys(to_jax(parts[0].reshape(pages, 33, 4, page)), chosen)
    else:
        found = gathered_mla.gather_rows(
            tuple(to_jax(part) for part in latent_arrays(parts, kind)),
            to_jax(cache_scale),
            chosen,
            rows=gathered_mla.rows_of(kind, latent, rope),
        )
    return to_torch(found, len(flat)).reshape(*slots.shape, latent + rope)


@gather_kv.register_fake
def _(parts, cache_scale, slots, kind, latent, rope):
    return slots.new_empty(*slots.shape, latent + rope, dtype=torch.float32)


@torch.library.custom_op("ml4tpu::indexer_logits", mutates_args=(), device_types="cpu")
def indexer_logits(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    kind: str,
    max_rows: int,
    scale: float,
) -> Tensor:
    """Scores fp32 [T, S] of queries [T, Hi, D] over the pages of each row's request."""
    from ml4core_tpu.kernels.index_scores import index_scores

    rows = q.shape[0]
    many = bucket(rows, LEAST_ROWS)
    table, starts = _requests(block_table, query_start)
    array = keys.unflatten(1, (33, 4)) if kind == "lane33" else keys
    scores = index_scores(
        to_jax(padded(q, many)),
        to_jax(padded(weights, many)),
        to_jax(array),
        to_jax(table),
        to_jax(starts),
        to_jax(padded(visible, many)),
        max_rows=bucket(max_rows),
        scale=scale,
        target=TARGET,
    )
    return to_torch(scores, rows)


@indexer_logits.register_fake
def _(q, weights, keys, block_table, query_start, visible, kind, max_rows, scale):
    page = keys.shape[2] if kind == "lane33" else keys.shape[1]
    return q.new_empty(q.shape[0], block_table.shape[1] * page, dtype=torch.float32)


@torch.library.custom_op("ml4tpu::topk", mutates_args=(), device_types="cpu")
def topk(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions int32 [T, k], lens int32 [T] and has_nan bool [T] of scores [T, S]."""
    from ml4core_tpu.kernels.topk import topk as bisected

    rows = scores.shape[0]
    many = bucket(rows, LEAST_ROWS)
    found = bisected(
        to_jax(padded(scores, many)), to_jax(padded(visible, many)), k=k, target=TARGET
    )
    positions, lens, has_nan = (to_torch(one, rows) for one in found)
    return positions, lens, has_nan


@topk.register_fake
def _(scores, visible, k):
    rows = scores.shape[0]
    return (
        visible.new_empty(rows, k),
        visible.new_empty(rows),
        visible.new_empty(rows, dtype=torch.bool),
    )
