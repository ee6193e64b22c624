"""The sizes of a deployment's groups of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ml4core.engine.args import EngineArgs


@dataclass(frozen=True)
class Ranks:
    """Sizes of the groups.

    A data parallel replica is ``tp * pcp`` ranks with a cache of its own; routed experts are shared
    out over all ranks of all replicas, by width or, with expert parallelism, whole.
    """

    tp: int = 1
    dp: int = 1
    dcp: int = 1
    pcp: int = 1
    expert_parallel: bool = False

    @classmethod
    def of(cls, args: EngineArgs) -> Ranks:
        return cls(
            args.tensor_parallel_size,
            args.data_parallel_size,
            args.decode_context_parallel_size,
            args.prefill_context_parallel_size,
            args.enable_expert_parallel,
        )

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pcp

    @property
    def ep(self) -> int:
        return self.world if self.expert_parallel else 1

    @property
    def expert_width(self) -> int:
        """Ranks that share the width of each routed expert."""
        return 1 if self.expert_parallel else self.world
