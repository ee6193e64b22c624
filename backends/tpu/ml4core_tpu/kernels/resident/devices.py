"""The devices that a session's arrays stay on: TPUs, or virtual devices of the host instead."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from torch import Tensor

from ml4core_tpu.bridge import to_jax
from ml4core_tpu.kernels.layer.mesh import DATA, TENSOR
from ml4core_tpu.kernels.target import Target

ROWS = PartitionSpec(DATA)
WHOLE = PartitionSpec()


class Devices:
    """A mesh [data, tensor], of which a process has one row. With one device it is 1 x 1.

    Attributes:
        target: what kernels are made for there: ``tpu``, or ``host``, where XLA interprets them.
        own: this process's devices, by tensor rank.
    """

    def __init__(self, mesh: Mesh, target: Target) -> None:
        self.mesh = mesh
        self.target: Target = target
        self.data, self.tensor = mesh.devices.shape
        owners = [row[0].process_index for row in mesh.devices]
        self.own: tuple[Any, ...] = tuple(mesh.devices[owners.index(jax.process_index())])

    @cached_property
    def first(self) -> SingleDeviceSharding:
        """Where ops run."""
        return SingleDeviceSharding(self.own[0])

    @cached_property
    def local(self) -> Mesh:
        """This process's devices alone, [tensor]."""
        return Mesh(self.own, (TENSOR,))

    @cached_property
    def host(self) -> Any:
        """The device of JAX that is the host."""
        return jax.local_devices(backend="cpu")[0]

    def put(self, tensor: Tensor) -> jax.Array:
        """A tensor of the host on the first device. It may share the tensor's memory."""
        return jax.device_put(to_jax(tensor), self.first)

    def pages(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Zeros [blocks, ...] for each data rank, one after the other, whole on its tensor ranks.
        Made on the devices: memory of their own, which can be donated.
        """
        whole = (self.data * shape[0], *shape[1:])
        placed = NamedSharding(self.mesh, ROWS)
        return jax.jit(lambda: jnp.zeros(whole, dtype), out_shardings=placed)()

    def copied(self, tensor: Tensor, like: jax.Array) -> jax.Array:
        """A tensor of the host as this process's part of an array that lies as ``like`` does, on
        memory of its own. Waits for the copy: the tensor may change as soon as this returns.
        """
        local = like.sharding.shard_shape(like.shape)
        array = to_jax(tensor).reshape(local)
        places = [shard.device for shard in like.addressable_shards]
        parts = [jax.device_put(array, place, may_alias=False) for place in places]
        jax.block_until_ready(parts)
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)
