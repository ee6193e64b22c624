"""Which fault an exception within a step is."""

from __future__ import annotations

from ml4core import registry
from ml4core.api import Fault
from ml4core.compose.contract import ContractError
from ml4core.engine.block_pool import PoolExhausted

MORE_MEMORY = "a smaller --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs"
"""What leaves a step more of the device."""


def fault_of(error: BaseException, step: int) -> Fault:
    told = registry.describe(error)
    if isinstance(error, ContractError):
        return Fault("contract", told, step)
    if registry.lacks_memory(error) and not isinstance(error, PoolExhausted):
        return Fault("memory", f"{told} (works: {MORE_MEMORY})", step)
    return Fault("exception", told, step)
