"""Sizes of the page pools, one a KV group, and the caches that they index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ml4core.api import KVLayout, ModelSpec, Session
from ml4core.engine.block_pool import BlockPool
from ml4core.models.mistral_large4 import KVState

GROUPS = ("latent", "index")


@dataclass(frozen=True)
class KVPlan:
    """Sizes of the pools.

    Attributes:
        layouts: by group; a model without an indexer has no ``index`` group.
        owners: layers that own storage, by group.
        blocks: pages by group, the null page included.
    """

    layouts: Mapping[str, KVLayout]
    owners: Mapping[str, tuple[int, ...]]
    blocks: Mapping[str, int]
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        return sum(
            len(self.owners[g]) * layout.bytes_per_token for g, layout in self.layouts.items()
        )

    @property
    def nbytes(self) -> int:
        return sum(
            len(self.owners[g]) * self.blocks[g] * self.block_size * layout.bytes_per_token
            for g, layout in self.layouts.items()
        )

    @property
    def tokens(self) -> int:
        """Tokens that fit: those of the smallest pool."""
        return min((blocks - 1) * self.block_size for blocks in self.blocks.values())


def plan_pools(
    spec: ModelSpec,
    layouts: Mapping[str, KVLayout],
    block_size: int,
    tokens_each: int,
    sequences: int,
) -> KVPlan:
    """Pools that hold ``sequences`` sequences of ``tokens_each`` tokens at once."""
    owners = {"latent": spec.kv_owners, "index": spec.index_owners}
    used = {group: layouts[group] for group in GROUPS if owners[group]}
    for layout in used.values():
        layout.check_block_size(block_size)
    blocks = -(-tokens_each // block_size) * sequences + 1
    return KVPlan(used, {g: owners[g] for g in used}, {g: blocks for g in used}, block_size)


def allocate(session: Session, plan: KVPlan) -> tuple[KVState, dict[str, BlockPool]]:
    """The caches of every owner, and the pools. Consumers get no storage."""
    caches = {
        group: {
            layer: session.alloc_kv(plan.layouts[group], plan.blocks[group], plan.block_size)
            for layer in plan.owners[group]
        }
        for group in plan.layouts
    }
    pools = {group: BlockPool(group, plan.blocks[group]) for group in plan.layouts}
    return KVState(caches["latent"], caches.get("index", {})), pools
