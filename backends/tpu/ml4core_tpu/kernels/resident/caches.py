"""Caches and matrices on devices."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from torch import Tensor

from ml4core.api import KVCache, KVLayout, Weight
from ml4core.api.known_layouts import PER_TENSOR
from ml4core_tpu.bridge import to_jax
from ml4core_tpu.kernels.layer.mesh import TENSOR
from ml4core_tpu.kernels.resident.devices import Devices
from ml4core_tpu.kernels.resident.tensor import DeviceTensor
from ml4core_tpu.ops import INDEX_KINDS, LATENT_KINDS
from ml4core_tpu.torch_ops import bits_of, latent_arrays

MOST_TOKENS = 2**31 - 1
"""Of a pool: slots are int32 on devices."""


def resident_cache(layout: KVLayout, blocks: int, block_size: int, devices: Devices) -> KVCache:
    """A cache of zeros, whole on each of this process's devices. ``ValueError`` for one with more
    tokens than slots can name.
    """
    if blocks * block_size > MOST_TOKENS:
        raise ValueError(
            f"{blocks} pages of {block_size} tokens are {blocks * block_size}; slots on TPUs name "
            f"{MOST_TOKENS} at most (works: --num-gpu-blocks-override {MOST_TOKENS // block_size})"
        )
    shapes = [
        torch.empty(part.shape(blocks, block_size), dtype=getattr(torch, part.dtype), device="meta")
        for part in layout.parts
    ]
    parts = tuple(
        DeviceTensor(
            devices.pages(tuple(held.shape), str(held.dtype).removeprefix("torch.")),
            devices,
            tuple(part.shape),
            part.dtype,
        )
        for part, held in zip(shapes, kernel_parts(layout, shapes), strict=True)
    )
    scale = torch.ones(1) if layout.scale_rule == PER_TENSOR else None
    return KVCache(layout, block_size, parts, scale)


def kernel_parts(layout: KVLayout, parts: Iterable[Tensor]) -> list[Tensor]:
    """Parts of a cache in the shape and with the bits that kernels have."""
    held = [bits_of(part) for part in parts]
    if LATENT_KINDS.get(layout.id) == "tiles":
        return latent_arrays(held, "tiles")
    if INDEX_KINDS.get(layout.id) == "lane33":
        return [part.unflatten(1, (33, 4)) for part in held]
    return held


def resident_weight(weight: Weight, devices: Devices, cut: bool = False) -> Weight:
    """A matrix on the first device. ``cut``: its rows over all of this process's, if that goes."""
    rows = weight.parts["data"].shape[0]
    # A scale that serves several rows is cut with them, or nothing is.
    whole = all(
        part.ndim > 0 and part.shape[0] % devices.tensor == 0 and rows % part.shape[0] == 0
        for part in weight.parts.values()
    )
    place: Sharding = devices.first
    if cut and whole and devices.tensor > 1:
        place = NamedSharding(devices.local, PartitionSpec(TENSOR))

    def held(part: Tensor) -> DeviceTensor:
        # Waited for: what is read from a checkpoint may be overwritten by what comes next.
        array = jax.block_until_ready(jax.device_put(to_jax(part), place, may_alias=False))
        return DeviceTensor(array, devices, tuple(part.shape), part.dtype)

    parts: dict[str, Tensor] = {name: held(part) for name, part in weight.parts.items()}
    return Weight(weight.format, weight.shape, parts)
