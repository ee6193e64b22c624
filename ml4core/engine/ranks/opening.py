"""Where the ranks of an engine meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from ml4core.api import Deployment
from ml4core.engine.collectives import ranks_of
from ml4core.engine.ranks import group
from ml4core.engine.ranks.group import Place

if TYPE_CHECKING:
    from ml4core.engine.replicas.lock_step import LockStep


def place_of(
    deployment: Deployment, lock_step: LockStep | None
) -> tuple[Place, dist.TCPStore | None]:
    """That of rank 0, and the store, if it lives in this process. ``RuntimeError`` if the process
    is in a group already.
    """
    group.check_free()
    size = ranks_of(deployment)
    if lock_step is None:
        store = group.open_store()
        return Place(0, size, store.port), store
    host, rank = deployment.data_parallel_address, lock_step.rank
    own = group.open_store(host) if rank == 0 else None
    port = lock_step.exchange(None if own is None else own.port)[0]
    return Place(0, size, port, host, rank, lock_step.size), own
