"""Writes into caches as torch ops ``ml4tpu::*``; the form is that of ``torch_ops``.

An op that writes in place is the host's. The other one, which gives the cache back as it is then,
is for tensors that take no op that writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core_tpu.bridge import bucket, padded, to_jax, written
from ml4core_tpu.torch_ops import LEAST_ROWS, TARGET, bits_of


def parts_of(first: Tensor, second: Tensor) -> list[Tensor]:
    """The parts of a cache that ``kv_write`` is handed."""
    return [first, second] if second.numel() else [first]


@torch.library.custom_op("ml4tpu::kv_write", mutates_args=("first", "second"), device_types="cpu")
def kv_write(
    first: Tensor,
    second: Tensor,
    cache_scale: Tensor,
    slots: Tensor,
    latent: Tensor,
    rope: Tensor,
    kind: str,
) -> None:
    """Writes ``latent`` [T, L] and ``rope`` [T, R] (R 0: zeros) to slots [T] of a cache's first
    part, and of its second, which has no elements where there is none.
    """
    from ml4core_tpu.kernels.cache_write import write_latents
    from ml4core_tpu.kernels.row_write import write_rows

    many = bucket(len(slots), LEAST_ROWS)
    slots = padded(slots, many, -1)
    given = (to_jax(padded(latent, many)), to_jax(padded(rope, many)) if rope.shape[1] else None)
    factor = to_jax(cache_scale)
    parts = parts_of(first, second)
    if kind == "tiles":
        page = parts[0].shape[1]

        def write(pages, local):
            tiles = pages[0].reshape(len(pages[0]), page, -1, 128)
            tails = pages[1].reshape(-1, page // 4, 4, 128) if len(pages) > 1 else None
            found = write_latents(tiles, tails, factor, local, *given, target=TARGET)
            return [new.reshape(old.shape) for new, old in zip(found, pages, strict=True)]

    else:

        def write(pages, local):
            return [write_rows(pages[0], factor, local, *given)]

    written([bits_of(part) for part in parts], slots, parts[0].shape[1], write)


@kv_write.register_fake
def _(first, second, cache_scale, slots, latent, rope, kind):
    return None


@torch.library.custom_op("ml4tpu::kv_written", mutates_args=(), device_types="cpu")
def kv_written(
    first: Tensor,
    second: Tensor,
    cache_scale: Tensor,
    slots: Tensor,
    latent: Tensor,
    rope: Tensor,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """The parts as ``kv_write`` leaves them: for lazy tensors, which take no op that writes."""
    found = first.clone(), second.clone()
    kv_write(*found, cache_scale, slots, latent, rope, kind)
    return found


@kv_written.register_fake
def _(first, second, cache_scale, slots, latent, rope, kind):
    return torch.empty_like(first), torch.empty_like(second)


@torch.library.custom_op("ml4tpu::indexer_write", mutates_args=("keys",), device_types="cpu")
def indexer_write(keys: Tensor, slots: Tensor, key: Tensor, kind: str) -> None:
    """Writes ``key`` [T, D] to slots [T] of ``keys``: lane33 [pages, 132, page], or rows."""
    from ml4core_tpu.kernels.cache_write import write_index_keys
    from ml4core_tpu.kernels.row_write import write_rows

    many = bucket(len(slots), LEAST_ROWS)
    slots, given = padded(slots, many, -1), to_jax(padded(key, many))
    if kind == "lane33":
        page = keys.shape[2]

        def write(pages, local):
            tiles = pages[0].reshape(-1, 33, 4, page)
            found = write_index_keys(tiles, local, given, target=TARGET)
            return [found.reshape(pages[0].shape)]

    else:
        page = keys.shape[1]

        def write(pages, local):
            one = to_jax(torch.ones(1))
            return [write_rows(pages[0], one, local, given, None)]

    written((bits_of(keys),), slots, page, write)


@indexer_write.register_fake
def _(keys, slots, key, kind):
    return None


@torch.library.custom_op("ml4tpu::indexer_written", mutates_args=(), device_types="cpu")
def indexer_written(keys: Tensor, slots: Tensor, key: Tensor, kind: str) -> Tensor:
    """The keys as ``indexer_write`` leaves them: for lazy tensors."""
    found = keys.clone()
    indexer_write(found, slots, key, kind)
    return found


@indexer_written.register_fake
def _(keys, slots, key, kind):
    return torch.empty_like(keys)
