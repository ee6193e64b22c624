"""What the model asks of a group of ranks. With one rank each call is the identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Collectives(Protocol):
    """Collective operations over the ranks of a deployment. All are functional: the input is not
    changed.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of ``x`` (any shape and float dtype)."""
        ...

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Every rank's ``x``, in rank order, joined along ``dim``."""
        ...

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's equal share, along ``dim``, of the sum over ranks."""
        ...

    def all_to_all(self, x: Tensor, dim: int = 0) -> Tensor:
        """Chunk ``r`` along ``dim`` goes to rank ``r``; what comes back is joined in rank order."""
        ...
