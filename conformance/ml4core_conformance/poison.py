"""Fills fresh allocations with what no result may hold, so that an unwritten element shows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """While it lasts, torch fills what it allocates: floats with NaN, integers with their largest.

    Torch does that in its deterministic mode only, which may choose other kernels; so what is
    judged for repeatability must run outside. All is put back afterwards.
    """
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # In this mode torch warns of each kernel that isn't deterministic.
        warnings.filterwarnings("ignore", message=".*[Dd]eterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def allocations_are_poisoned(device: torch.device) -> bool:
    """Whether ``poisoned_allocations`` does anything on that device."""
    with poisoned_allocations():
        return bool(torch.isnan(torch.empty(64, device=device)).all())


def is_poison(found: Tensor) -> Tensor:
    """Which elements bool [...] hold what a poisoned allocation holds."""
    if found.is_floating_point():
        return torch.isnan(found)
    if found.dtype == torch.bool:
        return torch.zeros_like(found)  # its poison is True, which is a result as well
    return found == torch.iinfo(found.dtype).max


def leave_poison(like: Iterable[Tensor]) -> None:
    """Frees memory full of 0xFF bytes, NaN in every float: an allocator that hands out what was
    freed gives it to the next call's results.
    """
    for one in like:
        for _ in range(2):
            torch.full((max(1, one.nbytes),), 0xFF, dtype=torch.uint8, device=one.device)
