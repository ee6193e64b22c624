"""What a cached block is of, beside its tokens: whatever changes a byte of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

from ml4core.api import Deployment, KVLayout

_BYTES = 16


def cache_root(
    deployment: Deployment, layouts: Mapping[str, KVLayout], files: Iterable[Path] = ()
) -> bytes:
    """The parent of every first block of a deployment. Blocks of two deployments have one name only
    if the rows in them are the same, also where they outlive a process.

    It covers the weights' files by name, size and time of change, the model's table with all of its
    rope settings, the dtype, weight formats, layouts with their flavour of FP8, the page size, how
    ranks share out heads, layers and tokens, and the switches, some of which change weights.
    """
    stats = [(file.name, file.stat()) for file in sorted(files)]
    facts = (
        [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        deployment.model,
        deployment.dtype,
        sorted(deployment.weight_formats),
        deployment.device.arch,
        sorted((group, layout.id, layout.scale_rule) for group, layout in layouts.items()),
        deployment.block_size,
        deployment.tensor_parallel_size,
        deployment.pipeline_parallel_size,
        deployment.decode_context_parallel_size,
        deployment.prefill_context_parallel_size,
        sorted(deployment.attention_config.items()),
        repr(sorted(deployment.additional_config.items())),
    )
    return blake2b(repr(facts).encode(), digest_size=_BYTES).digest()
