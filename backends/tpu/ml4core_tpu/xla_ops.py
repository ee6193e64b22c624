"""Kernels of the torch ops for torch-xla's lazy tensors: calls of the JAX programs, which become
part of the graph that torch-xla traces. ``tpu_ops`` has the same ones for torch-tpu.

Lazy tensors take no op that writes. So caches are made anew, and copied into the old ones' place by
``ops``: XLA makes that an update in place where the graph owns the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ml4core_tpu import torch_ops, torch_products, torch_writes
from ml4core_tpu.kernels.target import Target
from ml4core_tpu.lazy_call import LazyCall

Call = Callable[[Callable[..., Any], tuple[Any, ...], Hashable], Any]
"""As ``LazyCall``: a program, its arguments, and a key of all that it is bound to."""


@cache
def registered() -> None:
    """``register()``, once a process."""
    register()


def register(call: Call | None = None, target: Target = "host", device: str = "xla") -> None:
    """Registers a kernel for a device with every op that doesn't write. Once a process.

    Args:
        call: puts programs into the graph; for the CPU if not given.
        target: what kernels are made for: ``host`` where programs are lowered for the CPU.
        device: as torch calls it.
    """
    if call is None:
        call = LazyCall()
    _register_attention(call, target, device)
    _register_writes(call, target, device)
    _register_products(call, target, device)


def _int32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """JAX has no 64-bit integers here."""
    return tuple(one.to(torch.int32) for one in tensors)


def _register_attention(call: Call, target: Target, device: str) -> None:
    from ml4core_tpu.kernels import gathered_mla
    from ml4core_tpu.kernels.index_scores import index_scores
    from ml4core_tpu.kernels.sparse_mla import sparse_mla as tiled_mla
    from ml4core_tpu.kernels.topk import topk as bisected
    from ml4core_tpu.kernels.window_mla import window_mla as paged_mla

    @torch_ops.sparse_mla.register_kernel(device)
    def _sparse(q, parts, cache_scale, slots, lens, kind, latent, scale):
        arrays = tuple(torch_ops.latent_arrays(parts, kind))
        given = (q, arrays, cache_scale, *_int32(slots, lens))
        if kind != "tiles":
            rows = gathered_mla.rows_of(kind, latent, parts[0].shape[-1] - latent)
            return tuple(
                call(
                    partial(gathered_mla.sparse_mla, rows=rows, scale=scale),
                    given,
                    ("sparse", kind, latent, scale),
                )
            )

        def program(q, arrays, cache_scale, slots, lens):
            ropes = arrays[1] if len(arrays) > 1 else None
            given = (arrays[0], ropes, cache_scale, slots, lens)
            return tiled_mla(q, *given, scale=scale, target=target)

        return tuple(call(program, given, ("sparse", kind, latent, scale)))

    @torch_ops.window_mla.register_kernel(device)
    def _window(
        q, parts, cache_scale, table, starts, visible, kind, latent, rope, max_rows, scale, window
    ):
        program = partial(
            paged_mla,
            rows=gathered_mla.rows_of(kind, latent, rope),
            max_rows=max_rows,
            scale=scale,
            window=window or None,
            target=target,
        )
        arrays = tuple(torch_ops.latent_arrays(parts, kind))
        key = ("window", kind, latent, rope, max_rows, scale, window)
        given = (q, arrays, cache_scale, *_int32(table, starts, visible))
        return tuple(call(program, given, key))

    @torch_ops.gather_kv.register_kernel(device)
    def _gather(parts, cache_scale, slots, kind, latent, rope):
        flat = slots.reshape(-1).to(torch.int32)
        if kind == "lane33":
            given = (parts[0].unflatten(1, (33, 4)), flat)
            found = call(gathered_mla.gather_keys, given, "gather_keys")
        else:
            rows = gathered_mla.rows_of(kind, latent, rope)
            arrays = tuple(torch_ops.latent_arrays(parts, kind))
            program = partial(gathered_mla.gather_rows, rows=rows)
            found = call(program, (arrays, cache_scale, flat), ("gather", kind, latent, rope))
        return found.reshape(*slots.shape, latent + rope)

    @torch_ops.indexer_logits.register_kernel(device)
    def _scores(q, weights, keys, table, starts, visible, kind, max_rows, scale):
        array = keys.unflatten(1, (33, 4)) if kind == "lane33" else keys
        program = partial(index_scores, max_rows=max_rows, scale=scale, target=target)
        given = (q, weights, array, *_int32(table, starts, visible))
        return call(program, given, ("scores", max_rows, scale))

    @torch_ops.topk.register_kernel(device)
    def _topk(scores, visible, k):
        program = partial(bisected, k=k, target=target)
        return tuple(call(program, (scores, *_int32(visible)), ("topk", k)))


def _register_writes(call: Call, target: Target, device: str) -> None:
    from ml4core_tpu.kernels.cache_write import write_index_keys, write_latents
    from ml4core_tpu.kernels.row_write import write_numbers

    @torch_writes.kv_written.register_kernel(device)
    def _write(first, second, cache_scale, slots, latent, rope, kind):
        parts = torch_writes.parts_of(first, second)
        tail = (rope,) if rope.shape[1] else ()
        if kind != "tiles":

            def rows(cache, cache_scale, slots, latent, *tail):
                return (write_numbers(cache, cache_scale, slots, latent, *(tail or (None,))),)

            given = (parts[0], cache_scale, *_int32(slots), latent, *tail)
            return call(rows, given, "write_rows")[0], second.clone()

        def tiles(arrays, cache_scale, slots, latent, *tail):
            ropes = arrays[1] if len(arrays) > 1 else None
            given = (cache_scale, slots, latent, *(tail or (None,)))
            return write_latents(arrays[0], ropes, *given, target=target)

        arrays = tuple(torch_ops.latent_arrays(parts, kind))
        given = (arrays, cache_scale, *_int32(slots), latent, *tail)
        found = call(tiles, given, "write_latents")
        written = [new.reshape(part.shape) for new, part in zip(found, parts, strict=True)]
        return written[0], written[1] if len(written) > 1 else second.clone()

    @torch_writes.indexer_written.register_kernel(device)
    def _index_write(keys, slots, key, kind):
        if kind == "lane33":
            program = partial(write_index_keys, target=target)
            given = (keys.unflatten(1, (33, 4)), *_int32(slots), key)
            return call(program, given, "write_index_keys").reshape(keys.shape)

        def rows(cache, cache_scale, slots, key):
            return write_numbers(cache, cache_scale, slots, key, None)

        given = (keys, torch.ones(1, device=keys.device), *_int32(slots), key)
        return call(rows, given, "write_keys")


def _register_products(call: Call, target: Target, device: str) -> None:
    from ml4core_tpu.kernels import fp8_matmul as matmul
    from ml4core_tpu.kernels import moe
    from ml4core_tpu.kernels.fp4_experts import MXFP4, NVFP4

    @torch_products.fp8_matmul.register_kernel(device)
    def _fp8(x, weight, scale, out_dtype, quantize):
        program = partial(
            matmul.fp8_matmul,
            out_dtype=torch_products._jax_dtype(out_dtype),
            quantize=quantize,
            target=target,
        )
        return call(program, (x, weight, scale), ("fp8_matmul", out_dtype, quantize))

    @torch_products.wide_matmul.register_kernel(device)
    def _wide(x, weight, out_dtype):
        program = partial(matmul.wide_matmul, out_dtype=torch_products._jax_dtype(out_dtype))
        return call(program, (x, weight), ("wide_matmul", out_dtype))

    @torch_products.router.register_kernel(device)
    def _router(x, weight, topk, renormalize, routed_scale):
        program = partial(moe.router, topk=topk, renormalize=renormalize, routed_scale=routed_scale)
        key = ("router", topk, renormalize, routed_scale)
        weights, ids = call(program, (x, weight), key)
        return weights, ids.to(torch.int64)

    @torch_products.fp4_experts.register_kernel(device)
    def _fp4(x, w13, w2, weights, ids, first_expert, format):
        program = partial(moe.fp4_moe, fp4=NVFP4 if format == "nvfp4" else MXFP4, target=target)
        first = torch.full((), first_expert, dtype=torch.int32, device=x.device)
        given = (x, tuple(w13), tuple(w2), weights, *_int32(ids), first)
        return call(program, given, ("fp4_experts", format))

    @torch_products.fp8_experts.register_kernel(device)
    def _fp8_experts(x, w13, w2, weights, ids, first_expert, quantize):
        program = partial(moe.fp8_moe, quantize=quantize, target=target)
        first = torch.full((), first_expert, dtype=torch.int32, device=x.device)
        given = (x, tuple(w13), tuple(w2), weights, *_int32(ids), first)
        return call(program, given, ("fp8_experts", quantize))

    @torch_products.wide_experts.register_kernel(device)
    def _wide_experts(x, w13, w2, weights, ids, first_expert):
        first = torch.full((), first_expert, dtype=torch.int32, device=x.device)
        given = (x, w13, w2, weights, *_int32(ids), first)
        return call(moe.wide_moe, given, "wide_experts")
