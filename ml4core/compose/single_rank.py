"""Collectives of one rank."""

from __future__ import annotations

from torch import Tensor


class SingleRank:
    """Each operation is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, dim: int = 0) -> Tensor:
        return x
