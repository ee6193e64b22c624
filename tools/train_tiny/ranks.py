"""The processes that train one model together, each on its own device with its own windows.

Each holds all weights and takes the same steps,
by the mean of all gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Its functions' defaults hold the group that is joined when it is imported, which torch does when
# it first compiles: the group would outlive leave(), and its threads abort an ending process.
import torch.distributed.nn
from torch import Tensor

BUCKET = 32 << 20
"""Values that are sent at a time."""


@dataclass(frozen=True)
class Ranks:
    """This process's number, of `size`. One alone needs no process group."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints and saves."""
        return self.rank == 0

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    @property
    def own(self) -> slice:
        """Which of a sequence of items are this process's."""
        return slice(self.rank, None, self.size)

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor]) -> None:
        """Put the mean over all processes in place of each tensor; all of one dtype and device."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([t.flatten() for t in bucket])
            dist.all_reduce(flat)
            flat /= self.size
            parts = flat.split([t.numel() for t in bucket])
            torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def mean(self, value: Tensor) -> Tensor:
        """The mean of `value` over all processes, without a gradient."""
        value = value.detach().clone()
        self.average([value])
        return value

    @torch.no_grad()
    def align(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all processes hold the same bits; where they don't, all get the first one's."""
        if self.size == 1:
            return True
        same = True
        for bucket in _buckets(tensors):
            flat = torch.cat([t.flatten() for t in bucket])
            theirs = flat.clone()
            dist.broadcast(theirs, 0)
            differ = (theirs != flat).any().float().reshape(1)
            dist.all_reduce(differ)
            if differ.item():
                same = False
                parts = theirs.split([t.numel() for t in bucket])
                for part, tensor in zip(parts, bucket, strict=True):
                    tensor.copy_(part.view_as(tensor))
        return same

    def agree(self, value: int) -> int:
        """What the first process says. Waits for the processes, not for their devices."""
        if self.size == 1:
            return value
        held = torch.tensor([value])
        dist.broadcast(held, 0)
        return int(held.item())

    def gather(self, value: Any) -> list[Any]:
        """What each process says, in their order; plain data."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join(device: str) -> tuple[Ranks, torch.device]:
    """Meet the other processes, if the environment tells of any; and this process's own device."""
    rank, size, local = (
        int(os.environ.get(n, d))
        for n, d in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    own = torch.device(device)
    if own.type == "cuda" and own.index is None:
        own = torch.device("cuda", local)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if size > 1:
        # Both kinds: decisions of the loop travel between processors, without waiting for devices.
        dist.init_process_group("cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo")
    return Ranks(rank, size), own


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """`tensors` in order, in groups of at most BUCKET values, larger ones alone."""
    found: list[list[Tensor]] = []
    size = BUCKET
    for tensor in tensors:
        if size + tensor.numel() > BUCKET:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.numel()
    return found
