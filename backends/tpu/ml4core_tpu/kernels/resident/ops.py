"""The backend's ops, with the contracts of ``ml4core.api.OPS``, on caches and weights that stay on
devices: whatever is handed over runs on the first of them, and results come to the host. Only what
is written stays where it is, in memory that the kernel was given.

Layers of a step are programs of their own: these serve the drafter, logits and ``--enforce-eager``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding
from torch import Tensor

from ml4core.api import KVCache, Weight
from ml4core_tpu import ops
from ml4core_tpu.bridge import bucket, padded, to_jax
from ml4core_tpu.kernels import gathered_mla, moe
from ml4core_tpu.kernels.layer.form import Matrix
from ml4core_tpu.kernels.resident import op_programs
from ml4core_tpu.kernels.resident.caches import kernel_parts
from ml4core_tpu.kernels.resident.devices import WHOLE, Devices
from ml4core_tpu.kernels.resident.op_programs import Arrays
from ml4core_tpu.kernels.resident.tensor import DeviceTensor, host_of
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.kernels.target import Target
from ml4core_tpu.kernels.topk import topk as bisected
from ml4core_tpu.near_pages import Paged, near_pages
from ml4core_tpu.product_ops import packed_weight
from ml4core_tpu.torch_ops import LEAST_ROWS

_LEAST_REQUESTS = 8


class ResidentOps:
    """Ops of a session, by the names of ``OPS`` in ``by_name``."""

    def __init__(self, devices: Devices, act: str = "", pages: int = 1) -> None:
        """``act``: ``fp8_tensor`` where inputs of FP8 products are quantised, else "". ``pages``:
        that a request can have.
        """
        self._devices = devices
        self._pages = pages
        self._target: Target = devices.target
        self._form = op_programs.ProductForm(act, devices.target)
        self.by_name: Mapping[str, Callable[..., object]] = MappingProxyType(
            {name: getattr(self, name) for name in ops.OWN}
        )

    def sparse_mla(
        self, q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows, count = _rows_of(cache, q), q.shape[0]
        if not count:
            return _no_rows(q, rows)
        query = self._rows(q)
        found = op_programs.sparse_mla(
            query,
            self._parts(cache),
            self._scale(cache),
            self._rows(slots, -1, len(query)),
            self._rows(lens, 0, len(query)),
            rows=rows,
            scale=float(scale),
            target=self._target,
        )
        out, lse = self._hosts(found, count)
        return out, lse

    def window_mla(
        self,
        q: Tensor,
        cache: KVCache,
        block_table: Tensor,
        query_start: Tensor,
        visible: Tensor,
        max_rows: int,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, count = _rows_of(cache, q), q.shape[0]
        if not count:
            return _no_rows(q, rows)
        query = self._rows(q)
        given = Paged(*map(host_of, (block_table, query_start, visible)))
        near = near_pages(given, window or None, cache.block_size, max_rows, self._pages)
        found = op_programs.window_mla(
            query,
            self._parts(cache),
            self._scale(cache),
            *self._requests(near.table, near.query_start),
            self._rows(near.visible, 0, len(query)),
            rows=rows,
            max_rows=bucket(max_rows),
            scale=float(scale),
            window=window or None,
            target=self._target,
        )
        out, lse = self._hosts(found, count)
        return out, lse

    def kv_write(
        self, cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor | None = None
    ) -> None:
        rows = _rows_of(cache)
        ops.check_rows(cache, latent, rope)
        if not len(slots):
            return
        given = self._rows(latent)
        tail = None if rope is None else self._rows(rope, 0, len(given))
        slot = self._rows(slots, -1, len(given))
        more = (self._scale(cache), slot, given, tail)
        write = partial(op_programs.kv_write, rows=rows, target=self._target)
        self._write(cache, lambda parts: write(parts, *more))

    def indexer_write(self, cache: KVCache, slots: Tensor, key: Tensor) -> None:
        ops.check_keys(cache, key)
        if not len(slots):
            return
        given = self._rows(key)
        slot = self._rows(slots, -1, len(given))
        self._write(
            cache, lambda parts: op_programs.indexer_write(parts, slot, given, target=self._target)
        )

    def gather_kv(self, cache: KVCache, slots: Tensor) -> Tensor:
        rows = None
        if cache.layout.role == "index":
            ops.check_keys(cache)
        else:
            rows = _rows_of(cache)
        width = cache.layout.width if rows is None else rows.latent + rows.rope
        if not slots.numel():
            return torch.empty(*slots.shape, width)
        flat = slots.reshape(-1)
        chosen = self._rows(flat, -1)
        found = op_programs.gather_kv(self._parts(cache), self._scale(cache), chosen, rows=rows)
        (out,) = self._hosts((found,), len(flat))
        return out.reshape(*slots.shape, width)

    def indexer_logits(
        self,
        q: Tensor,
        weights: Tensor,
        scale: float,
        cache: KVCache,
        block_table: Tensor,
        query_start: Tensor,
        visible: Tensor,
        max_rows: int,
    ) -> Tensor:
        ops.check_keys(cache)
        count = q.shape[0]
        if not count:
            return torch.empty(0, block_table.shape[1] * cache.block_size)
        query = self._rows(q)
        found = op_programs.indexer_logits(
            query,
            self._rows(weights, 0, len(query)),
            self._parts(cache)[0],
            *self._requests(_wider(host_of(block_table)), query_start),
            self._rows(visible, 0, len(query)),
            max_rows=bucket(max_rows),
            scale=float(scale),
            target=self._target,
        )
        (out,) = self._hosts((found,), count)
        return out[:, : block_table.shape[1] * cache.block_size].contiguous()

    def topk(self, scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, ...]:
        count = scores.shape[0]
        if not scores.numel():
            positions = torch.full((count, k), -1, dtype=torch.int32)
            return positions, positions.new_zeros(count), torch.zeros(count, dtype=torch.bool)
        given = self._rows(scores)
        seen = self._rows(visible, 0, len(given))
        return tuple(self._hosts(bisected(given, seen, k=k, target=self._target), count))

    def gemm(self, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        dtype = out_dtype or x.dtype
        if not x.numel():
            return torch.zeros(x.shape[0], weight.shape[0], dtype=dtype)
        rows, matrix = self._rows(x), self._matrix(weight)
        wanted = str(dtype).removeprefix("torch.")
        cut = any(len(part.sharding.device_set) > 1 for part in matrix.parts.values())
        if cut:
            rows = jax.device_put(rows, NamedSharding(self._devices.local, WHOLE))
            found = op_programs.cut_gemm(self._form, self._devices.local, rows, matrix, wanted)
        else:
            found = op_programs.gemm(self._form, rows, matrix, wanted)
        (out,) = self._hosts((found,), x.shape[0])
        return out

    def router(
        self, x: Tensor, weight: Tensor, topk: int, renormalize: bool, routed_scale: float
    ) -> tuple[Tensor, Tensor]:
        if not x.shape[0]:
            return torch.empty(0, topk), torch.empty(0, topk, dtype=torch.int64)
        found = moe.router(
            self._rows(x),
            self._array(weight),
            topk=topk,
            renormalize=renormalize,
            routed_scale=float(routed_scale),
        )
        weights, ids = self._hosts(found, x.shape[0])
        return weights, ids.to(torch.int64)

    def moe_experts(
        self,
        x: Tensor,
        w13: Weight,
        w2: Weight,
        weights: Tensor,
        ids: Tensor,
        first_expert: int = 0,
    ) -> Tensor:
        if not x.shape[0] or not w13.shape[0]:
            return torch.zeros(tuple(x.shape), dtype=x.dtype)
        rows = self._rows(x)
        first = self._array(torch.tensor([first_expert or 0], dtype=torch.int32))
        found = op_programs.experts(
            self._form,
            rows,
            self._matrix(packed_weight(w13, 2)),
            self._matrix(packed_weight(w2, 1)),
            self._rows(weights, 0, len(rows)),
            self._rows(ids, 0, len(rows)),
            first,
        )
        (out,) = self._hosts((found,), x.shape[0])
        return out

    def _array(self, tensor: Tensor) -> jax.Array:
        """On the first device; of what is cut over several, all of it."""
        if not isinstance(tensor, DeviceTensor):
            return self._devices.put(host_of(tensor))
        cut = len(tensor.array.addressable_shards) > 1 and not tensor.is_rows
        whole = cut and not tensor.array.is_fully_replicated
        return tensor.array if whole else tensor.local

    def _rows(self, tensor: Tensor, fill: float = 0, count: int | None = None) -> jax.Array:
        """Rows padded to ``count``, or to a power of two; those of a step on devices have as many
        as they have.
        """
        if isinstance(tensor, DeviceTensor) and tensor.is_rows:
            rows = tensor.local.shape[0]
            if rows >= LEAST_ROWS and count in (None, rows):
                return tensor.local
        many = count or bucket(tensor.shape[0], LEAST_ROWS)
        return self._devices.put(padded(host_of(tensor), many, fill))

    def _requests(self, table: Tensor, query_start: Tensor) -> tuple[jax.Array, jax.Array]:
        """A power of two of requests: those behind have no rows, and page 0."""
        starts = host_of(query_start)
        count = bucket(table.shape[0], _LEAST_REQUESTS)
        more = starts[-1:].expand(count - table.shape[0])
        return self._devices.put(padded(table, count)), self._devices.put(torch.cat((starts, more)))

    def _parts(self, cache: KVCache) -> Arrays:
        """Of a cache that ``resident_cache`` made its own arrays; of another, or of some of its
        pages, copies.
        """
        resident = [part.local for part in cache.parts if isinstance(part, DeviceTensor)]
        if len(resident) == len(cache.parts):
            return tuple(resident)
        held = kernel_parts(cache.layout, map(host_of, cache.parts))
        return tuple(
            jax.device_put(to_jax(one), self._devices.first, may_alias=False) for one in held
        )

    def _scale(self, cache: KVCache) -> jax.Array:
        return self._devices.put(ops.scale_of(cache))

    def _matrix(self, weight: Weight) -> Matrix:
        return Matrix(
            {name: self._array(part) for name, part in weight.parts.items()}, weight.format
        )

    def _write(self, cache: KVCache, write: Callable[[Arrays], Arrays]) -> None:
        """``write`` is donated what it is handed."""
        others = [one.others if isinstance(one, DeviceTensor) else [] for one in cache.parts]
        # What was handed over may be the caller's memory again once this returns.
        found = jax.block_until_ready(write(self._parts(cache)))
        for part, array, rest in zip(cache.parts, found, others, strict=True):
            if isinstance(part, DeviceTensor):
                part.replace(array, rest)
            else:
                bits = torch.from_dlpack(jax.device_put(array, self._devices.host)).clone()
                part.copy_(bits.view(part.dtype).reshape(part.shape))

    def _hosts(self, arrays: Any, count: int) -> list[Tensor]:
        """The first ``count`` rows of each, on the host."""
        found = jax.device_put(arrays, self._devices.host)
        return [torch.from_dlpack(one)[:count].clone() for one in found]


def _wider(table: Tensor) -> Tensor:
    """A power of two of pages."""
    return torch.nn.functional.pad(table, (0, bucket(table.shape[1]) - table.shape[1]))


def _rows_of(cache: KVCache, q: Tensor | None = None) -> Rows:
    return gathered_mla.rows_of(*ops.latent_kind(cache, q))


def _no_rows(q: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    return torch.empty(0, q.shape[1], rows.latent, dtype=q.dtype), torch.empty(0, q.shape[1])
