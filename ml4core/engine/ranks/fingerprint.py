"""Whether all ranks have opened the same."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ml4core.api import Deployment
from ml4core.models.errors import CheckpointError


def fingerprint(deployment: Deployment) -> str:
    """Equal on ranks that have the same model, flags and kind of device."""
    facts = (
        deployment.model,
        deployment.dtype,
        sorted(deployment.weight_formats),
        deployment.weight_bytes,
        deployment.kv_layout,
        deployment.index_layout,
        sorted(deployment.needs),
        deployment.device.arch,
    )
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def check_fingerprints(deployment: Deployment, theirs: Sequence[str]) -> None:
    """Raises ``CheckpointError`` for those of other ranks, from 1 on, that differ."""
    own = fingerprint(deployment)
    other = [str(rank) for rank, one in enumerate(theirs, 1) if one != own]
    if other:
        raise CheckpointError(
            f"{deployment.model.name}: its files, or the backend, are others to rank "
            f"{', '.join(other)} than to rank 0; works: files that nobody changes"
        )
