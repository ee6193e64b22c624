"""What ranks of a deployment exchange: by torch.distributed, sums by AITER where it serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ml4core.api import Deployment, Refusal
from ml4core_rocm import aiter_functions
from ml4core_rocm.kernels.aiter_all_reduce import AiterAllReduce
from ml4core_rocm.providers import peers
from ml4core_rocm.switches import Switches

Sum = Callable[[Tensor], Tensor]
Installed = Callable[[tuple[str, ...]], tuple[Refusal, ...]]

PART = "all_reduce"

# By their names of torch 2.13 on, where those before are deprecated.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GroupCollectives:
    """Collectives of a process group, the default one if None.

    Args:
        summing: makes what all-reduces in torch's place, from torch's way for what it doesn't
            take; None: torch does.
        handles: a group that ``summing`` exchanges over, made for this object; ended with it.
    """

    def __init__(
        self,
        group: Any = None,
        summing: Callable[[Sum], AiterAllReduce] | None = None,
        handles: Any = None,
    ) -> None:
        self._group = group
        self._handles = handles
        self._own: AiterAllReduce | None = None
        if summing:
            try:
                self._own = summing(self.summed)
            except BaseException:
                self.close()
                raise
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)

    def summed(self, x: Tensor) -> Tensor:
        """The sum by torch, in x's dtype."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.summed(x) if self._own is None else self._own(x)

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

    def close(self) -> None:
        """Gives back what sums hold; ``group`` is its maker's. Twice is once."""
        own, self._own = self._own, None
        handles, self._handles = self._handles, None
        try:
            if own is not None:
                own.close()
        finally:
            # With the default group all others have ended.
            if handles is not None and dist.is_initialized():
                dist.destroy_process_group(handles)

    def _divided(self, x: Tensor, dim: int) -> Tensor:
        """``x`` with the axis that is cut in front. ``ValueError`` for one that ranks don't
        divide.
        """
        if x.shape[dim] % self.world_size:
            raise ValueError(
                f"{x.shape[dim]} rows along axis {dim} don't divide among {self.world_size} ranks"
            )
        return x.movedim(dim, 0).contiguous()


def joined(
    deployment: Deployment,
    switches: Switches,
    device: torch.device,
    installed: Installed = aiter_functions.refusals,
) -> tuple[GroupCollectives | None, Mapping[str, str]]:
    """The collectives of a deployment, and who sums and why, in words for the start-up report.
    None and nothing for one rank. ``RuntimeError`` for a process that has joined no group of the
    deployment's size.
    """
    size = deployment.tensor_parallel_size
    if size == 1:
        return None, {}
    there = dist.get_world_size() if dist.is_initialized() else 1
    if there != size:
        raise RuntimeError(
            f"--tensor-parallel-size {size}: this process has joined a group of {there} ranks; "
            f"works: torch.distributed.init_process_group of {size}"
        )
    (peer,) = peers(PART)
    reasons = peer.reasons(None, deployment, switches, installed)
    if reasons:
        why = "; ".join(refusal.reason for refusal in reasons)
        return GroupCollectives(), {"all-reduce": f"torch.distributed; not {peer.name}: {why}"}
    # The library trades handles over the host, in a group that every rank makes.
    group = dist.new_group(backend="gloo")
    told = {"all-reduce": f"{peer.name} {aiter_functions.release()}"}

    def summing(torchs: Sum) -> AiterAllReduce:
        return AiterAllReduce(group, device, torchs)

    return GroupCollectives(summing=summing, handles=group), told
