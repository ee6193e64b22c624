"""Ranks agree on what stands against the specialised decode, before any of them waits for another
on the device: what one rank alone knows, such as its GPU or its weights, refuses all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ml4core.api import Refusal, Refused


class Group(Protocol):
    """The tensor-parallel ranks on the host."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: object) -> Sequence[Any]:
        """Every rank's value, in rank order. Raises ``RuntimeError`` if one doesn't come."""
        ...


class One:
    """A group of one."""

    rank = 0
    size = 1

    def gather(self, value: object) -> Sequence[Any]:
        return (value,)


class TorchGroup:
    """A group of torch.distributed, whose backend runs on the host (gloo)."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def gather(self, value: object) -> Sequence[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found


def agree(group: Group, reasons: Iterable[Refusal], stage: str) -> None:
    """Returns on every rank, or raises one ``Refused`` on every rank, with the reasons of all: a
    reason that some ranks alone have names them.
    """
    mine = tuple(reasons)
    try:
        everyone = group.gather((stage, mine))
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        reason = f"the other ranks did not answer at {stage!r}: {text}"
        lost = Refusal("rocm", "agreement of ranks", reason, "all ranks alive")
        raise Refused([*mine, lost], what="the specialised decode") from error
    stages = {theirs for theirs, _ in everyone}
    holders: dict[Refusal, list[int]] = {}
    for rank, (_, found) in enumerate(everyone):
        for refusal in found:
            holders.setdefault(refusal, []).append(rank)
    told = [_told(refusal, ranks, group.size) for refusal, ranks in holders.items()]
    if len(stages) > 1:
        reason = f"ranks stand at different stages: {', '.join(sorted(map(repr, stages)))}"
        told.append(Refusal("rocm", "agreement of ranks", reason, "one version on all ranks"))
    if told:
        raise Refused(told, what="the specialised decode")


def _told(refusal: Refusal, ranks: Sequence[int], size: int) -> Refusal:
    if len(ranks) == size:
        return refusal
    names = ", ".join(map(str, ranks))
    return replace(refusal, reason=f"{refusal.reason} (on rank {names} of {size})")
