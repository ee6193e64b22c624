"""The caches of a plan, one a KV group and owner, and the pools that hand out their pages."""

from __future__ import annotations

from collections.abc import Mapping

from ml4core.api import KVCache, Session
from ml4core.engine.block_pool import BlockPool
from ml4core.planning.kv import Pools

Caches = Mapping[str, Mapping[int, KVCache]]
"""By group, then by owning layer."""


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
