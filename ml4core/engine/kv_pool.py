"""The caches of a plan, one a KV group and owner, and the pools that hand out their pages."""

from __future__ import annotations

from collections.abc import Mapping

from ml4core.api import KVCache, KVLayout, ModelSpec, Session
from ml4core.engine.block_pool import BlockPool
from ml4core.planning import kv
from ml4core.planning.kv import Pools

Caches = Mapping[str, Mapping[int, KVCache]]
"""By group, then by owning layer."""


def plan_pools(
    spec: ModelSpec,
    layouts: Mapping[str, KVLayout],
    block_size: int,
    tokens_each: int,
    sequences: int,
) -> Pools:
    """Pools that hold ``sequences`` sequences of ``tokens_each`` tokens of the decoder at once."""
    return kv.pools_for(kv.target_groups(spec, layouts), block_size, tokens_each, sequences)


def allocate(session: Session, plan: Pools) -> tuple[Caches, dict[str, BlockPool]]:
    """The caches of every owner, and the pools. Consumers get no storage."""
    caches = {
        group.name: {
            layer: session.alloc_kv(group.layout, plan.blocks[group.name], plan.block_size)
            for layer in group.owners
        }
        for group in plan.groups
    }
    return caches, {name: BlockPool(name, blocks) for name, blocks in plan.blocks.items()}
