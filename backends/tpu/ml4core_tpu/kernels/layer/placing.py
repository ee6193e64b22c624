"""Arrays of this process onto its devices of a mesh, and back.

A process holds one row of the mesh: a data rank, whose tensor ranks are its devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ml4core_tpu.kernels.layer.form import Matrix
from ml4core_tpu.kernels.layer.mesh import (
    BOTH,
    DATA,
    EXPERTS,
    GATED,
    TENSOR,
    ranked_rows,
    weight_specs,
)
from ml4core_tpu.kernels.layer.products import PACKED


class Placing:
    """Where arrays of this process lie on ``mesh`` [data, tensor]."""

    def __init__(self, mesh: Mesh, by_width: bool) -> None:
        """``by_width``: of experts each rank has a part, in place of some whole ones."""
        self.mesh = mesh
        self.by_width = by_width
        self.data, self.tensor = mesh.devices.shape
        owners = [row[0].process_index for row in mesh.devices]
        self._devices = mesh.devices[owners.index(jax.process_index())]
        self._everywhere = NamedSharding(Mesh(self._devices, (TENSOR,)), PartitionSpec())

    def shape(self, array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """What an array of each data rank is on the whole mesh. Parts of data ranks stand one after
        the other.
        """
        sizes = list(array.shape)
        for axis, over in enumerate(spec):
            if over in (DATA, BOTH):
                sizes[axis] *= self.data
        return jax.ShapeDtypeStruct(
            tuple(sizes), array.dtype, sharding=NamedSharding(self.mesh, spec)
        )

    def shapes(self, tree: Any, specs: Any) -> Any:
        return jax.tree.map(self.shape, tree, specs)

    def spread(self, tree: Any, specs: Any) -> Any:
        """Arrays of this data rank, each whole on all of its devices: specs name no tensor axis."""

        def joined(array: jax.Array, spec: PartitionSpec) -> jax.Array:
            whole = self.shape(array, spec)
            parts = [shard.data for shard in array.addressable_shards]
            return jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, parts)

        return jax.tree.map(joined, jax.device_put(tree, self._everywhere), specs)

    def cut(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """An array of this data rank, cut over its devices where ``spec`` names the tensor axis."""
        whole = self.shape(array, spec)
        parts = []
        for rank, device in enumerate(self._devices):
            index = tuple(
                self._share(rank, size) if over in (TENSOR, BOTH) else slice(None)
                for size, over in zip(array.shape, (*spec, *[None] * array.ndim), strict=False)
            )
            parts.append(jax.device_put(np.asarray(array)[index], device))
        return jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, parts)

    def weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """A layer's weights, as ``weights_of`` gives them, cut over this process's devices. Experts
        that are packed and cut by width are those of ``packed_by_width``. ``first_expert`` is of
        this data rank. ``ValueError``, naming the weight, for one that doesn't divide;
        blocks that would be cut are told by ``cut_refusals``, before.
        """
        specs = weight_specs(weights, self.by_width)

        def placed(name: str, value: Any) -> Any:
            if not isinstance(value, Matrix):
                return self.cut(value, specs[name])
            packed = value.format.startswith(PACKED)
            whole = name in EXPERTS and (packed or not self.by_width)
            gated = name in GATED and not whole
            parts = {
                key: self.cut(self._gated(part, spec) if gated else part, spec)
                for (key, part), spec in zip(
                    value.parts.items(), specs[name].parts.values(), strict=True
                )
            }
            return Matrix(parts, value.format)

        found = {}
        for name, value in (weights | {"first_expert": self._first(weights)}).items():
            try:
                found[name] = placed(name, value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return found

    def own(self, tree: Any) -> Any:
        """This data rank's part of arrays over the mesh, from the first of its devices."""
        return jax.tree.map(lambda array: array.addressable_shards[0].data, tree)

    def _first(self, weights: Mapping[str, Any]) -> jax.Array:
        """The first expert of each tensor rank, int32 [tensor]."""
        first, stack = weights["first_expert"], weights.get("experts_w13")
        if stack is None or self.by_width:
            return first.repeat(self.tensor)
        each = stack.data.shape[0] // self.tensor
        return first + each * jnp.arange(self.tensor, dtype=jnp.int32)

    def _gated(self, part: Any, spec: PartitionSpec) -> Any:
        axis = next((at for at, over in enumerate(spec) if over), None)
        return part if axis is None else ranked_rows(part, self.tensor, axis)

    def _share(self, rank: int, size: int) -> slice:
        if size % self.tensor:
            raise ValueError(f"{size} don't divide into {self.tensor} tensor ranks")
        each = size // self.tensor
        return slice(rank * each, (rank + 1) * each)
