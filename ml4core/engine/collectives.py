"""Which rank has what, and how ranks exchange."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ml4core.api import Deployment
from ml4core.compose.single_rank import SingleRank
from ml4core.models.shards import Shard

__all__ = ["SingleRank", "TorchCollectives", "shard_of"]

# By their names of torch 2.13 on, where those before are deprecated.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ranks_of(deployment: Deployment) -> int:
    """Ranks of a replica that core has to do with: one session of each."""
    return 1 if deployment.spanning_session else deployment.tensor_parallel_size


def shard_of(deployment: Deployment, rank: int) -> Shard:
    """What rank ``rank`` of a replica has of the weights. With expert parallelism, routed experts
    are whole and shared out over the ranks of all replicas, else cut over them. ``ValueError`` for
    a rank that isn't there.
    """
    size, replica = ranks_of(deployment), deployment.data_parallel_rank
    replicas = deployment.data_parallel_size
    if deployment.enable_expert_parallel:
        own = replica * size + rank
        return Shard(rank, size, own, size * replicas, replica, replicas)
    return Shard(rank, size, dp_rank=replica, dp_size=replicas)


class TorchCollectives:
    """Those of torch.distributed: of a process group, the default one if None, which the process
    has joined before.

    Sums are in the tensor's dtype. Nothing waits for the device but what a group's backend does on
    the host.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``RuntimeError`` for a process that has joined no group."""
        if not dist.is_initialized():
            raise RuntimeError(
                "this process has joined no group of ranks; "
                "works: torch.distributed.init_process_group first"
            )
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        given = x.movedim(dim, 0).contiguous()
        found = given.new_empty(self.world_size * given.shape[0], *given.shape[1:])
        _gather(found, given, group=self._group)
        return found.movedim(0, dim).contiguous()

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        given = self._divided(x, dim)
        found = given.new_empty(given.shape[0] // self.world_size, *given.shape[1:])
        _reduce_scatter(found, given, group=self._group)
        return found.movedim(0, dim).contiguous()

    def all_to_all(self, x: Tensor, dim: int = 0) -> Tensor:
        given = self._divided(x, dim)
        found = torch.empty_like(given)
        dist.all_to_all_single(found, given, group=self._group)
        return found.movedim(0, dim).contiguous()

    def _divided(self, x: Tensor, dim: int) -> Tensor:
        """``x`` with the axis that is cut in front. ``ValueError`` for one that ranks don't
        divide.
        """
        if x.shape[dim] % self.world_size:
            raise ValueError(
                f"{x.shape[dim]} rows along axis {dim} don't divide among {self.world_size} ranks"
            )
        return x.movedim(dim, 0).contiguous()
